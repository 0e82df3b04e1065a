"""How patient the bridge is, and what it does about tasks that outlive their call.

What the bridge remembers of its calls: those under way, those that were abandoned, and what was done wrong by whom.
"""

import collections
import enum
import functools
import logging
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Final, final

import attrs

from trio_rollout.lowlevel import seconds

from ._call import Call


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


_log: Final = logging.getLogger("trio_rollout.compat")
# Innermost frames of a blocked loop that are shown: the user's code is among them.
_FRAMES: Final = 4


@attrs.frozen(kw_only=True)
class BridgeStatistics:
    """Counts of this moment, and what functions did wrong since the bridge was opened.

    ``running``: calls that somebody waits for; ``zombies``: abandoned ones that have not ended yet.
    """

    running: int
    zombies: int
    offences: Mapping[Offence, Mapping[str, int]]

    def __str__(self) -> str:
        parts = [
            f"{name} {kind.value} {count} times"
            for kind, names in self.offences.items()
            for name, count in names.items()
        ]
        return f"{self.running} running, {self.zombies} zombies; {', '.join(parts) or 'no offences'}"


@final
@attrs.define(eq=False)
class Account:
    """Owned by one bridge. ``note`` may be called from any thread, everything else from Trio's."""

    live: set[Call] = attrs.field(factory=set, init=False)
    zombies: set[Call] = attrs.field(factory=set, init=False)
    lingering: set[Call] = attrs.field(factory=set, init=False)
    """Ended, with tasks that are allowed to go on."""
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _counts: dict[Offence, collections.Counter[str]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._counts = {kind: collections.Counter() for kind in Offence}

    def note(self, kind: Offence, name: str, what: str, count: int = 1) -> None:
        """Count an offence and say so in the log."""
        with self._lock:
            self._counts[kind][name] += count
        level = logging.ERROR if kind is Offence.ABANDONED else logging.WARNING
        _log.log(level, "asyncio function %s %s: %s", name, kind.value, what)

    def abandon(self, call: Call) -> None:
        """Nobody waits for it any more. It is forgotten when it ends: what it holds must not be held for days."""
        self._remember(call, self.zombies)

    def let_linger(self, call: Call) -> None:
        """Its tasks may go on. It is forgotten when the last of them ends."""
        self._remember(call, self.lingering)

    def _remember(self, call: Call, place: set[Call]) -> None:
        place.add(call)
        call.when_quiet(functools.partial(place.discard, call))

    def everything(self) -> set[Call]:
        """Every call of which something may be alive."""
        return self.live | self.zombies | self.lingering

    def statistics(self) -> BridgeStatistics:
        """A snapshot."""
        with self._lock:
            offences = {kind: dict(counts) for kind, counts in self._counts.items() if counts}
        return BridgeStatistics(running=len(self.live), zombies=len(self.zombies), offences=offences)

    def owner_of(self, task: object) -> Call | None:
        """The call that a task belongs to."""
        return next((call for call in self.everything() if call.owns(task)), None)


def stack_of(thread: int | None) -> str:
    """The innermost frames of a thread, in one line."""
    frame = sys._current_frames().get(thread) if thread is not None else None
    if frame is None:
        return "nothing that can be seen"
    frames = traceback.extract_stack(frame)[-_FRAMES:]
    return " > ".join(f"{item.name} ({item.filename}:{item.lineno})" for item in frames)
