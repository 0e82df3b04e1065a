"""How a call ends that does not end by itself: cancelled until it heeds, bounded, then abandoned; and what it leaves."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import final

import attrs
import trio

from ._account import Account, stack_of
from ._backend import Running
from ._call import Call
from ._policy import BridgeSettings, Offence, OnLeak


@final
@attrs.frozen(eq=False)
class Ender:
    """The rules, for one bridge. Everything here is shielded by its caller's need, and bounded by the grace."""

    running: Running
    settings: BridgeSettings
    account: Account
    loop_thread: list[int]
    """The id of the loop's thread, once it is known."""

    async def stop(  # noqa: ASYNC910  there is nothing to wait for on a closed loop
        self, call: Call, *, give_up: float, everything: bool = False
    ) -> None:
        """Cancel the call's function (or everything of the call) and wait for it, at most until ``give_up``.

        Delivered again every ``again`` seconds to what is not cleaning up. What is left then is abandoned.
        """
        event = call.quiet if everything else call.ended
        call.heard = False
        with trio.CancelScope(shield=True):  # noqa: ASYNC912  bounded: until give_up
            while self._post(call.cancel_all if everything else call.cancel_main):
                with trio.move_on_at(min(give_up, trio.current_time() + self.settings.again)):
                    await event.wait()
                if event.is_set() or trio.current_time() >= give_up:
                    break
        if not event.is_set():
            self._abandon(call)

    def _post(self, fn: Callable[[], object]) -> bool:
        """Whether the loop could be asked: a closed one can't."""
        with contextlib.suppress(RuntimeError):
            self.running.post(fn)
            return True
        return False

    def _abandon(self, call: Call) -> None:
        self.account.abandon(call)
        grace = self.settings.grace
        what = f"it did not end within {grace} s of its cancellation and is left to itself"
        if self.running.loop.is_closed():
            what = "its event loop is closed"
        elif not call.heard:
            self._blame_blocker()
            what = f"its event loop did not answer for {grace} s"
        self.account.note(Offence.ABANDONED, call.name, what)

    def _blame_blocker(self) -> None:
        """Name what the loop is busy with, which is rarely the call that has to be abandoned."""
        busy = self.account.owner_of(asyncio.current_task(self.running.loop))
        where = stack_of(self.loop_thread[0] if self.loop_thread else None)
        self.account.note(Offence.BLOCKED, busy.name if busy else "unknown", f"the event loop is in {where}")

    async def sweep(self, call: Call, *, give_up: float) -> list[str]:
        """Find what the function left running, and do as the policy says; the names of what was found."""
        left = call.survivors()
        if left and call.keeps:
            self.account.let_linger(call)
            return []  # noqa: ASYNC910
        if left:
            self.account.note(Offence.LEAKED, call.name, f"still running: {', '.join(left)}", len(left))
            if self.settings.on_leak is OnLeak.WARN:
                self.account.let_linger(call)
            else:
                await self.stop(call, give_up=give_up, everything=True)
        return left  # noqa: ASYNC910  usually nothing is left, and there is nothing to wait for
