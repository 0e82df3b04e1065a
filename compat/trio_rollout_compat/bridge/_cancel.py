"""Cancellation through the bridge: how a call is ended that does not end by itself, and what happens to its tasks.

Trio and asyncio mean different things by cancellation. In Trio it is a state of a scope: every checkpoint raises Cancelled
until the scope is left, so code that catches it once is cancelled again at the next checkpoint, and a scope that was left
has no running code inside. In asyncio it is an event: ``Task.cancel()`` raises one CancelledError, which code may catch and
forget. The bridge gives Trio's promise for code that knows only asyncio's kind:

1. *On Trio's thread* ``Bridge.call`` waits for ``call.ended``. When its scope is cancelled (or Ctrl-C arrives), it
   catches the exception and holds it back until the asyncio function has ended or is abandoned. From here on everything is
   shielded, and bounded by one moment, ``give_up``: ``BridgeSettings.grace`` from now.
2. ``LiveCalls.stop`` posts ``call.cancel_main``. *On the loop's thread* that calls ``Task.cancel()`` for the function.
   Its child tasks are its own business: a task group cancels them, a ``gather`` passes the cancellation on.
3. Every ``again`` seconds the cancellation is delivered again, as Trio would at the next checkpoint: to the function, and
   to those of its tasks that were cancelled and go on, because a task group cancels its tasks only once. But never to
   code that is cleaning up. An ``await`` in a ``finally`` block is the answer to the first delivery, and a second one would
   tear it off half-way. asyncio does not tell; ``Call`` asks the garbage collector (see ``_call``).
4. The function has ended. If it ended with CancelledError, the held-back exception goes on. If it returned although it had
   been cancelled, its result is discarded, counted as SWALLOWED, and the exception goes on. If it had ended before the
   cancellation reached the loop's thread, or raised something else, that is the call's result, and Trio raises Cancelled at
   the next checkpoint: nothing is lost.
5. ``sweep`` looks for tasks that the function left running and does as ``OnLeak`` says. A function that was called by
   ``call_keeping`` leaves them on purpose.
6. At ``give_up`` the call is abandoned: it goes on, is no longer waited for, and is counted. If the loop has run nothing
   that was posted since the cancellation, the loop itself is blocked, and the code that blocks it is named in its place.
7. When the bridge is left, every call that is still alive, abandoned ones too, is cancelled once more with all its tasks.

The other direction, asyncio code that is cancelled while it waits for Trio, is in ``_portal``: there a scope is cancelled,
and its end awaited.

Decisions: docs/decisions/0019-whose-fault-an-exception-is.md (what is cleanup, and which exceptions cross),
docs/decisions/0018-asyncio-servers-are-opened.md (calls that leave tasks on purpose),
docs/decisions/0043-the-bridge-names-its-threads.md.
"""

import asyncio
import collections
import contextlib
import functools
import logging
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Final, final

import attrs
import trio

from ._backends import RunningLoop
from ._call import Call
from ._settings import BridgeSettings, BridgeStatistics, Misuse, OnLeak

_log: Final = logging.getLogger("trio_rollout.compat")
# Innermost frames of a blocked loop that are shown: the user's code is among them.
_FRAMES: Final = 4


@final
@attrs.define(eq=False)
class LiveCalls:
    """On Trio's thread: the calls of one bridge that are alive, how they are cancelled, and the counts of misuse.

    A call is in one of three sets as long as any of its tasks runs. It leaves the last two by itself when its last task ends:
    what it holds must not be held for days. ``note`` and ``statistics`` may be called on any thread. Each wait is shielded,
    and bounded by the caller's ``give_up``.
    """

    running: RunningLoop
    settings: BridgeSettings
    loop_thread: int | None = attrs.field(default=None, init=False)
    """The id of the loop's thread, once it is known."""
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

    def statistics(self) -> BridgeStatistics:
        """Return a snapshot."""
        with self._lock:
            misuse = {kind: dict(counts) for kind, counts in self._counts.items() if counts}
        return BridgeStatistics(running=len(self.live), zombies=len(self.zombies), misuse=misuse)

    def everything(self) -> set[Call]:
        """Return every call of which a task may be alive."""
        return self.live | self.zombies | self.lingering

    def _keep(self, call: Call, place: set[Call]) -> None:
        place.add(call)
        call.when_all_ended(functools.partial(place.discard, call))

    async def stop(self, call: Call, *, give_up: float, everything: bool = False) -> None:
        """Cancel the call's function, or all tasks of the call, and wait for the end, at most until ``give_up``.

        The cancellation is delivered again every ``again`` seconds to code that is not cleaning up. A call that is alive at
        ``give_up`` is abandoned.
        """
        event = call.all_ended if everything else call.ended
        call.loop_responded = False
        with trio.CancelScope(shield=True):  # bounded: until give_up
            while self._post(call.cancel_all if everything else call.cancel_main):
                with trio.move_on_at(min(give_up, trio.current_time() + self.settings.again)):
                    await event.wait()
                if event.is_set() or trio.current_time() >= give_up:
                    break
        if not event.is_set():
            self._abandon(call)

    def _post(self, fn: Callable[[], object]) -> bool:
        """Return False if the loop is closed and runs nothing any more."""
        with contextlib.suppress(RuntimeError):
            self.running.post(fn)
            return True
        return False

    def _abandon(self, call: Call) -> None:
        self._keep(call, self.zombies)
        grace = self.settings.grace
        what = f"it did not end within {grace} s of its cancellation, and is no longer waited for"
        if self.running.loop.is_closed():
            what = "its event loop is closed"
        elif not call.loop_responded:
            self._note_blocking_code()
            what = f"its event loop did not answer for {grace} s"
        self.note(Misuse.ABANDONED, call.name, what)

    def _note_blocking_code(self) -> None:
        """Name the code that the loop is busy with, which is rarely the call that has to be abandoned."""
        task = asyncio.current_task(self.running.loop)
        name = next((call.name for call in self.everything() if call.owns(task)), "unknown")
        self.note(Misuse.BLOCKED, name, f"the event loop is in {stack_of(self.loop_thread)}")

    async def sweep(self, call: Call, *, give_up: float) -> list[str]:
        """Find the tasks that an ended function left running, do as the policy says, and return their names."""
        left = call.survivors()
        if left and call.keeps_tasks:
            self._keep(call, self.lingering)
            return []
        if left:
            self.note(Misuse.LEAKED, call.name, f"still running: {', '.join(left)}", len(left))
            if self.settings.on_leak is OnLeak.WARN:
                self._keep(call, self.lingering)
            else:
                await self.stop(call, give_up=give_up, everything=True)
        return left  # usually nothing is left, and there is nothing to wait for


def stack_of(thread: int | None) -> str:
    """On any thread: the innermost frames of a thread, by its id, in one line."""
    frame = sys._current_frames().get(thread) if thread is not None else None
    if frame is None:
        return "nothing that can be seen"
    frames = traceback.extract_stack(frame)[-_FRAMES:]
    return " > ".join(f"{item.name} ({item.filename}:{item.lineno})" for item in frames)
