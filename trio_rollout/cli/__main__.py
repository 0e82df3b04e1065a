"""``python -m trio_rollout.cli``: the command line without an installed script."""

from ._tiny_server import tiny_server

if __name__ == "__main__":
    import click

    group = click.Group("trio-rollout", commands=[tiny_server])
    group(prog_name="trio-rollout")
