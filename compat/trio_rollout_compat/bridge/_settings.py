"""The bridge's settings, and its statistics: calls that are alive, and what asyncio functions did wrong."""

import enum
from collections.abc import Mapping

import attrs

from trio_rollout.lowlevel import seconds


class OnLeak(enum.Enum):
    """The policy for tasks that still run when the asyncio function that started them has ended.

    Tasks that were started by ``call_keeping`` are meant to go on, and are not affected.
    """

    CANCEL = "cancel"
    """They are cancelled and waited for, within the grace. The call's result stands."""
    WARN = "warn"
    """They are named in the log and go on; the bridge cancels them when it is left. For libraries that start
    long-lived tasks (connection pools, flushers) at their first use."""
    ERROR = "error"
    """They are cancelled and waited for, and a call that would have returned raises LeakedTasks."""


class Misuse(enum.Enum):
    """A mistake of asyncio code; counted by function."""

    SWALLOWED = "swallowed"
    """The function caught a cancellation and returned. Its result was discarded."""
    ABANDONED = "abandoned"
    """The function did not end within the grace after it was cancelled. It goes on, and the bridge no longer waits for it."""
    LEAKED = "leaked"
    """The function returned while tasks that it had started still ran; counted by task. A server or a timer that it left
    behind starts more of them later; that is counted once for a call, and not under ``OnLeak.WARN``."""
    BLOCKED = "blocked"
    """One step of the function kept the event loop longer than ``BridgeSettings.slow_step``."""
    EXITED = "exited"
    """The function raised SystemExit, KeyboardInterrupt or another exception that is meant to end a process."""
    CRASHED = "crashed"
    """A background task or a callback of the function raised, and no code was left to handle it."""


@attrs.frozen(kw_only=True)
class BridgeSettings:
    """All times are seconds.

    ``again``: time between two deliveries of a cancellation that has no effect. ``grace``: time that a cancelled call has
    until it is abandoned. ``slow_step``: a step that takes the loop longer is counted as BLOCKED. ``answer``: time that the
    host's loop has to answer when the bridge is opened.

    Raises:
      SettingsError: a time is not a finite positive number.
    """

    again: float = attrs.field(default=0.5, validator=seconds)
    grace: float = attrs.field(default=5.0, validator=seconds)
    slow_step: float = attrs.field(default=1.0, validator=seconds)
    answer: float = attrs.field(default=10.0, validator=seconds)
    on_leak: OnLeak = attrs.field(default=OnLeak.CANCEL, validator=attrs.validators.instance_of(OnLeak))


@attrs.frozen(kw_only=True)
class BridgeStatistics:
    """Counts of this moment, and the misuse since the bridge was opened, by kind and function.

    ``running``: calls that are waited for; ``zombies``: abandoned calls that have not ended yet.
    """

    running: int
    zombies: int
    misuse: Mapping[Misuse, Mapping[str, int]]

    def __str__(self) -> str:
        parts = [
            f"{name} {kind.value} {count} times" for kind, names in self.misuse.items() for name, count in names.items()
        ]
        return f"{self.running} running, {self.zombies} zombies; {', '.join(parts) or 'no misuse'}"
