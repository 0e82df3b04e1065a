"""How patient the bridge is, and what it does about tasks that outlive their call."""

import enum

import attrs

from trio_rollout._core.checks import seconds


class OnLeak(enum.Enum):
    """What becomes of tasks that are still running when the asyncio function that started them has ended.

    Not of what was started by ``call_keeping``, which is meant to go on.
    """

    CANCEL = "cancel"
    """They are cancelled and waited for, within the grace. The call's result stands."""
    WARN = "warn"
    """They are named in the log and go on; the bridge cancels them when it is left. For libraries that start
    long-lived tasks (connection pools, flushers) at their first use."""
    ERROR = "error"
    """They are cancelled and waited for, and a call that would have returned raises LeakedTasks."""


class Offence(enum.Enum):
    """What asyncio code did wrong; counted by function."""

    SWALLOWED = "swallowed"
    """It caught a cancellation and returned as if nothing had happened; what it returned was thrown away."""
    ABANDONED = "abandoned"
    """It did not end within the grace after it was cancelled, and was left to itself."""
    LEAKED = "leaked"
    """It returned while tasks that it had started were still running; counted by task. What it left behind, such as a server,
    starts more of them later; counted once for a call, and not where ``OnLeak.WARN`` allows it."""
    BLOCKED = "blocked"
    """One step of it kept the event loop longer than ``BridgeSettings.slow_step``."""
    EXITED = "exited"
    """It raised SystemExit, KeyboardInterrupt or another exception that is meant to end a process."""
    CRASHED = "crashed"
    """A background task of it, or a callback, raised, and nobody was there to see it."""


@attrs.frozen(kw_only=True)
class BridgeSettings:
    """All times are seconds.

    ``again``: a cancellation that was not heeded is delivered again so often. ``grace``: what has not ended so long after
    its cancellation is abandoned. ``slow_step``: a step that keeps the loop longer than this is counted as BLOCKED.
    ``answer``: how long the host's loop may take to answer when the bridge is opened.
    """

    again: float = attrs.field(default=0.5, validator=seconds)
    grace: float = attrs.field(default=5.0, validator=seconds)
    slow_step: float = attrs.field(default=1.0, validator=seconds)
    answer: float = attrs.field(default=10.0, validator=seconds)
    on_leak: OnLeak = attrs.field(default=OnLeak.CANCEL, validator=attrs.validators.instance_of(OnLeak))
