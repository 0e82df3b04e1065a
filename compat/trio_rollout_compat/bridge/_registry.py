"""The calls of one bridge that are alive, and the counts of misuse.

A call is in one of three sets as long as any of its tasks runs: it is waited for, abandoned, or has ended and left tasks
that may go on. It leaves the last two by itself when its last task ends: what it holds must not be held for days.
"""

import collections
import functools
import logging
import sys
import threading
import traceback
from typing import Final, final

import attrs

from ._call import Call
from ._settings import BridgeStatistics, Misuse

_log: Final = logging.getLogger("trio_rollout.compat")
# Innermost frames of a blocked loop that are shown: the user's code is among them.
_FRAMES: Final = 4


@final
@attrs.define(eq=False)
class CallRegistry:
    """On Trio's thread: the calls that are alive. ``note`` and ``statistics`` may be called on any thread.

    One bridge owns it.
    """

    live: set[Call] = attrs.field(factory=set, init=False)
    """Waited for."""
    zombies: set[Call] = attrs.field(factory=set, init=False)
    """Abandoned, and not ended yet."""
    lingering: set[Call] = attrs.field(factory=set, init=False)
    """Ended, with tasks that are allowed to go on."""
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _counts: dict[Misuse, collections.Counter[str]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._counts = {kind: collections.Counter() for kind in Misuse}

    def note(self, kind: Misuse, name: str, what: str, count: int = 1) -> None:
        """Count a misuse of the function ``name``, and log it."""
        with self._lock:
            self._counts[kind][name] += count
        level = logging.ERROR if kind is Misuse.ABANDONED else logging.WARNING
        _log.log(level, "asyncio function %s %s: %s", name, kind.value, what)

    def abandon(self, call: Call) -> None:
        """Keep a call that is no longer waited for, until it ends."""
        self._keep(call, self.zombies)

    def let_linger(self, call: Call) -> None:
        """Keep a call whose tasks may go on, until the last of them ends."""
        self._keep(call, self.lingering)

    def _keep(self, call: Call, place: set[Call]) -> None:
        place.add(call)
        call.when_all_ended(functools.partial(place.discard, call))

    def everything(self) -> set[Call]:
        """Return every call of which a task may be alive."""
        return self.live | self.zombies | self.lingering

    def statistics(self) -> BridgeStatistics:
        """Return a snapshot."""
        with self._lock:
            misuse = {kind: dict(counts) for kind, counts in self._counts.items() if counts}
        return BridgeStatistics(running=len(self.live), zombies=len(self.zombies), misuse=misuse)

    def call_of(self, task: object) -> Call | None:
        """Return the call that a task belongs to."""
        return next((call for call in self.everything() if call.owns(task)), None)


def stack_of(thread: int | None) -> str:
    """On any thread: the innermost frames of a thread, by its id, in one line."""
    frame = sys._current_frames().get(thread) if thread is not None else None
    if frame is None:
        return "nothing that can be seen"
    frames = traceback.extract_stack(frame)[-_FRAMES:]
    return " > ".join(f"{item.name} ({item.filename}:{item.lineno})" for item in frames)
