"""run_io is bounded and shielded: a call that was made is finished, however often its caller is cancelled."""

import threading
from functools import partial

import pytest
import trio

from trio_rollout.ledger._open import run_io


class Call:
    """A blocking call that ends when the test says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()
        self.ended = False
        self.error = error

    def __call__(self) -> str:
        self.began.set()
        self.may_end.wait(60)
        self.ended = True
        if self.error is not None:
            raise self.error
        return "done"

    async def wait_began(self) -> None:
        await trio.to_thread.run_sync(self.began.wait)


async def test_cancelled_while_waiting_for_capacity_the_call_is_not_made():
    limiter, first, second = trio.CapacityLimiter(1), Call(), Call()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(run_io, first, limiter=limiter))
        await first.wait_began()
        with trio.move_on_after(0.01) as scope:
            await run_io(second, limiter=limiter)
        assert scope.cancelled_caught
        first.may_end.set()
    assert first.ended
    assert not second.began.is_set()


async def test_once_made_it_holds_its_capacity_to_the_end_under_any_number_of_cancellations():
    limiter, call, seen = trio.CapacityLimiter(1), Call(), []

    async def work() -> None:
        with outer, inner:
            seen.append(await run_io(call, limiter=limiter))
            await trio.lowlevel.checkpoint()
            seen.append("the cancellation did not wait for the checkpoint")

    outer, inner = trio.CancelScope(), trio.CancelScope()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(work)
        await call.wait_began()
        for scope in (inner, outer, nursery.cancel_scope):
            scope.cancel()
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked()
            assert limiter.borrowed_tokens == 1
        call.may_end.set()
    assert seen == ["done"]
    assert limiter.borrowed_tokens == 0


async def test_its_own_error_surfaces_before_the_cancellation():
    limiter, call = trio.CapacityLimiter(1), Call(OSError("disk full"))

    async def cancel() -> None:
        await call.wait_began()
        scope.cancel()
        call.may_end.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(cancel)
        with trio.CancelScope() as scope, pytest.raises(OSError, match="disk full"):
            await run_io(call, limiter=limiter)
    assert scope.cancel_called
    assert limiter.borrowed_tokens == 0
