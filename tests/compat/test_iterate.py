"""Asyncio generators as Trio iterators: closed on leaving, always, in the task that ran them."""

import asyncio
import contextlib

import pytest
import trio

from trio_rollout_compat import BridgeSettings, open_bridge

from .handshake import Reached, forever


async def count(log, stop):
    try:
        for number in range(stop):
            await asyncio.sleep(0)
            yield number
    finally:
        await asyncio.sleep(0)
        log.append("closed")


async def test_it_yields_what_the_generator_yields(bridge):
    log = []
    async with bridge.iterate(count, log, stop=3) as items:
        assert [item async for item in items] == [0, 1, 2]
        with pytest.raises(StopAsyncIteration):
            await anext(items)
    assert log == ["closed"]


async def test_breaking_off_closes_it(bridge):
    log = []
    async with bridge.iterate(count, log, 3) as items:
        async for _ in items:
            break
    assert log == ["closed"]


async def test_the_body_s_error_comes_out_as_itself_and_closes_it(bridge):
    log, error = [], ValueError("body")
    with pytest.raises(ValueError, match="body") as caught:
        async with bridge.iterate(count, log, 3) as items:
            await anext(items)
            raise error
    assert caught.value is error
    assert log == ["closed"]


async def test_the_generator_s_error_comes_out_of_anext(bridge):
    error = ValueError("generator")

    async def fail():
        yield 1
        raise error

    async with bridge.iterate(fail) as items:
        assert await anext(items) == 1
        with pytest.raises(ValueError, match="generator") as caught:
            await anext(items)
        assert caught.value is error
        with pytest.raises(StopAsyncIteration):
            await anext(items)


async def test_a_cancelled_anext_loses_nothing(bridge):
    async def slow(reached, event):
        reached()
        await event.wait()
        yield 1
        yield 2

    reached, event = Reached(), asyncio.Event()
    async with bridge.iterate(slow, reached, event) as items:
        with trio.move_on_after(0.01) as scope:
            await anext(items)
        assert scope.cancelled_caught
        await reached.wait()
        bridge._running.post(event.set)
        assert [item async for item in items] == [1, 2]


async def test_cancelling_the_block_cancels_the_generator_where_it_waits(bridge):
    log = []

    async def hang(reached):
        try:
            reached()
            await forever()
            yield
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            log.append("cancelled")
            raise

    reached = Reached()
    with trio.CancelScope() as scope:
        async with bridge.iterate(hang, reached) as items, trio.open_nursery() as nursery:
            nursery.start_soon(anext, items)
            await reached.wait()
            scope.cancel()
    assert scope.cancelled_caught
    assert log == ["cancelled"]


async def test_one_task_runs_it_from_end_to_end(bridge):
    """So a timeout or a task group may lie across the yields."""
    tasks = []

    async def scoped():
        tasks.append(asyncio.current_task())
        async with asyncio.timeout(10), asyncio.TaskGroup():
            yield 1  # ruff: ignore[yield-in-context-manager-in-async-generator]  the point of it
            tasks.append(asyncio.current_task())
            yield 2  # ruff: ignore[yield-in-context-manager-in-async-generator]
        tasks.append(asyncio.current_task())

    async with bridge.iterate(scoped) as items:
        assert [item async for item in items] == [1, 2]
    assert len(tasks) == 3
    assert len(set(tasks)) == 1


async def test_an_iterator_that_is_no_generator_works(bridge):
    class Twice:
        def __init__(self):
            self.left = 2

        def __aiter__(self):
            return self

        async def __anext__(self):
            if not self.left:
                raise StopAsyncIteration
            self.left -= 1
            return self.left

    async with bridge.iterate(Twice) as items:
        assert [item async for item in items] == [1, 0]


async def test_an_iterator_that_raises_stop_iteration_is_an_error(bridge):
    """``anext`` with a default would crash the process."""

    class Broken:
        def __aiter__(self):
            return self

        def __anext__(self):
            raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        async with bridge.iterate(Broken) as items:
            await anext(items)


async def test_an_item_that_comes_after_the_block_was_left_is_dropped(caplog):
    """The generator ignores its cancellation, is abandoned, and yields later."""
    reached, event = Reached(), asyncio.Event()

    async def steps(count):
        for _ in range(count):
            await asyncio.sleep(0)

    async def stubborn():
        reached()
        while not event.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await event.wait()
        yield 1

    async with open_bridge("thread", settings=BridgeSettings(again=0.02, grace=0.1)) as bridge:
        with trio.CancelScope() as scope:
            async with bridge.iterate(stubborn) as items, trio.open_nursery() as nursery:
                nursery.start_soon(anext, items)
                await reached.wait()
                scope.cancel()
        assert scope.cancelled_caught
        bridge._running.post(event.set)
        await bridge.call(steps, 10)  # meanwhile the item comes
    assert "no longer waited for" in caplog.text
