"""The exit status of the command ``trio-rollout``."""

import enum


class ExitStatus(enum.IntEnum):
    """The exit status of the command."""

    SCORED = 0
    """Every group was scored (or dropped by the filter)."""
    FAILED = 1
    """The run failed."""
    USAGE = 2
    """The command line or the configuration is wrong."""
    QUARANTINED = 3
    """Some groups were quarantined; they are listed."""
    INTERRUPTED = 130
    """Ctrl-C or SIGTERM (128 + SIGINT, as shells report it)."""
