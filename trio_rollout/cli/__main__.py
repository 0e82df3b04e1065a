"""``python -m trio_rollout.cli``: the command without an installed script. Python asks for a module of this name."""

from ._entry import main

if __name__ == "__main__":
    main(prog_name="trio-rollout")
