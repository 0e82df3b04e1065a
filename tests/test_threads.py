"""Blocking functions in threads: run to their end or never started."""

import threading
from functools import partial

import trio

from trio_rollout._util.threads import run_in_thread
from trio_rollout.testing import run_inline, sim_run


async def test_a_function_runs_in_another_thread_and_its_result_comes_back():
    assert await run_in_thread(threading.get_ident) != threading.get_ident()
    assert await run_in_thread(pow, 2, 5) == 32


async def test_cancelled_before_it_starts_it_never_runs():
    ran: list[int] = []
    with trio.CancelScope() as scope:
        scope.cancel()
        await run_in_thread(ran.append, 1)
    with trio.CancelScope() as scope:
        scope.cancel()
        await run_inline(ran.append, 1)
    assert not ran


async def test_cancelled_later_its_result_is_still_returned():
    """The thread is waited for, so that nothing runs on after the call."""
    begun, go_on = trio.Event(), threading.Event()
    token = trio.lowlevel.current_trio_token()

    def work() -> str:
        token.run_sync_soon(begun.set)
        go_on.wait(5)
        return "done"

    results: list[str] = []

    async def call() -> None:
        results.append(await run_in_thread(work))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)
        await begun.wait()
        nursery.cancel_scope.cancel()
        go_on.set()
    assert results == ["done"]


def test_inline_it_runs_under_a_virtual_clock():
    assert sim_run(partial(run_inline, pow, 2, 5), seed=0).value == 32
