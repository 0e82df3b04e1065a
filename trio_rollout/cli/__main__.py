"""``python -m trio_rollout.cli``: the command line without an installed script."""

from ._entry import main

if __name__ == "__main__":
    main(prog_name="trio-rollout")
