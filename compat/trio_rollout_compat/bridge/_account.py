"""What the bridge remembers of its calls: those under way, those that were abandoned, and what was done wrong by whom."""

import collections
import functools
import logging
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Final, final

import attrs

from ._call import Call
from ._policy import Offence

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
