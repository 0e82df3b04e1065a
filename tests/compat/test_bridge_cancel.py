"""Cancellation across the bridge: delivered until it has an effect, cleanup awaited, then abandoned; leaked tasks found."""

import asyncio
import contextlib
import functools
import gc
import threading
import weakref

import pytest
import trio
import trio.testing

from trio_rollout_compat.bridge import BridgeSettings, LeakedTasks, Misuse, OnLeak, open_bridge

from .handshake import Reached, forever


async def cancel_when(reached, fn, *args):
    """Run ``fn`` in a scope that is cancelled once ``reached`` was called; return True if it was cancelled."""
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def cancel():
                await reached.wait()
                scope.cancel()

            await fn(*args)
            nursery.cancel_scope.cancel()
    return scope.cancelled_caught


async def test_the_asyncio_finally_is_awaited(bridge):
    log = []

    async def work(reached):
        try:
            reached()
            await forever()
        finally:
            await asyncio.sleep(0)
            log.append("cleaned")

    reached = Reached()
    assert await cancel_when(reached, bridge.call, work, reached)
    assert log == ["cleaned"]
    assert not bridge.statistics().misuse


async def cleanup_by_finally(step):
    try:
        await forever()
    finally:
        await step()


async def cleanup_by_except(step):
    try:
        await forever()
    except asyncio.CancelledError:
        await step()
        raise


async def cleanup_in_child(step):
    """A gather passes every cancellation on to its children."""
    await asyncio.gather(cleanup_by_finally(step))


async def cleanup_in_group(step):
    async with asyncio.TaskGroup() as group:
        group.create_task(cleanup_by_finally(step))
        await forever()


async def cleanup_in_generator(step):
    async def generate():
        try:
            yield 1
            await forever()
        finally:
            await step()

    async for _ in generate():
        pass


async def cleanup_in_generator_based(step):
    class Awaitable:
        def __await__(self):
            yield from cleanup_by_finally(step).__await__()

    await Awaitable()


async def cleanup_after_an_error_of_its_own(step):
    """The exception that is handled last is not the cancellation."""
    try:
        await forever()
    finally:
        try:
            int("no number")
        except ValueError:
            await step()


async def cleanup_by_a_condition(step):
    """``asyncio.Condition.wait`` raises another CancelledError, made while none was handled."""
    condition = asyncio.Condition()
    try:
        async with condition:
            try:
                await forever()
            except asyncio.CancelledError:
                cancelled = True
            if cancelled:
                raise asyncio.CancelledError
    finally:
        await step()


@pytest.mark.parametrize(
    "work",
    [
        cleanup_by_finally,
        cleanup_by_except,
        cleanup_in_child,
        cleanup_in_group,
        cleanup_in_generator,
        cleanup_in_generator_based,
        cleanup_after_an_error_of_its_own,
        cleanup_by_a_condition,
    ],
)
async def test_a_long_cleanup_is_not_torn_off_by_the_next_delivery(open_any, work):
    """The cleanup takes ten times as long as the pause between two deliveries."""
    log = []

    async def step():
        await asyncio.sleep(0.05)
        log.append("cleaned")

    async def run(reached):
        asyncio.get_running_loop().call_later(0.01, reached)
        await work(step)

    async with open_any(again=0.005) as bridge:
        reached = Reached()
        assert await cancel_when(reached, bridge.call, run, reached)
    assert log == ["cleaned"]


async def test_a_swallowed_cancellation_is_delivered_again(bridge):
    swallowed = []

    async def stubborn(reached):
        reached()
        while len(swallowed) < 3:
            try:
                await forever()
            except asyncio.CancelledError:
                swallowed.append(1)
        await forever()

    reached = Reached()
    assert await cancel_when(reached, bridge.call, stubborn, reached)
    assert len(swallowed) == 3
    assert not bridge.statistics().misuse


async def save_in_a_variable(_hits):
    last = None
    for _ in range(3):
        try:
            await hit(_hits)
        except asyncio.CancelledError as error:
            last = error
    raise last


async def save_in_a_list(hits):
    saved = []
    while len(saved) < 3:
        try:
            await hit(hits)
        except asyncio.CancelledError as error:
            saved.append(error)
    raise saved.pop()


async def pass_it_on(hits):
    async def once_more(error):
        await hit(hits)
        raise error

    try:
        await hit(hits)
    except asyncio.CancelledError as error:
        saved = error
    with contextlib.suppress(asyncio.CancelledError):
        await once_more(saved)
    await once_more(saved)


async def keep_it_in_a_cell(hits):
    saved = None

    def save(error):
        nonlocal saved
        saved = error

    for _ in range(3):
        try:
            await hit(hits)
        except asyncio.CancelledError as error:
            save(error)
    raise saved


async def keep_it_among_the_arguments_of_a_call(hits):
    """The error is on the stack, while the next argument is awaited."""
    try:
        await hit(hits)
    except asyncio.CancelledError as error:
        saved = error

    async def swallow():
        with contextlib.suppress(asyncio.CancelledError):
            await hit(hits)

    repr((saved, await swallow(), saved, await swallow()))
    raise saved


async def try_again_after_a_timeout(hits):
    """A TimeoutError has the CancelledError that it was made from for its context."""
    try:
        async with asyncio.timeout(0):
            await forever()
    except TimeoutError:
        for _ in range(2):
            with contextlib.suppress(asyncio.CancelledError):
                await hit(hits)
        await hit(hits)


async def swallow_in_a_task_group(hits):
    """The group is cancelled three times; it cancels its tasks only the first time."""

    async def stubborn():
        for _ in range(2):
            with contextlib.suppress(asyncio.CancelledError):
                await hit(hits)
        await hit(hits)

    async with asyncio.TaskGroup() as group:
        group.create_task(stubborn())


async def swallow_below_a_gather(hits):
    """A gather passes every cancellation on: its children must not get each of them twice."""

    async def stubborn():
        for _ in range(2):
            with contextlib.suppress(asyncio.CancelledError):
                await hit(hits)
        await hit(hits)

    await asyncio.gather(asyncio.gather(stubborn()))


async def hit(hits):
    try:
        await forever()
    except asyncio.CancelledError:
        hits.append(1)
        raise


@pytest.mark.parametrize(
    "work",
    [
        save_in_a_variable,
        save_in_a_list,
        pass_it_on,
        keep_it_in_a_cell,
        keep_it_among_the_arguments_of_a_call,
        try_again_after_a_timeout,
        swallow_in_a_task_group,
        swallow_below_a_gather,
    ],
)
async def test_who_keeps_a_cancellation_and_goes_on_gets_the_next_one(bridge, work):
    """The task keeps the error, but does not handle it: nothing is cleaned up."""
    hits = []

    async def run(reached):
        asyncio.get_running_loop().call_later(0.01, reached)
        await work(hits)

    reached = Reached()
    assert await cancel_when(reached, bridge.call, run, reached)
    assert len(hits) == 3
    assert not bridge.statistics().misuse


async def test_a_function_that_swallows_it_and_returns_is_still_cancelled(bridge, caplog):
    async def swallow(reached):
        try:
            reached()
            await forever()
        except asyncio.CancelledError:
            return "as if nothing had happened"

    reached = Reached()
    assert await cancel_when(reached, bridge.call, swallow, reached)
    assert sum(bridge.statistics().misuse[Misuse.SWALLOWED].values()) == 1


async def test_an_error_of_the_cleanup_takes_the_cancellations_place(bridge):
    async def work(reached):
        try:
            reached()
            await forever()
        finally:
            raise ValueError("cleanup")

    reached = Reached()
    with pytest.raises(ExceptionGroup) as caught:
        await cancel_when(reached, bridge.call, work, reached)
    (error,) = caught.value.exceptions
    assert isinstance(error, ValueError)


async def test_a_result_that_was_there_before_the_cancellation_counts(bridge):
    """Both happen before Trio's task runs again."""

    async def work(scope_cancel):
        scope_cancel()
        return "result"

    reached = Reached()
    results = []

    async def run():
        results.append(await bridge.call(work, reached))

    await cancel_when(reached, run)
    assert results in ([], ["result"])


async def test_a_cancelled_scope_starts_nothing(bridge):
    async def work():
        raise AssertionError

    with trio.CancelScope() as scope:
        scope.cancel()
        await bridge.call(work)
    assert scope.cancelled_caught


async def test_a_deadline_holds(bridge):
    async def work():
        await forever()

    with pytest.raises(trio.TooSlowError):
        with trio.fail_after(0.01):
            await bridge.call(work)


async def test_what_never_ends_is_abandoned_loudly_and_cancelled_again_at_the_end(open_any, caplog):
    ends = []

    async def deaf(reached):
        reached()
        while not ends:
            with contextlib.suppress(asyncio.CancelledError):
                await forever()

    async with open_any(grace=0.06) as bridge:
        reached = Reached()
        assert await cancel_when(reached, bridge.call, deaf, reached)
        now = bridge.statistics()
        assert (now.running, now.zombies) == (0, 1)
        (name,) = now.misuse[Misuse.ABANDONED]
        assert "deaf" in name
        ends.append(1)
    assert bridge.statistics().zombies == 0
    assert "did not end within 0.06 s" in caplog.text


async def cancelled_and_deaf(bridge, work):
    reached = Reached()
    assert await cancel_when(reached, bridge.call, work, reached)


async def left_behind(bridge, work):
    async def leave():
        await asyncio.sleep(0)
        background.add(asyncio.create_task(work(lambda: None)))
        await asyncio.sleep(0)

    background = set()
    await bridge.call(leave)


async def meant_to_go_on(bridge, work):
    async def leave():
        background.add(asyncio.create_task(work(lambda: None)))
        await asyncio.sleep(0)

    background = set()
    await bridge.call_keeping(leave)


@pytest.mark.parametrize(
    ("outlive", "policy"),
    [(cancelled_and_deaf, OnLeak.CANCEL), (left_behind, OnLeak.WARN), (meant_to_go_on, OnLeak.CANCEL)],
)
async def test_what_outlived_its_call_and_has_ended_is_not_kept(open_any, outlive, policy):
    """Also without a call of ``statistics()``: an engine runs for days without one."""
    waking = []

    class Held:
        pass

    async def outliving(reached, held):
        reached()
        while not (waking and waking[-1].done()):
            waking.append(forever())
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(waking[-1])

    async def wake():
        waking[-1].set_result(None)

    held = Held()
    gone = weakref.ref(held)
    async with open_any(grace=0.06, on_leak=policy) as bridge:
        await outlive(bridge, functools.partial(outliving, held=held))
        del held
        gc.collect()
        assert gone() is not None, "it has not ended yet"
        await bridge.call(wake)
        await bridge.call(asyncio.sleep, 0)  # by its end the bridge has heard of that of the other
        gc.collect()
        assert gone() is None


async def test_what_was_abandoned_keeps_nothing_of_trios(open_any):
    """An abandoned function may go on for days, and its portal must not keep the call alive."""
    ends, tasks = [], []

    async def deaf(reached, portal):
        reached()
        while not ends:
            with contextlib.suppress(asyncio.CancelledError):
                await forever()
        del portal

    async def caller(bridge, reached):
        tasks.append(weakref.ref(trio.lowlevel.current_task()))
        await bridge.call_with_portal(functools.partial(deaf, reached))

    async with open_any(grace=0.06) as bridge:
        async with trio.open_nursery() as nursery:
            reached = Reached()
            nursery.start_soon(caller, bridge, reached)
            await reached.wait()
            nursery.cancel_scope.cancel()
        gc.collect()
        assert bridge.statistics().zombies == 1
        assert tasks[0]() is None
        ends.append(1)


async def test_leaving_waits_for_the_deaf_no_longer_than_the_grace(open_any, caplog):
    async def deaf(reached):
        reached()
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await forever()

    with trio.fail_after(60):
        async with open_any(grace=0.06) as bridge:
            reached = Reached()
            assert await cancel_when(reached, bridge.call, deaf, reached)
    assert bridge.statistics().zombies == 1
    gc.collect()


async def test_the_engine_of_a_blocked_loop_goes_on_and_the_blocker_is_named(caplog):
    """The loop is blocked by another function than the one that is cancelled."""
    release = threading.Event()

    async def block(reached):
        reached()
        release.wait()

    async def innocent(reached):
        reached()
        await forever()

    try:
        async with open_bridge("thread", settings=BridgeSettings(again=0.02, grace=0.1, slow_step=60)) as bridge:
            async with trio.open_nursery() as nursery:
                first, second = Reached(), Reached()
                nursery.start_soon(bridge.call, innocent, first)
                await first.wait()
                nursery.start_soon(bridge.call, block, second)
                await second.wait()
                nursery.cancel_scope.cancel()
            blamed = bridge.statistics().misuse[Misuse.BLOCKED]
            assert {name.rpartition(".")[2] for name in blamed} == {"block"}
            assert "wait" in caplog.text
            release.set()
    finally:
        release.set()


async def test_a_step_that_keeps_the_loop_is_counted(open_any, caplog):
    async def block():
        threading.Event().wait(0.03)

    async with open_any(slow_step=0.02) as bridge:
        await bridge.call(block)
        (name,) = bridge.statistics().misuse[Misuse.BLOCKED]
    assert "block" in name


async def test_a_call_that_was_cancelled_before_the_loop_came_to_it_never_starts(caplog):
    release, started = threading.Event(), []

    async def block(reached):
        reached()
        release.wait()

    async def late():
        started.append(1)

    async def release_when_cancelled():
        await trio.testing.wait_all_tasks_blocked()
        release.set()

    async with open_bridge("thread") as bridge, trio.open_nursery() as nursery:
        reached = Reached()
        nursery.start_soon(bridge.call, block, reached)
        await reached.wait()
        async with trio.open_nursery() as inner:
            inner.start_soon(bridge.call, late)
            await trio.testing.wait_all_tasks_blocked()
            inner.cancel_scope.cancel()
            nursery.start_soon(release_when_cancelled)
    assert not started
    assert not bridge.statistics().zombies


async def leave_one(reached, log):
    async def child():
        try:
            reached()
            await forever()
        finally:
            log.append("cancelled")

    task = asyncio.create_task(child(), name="left")
    await asyncio.sleep(0)
    del task
    return "value"


async def test_leaked_tasks_are_cancelled_and_named(bridge, caplog):
    log = []
    assert await bridge.call(leave_one, Reached(), log) == "value"
    assert log == ["cancelled"]
    (name,) = bridge.statistics().misuse[Misuse.LEAKED]
    assert "leave_one" in name
    assert "left" in caplog.text


async def test_leaked_tasks_may_go_on_until_the_bridge_is_left(open_any, caplog):
    log = []
    async with open_any(on_leak=OnLeak.WARN) as bridge:
        assert await bridge.call(leave_one, Reached(), log) == "value"
        assert not log
        assert sum(bridge.statistics().misuse[Misuse.LEAKED].values()) == 1
    assert log == ["cancelled"]


async def test_leaked_tasks_may_be_an_error(open_any, caplog):
    log = []
    async with open_any(on_leak=OnLeak.ERROR) as bridge:
        with pytest.raises(LeakedTasks, match=r"leave_one returned with 1 tasks still running: left"):
            await bridge.call(leave_one, Reached(), log)
        assert log == ["cancelled"]


async def test_a_shielded_task_that_outlives_a_cancelled_call_is_found(bridge, caplog):
    log = []

    async def shielded(reached):
        try:
            reached()
            await forever()
        finally:
            log.append("cancelled")

    async def work(reached):
        await asyncio.shield(shielded(reached))

    reached = Reached()
    assert await cancel_when(reached, bridge.call, work, reached)
    assert log == ["cancelled"]
    assert sum(bridge.statistics().misuse[Misuse.LEAKED].values()) == 1


async def test_a_leaked_task_that_never_ends_does_not_hold_the_call(open_any, caplog):
    ends = []

    async def deaf():
        while not ends:
            with contextlib.suppress(asyncio.CancelledError):
                await forever()

    async def work():
        task = asyncio.create_task(deaf())
        await asyncio.sleep(0)
        del task
        return "value"

    async with open_any(grace=0.06) as bridge:
        assert await bridge.call(work) == "value"
        assert bridge.statistics().zombies == 1
        ends.append(1)


async def test_children_cancelled_before_their_first_step_make_no_warning(bridge, caplog):
    """``never awaited`` would be an error here."""

    async def child():
        await forever()

    async def work():
        asyncio.get_running_loop().create_task(child())

    await bridge.call(work)


async def test_a_task_started_by_a_timer_after_the_call_is_found(bridge, caplog):
    cancelled = []

    async def late(reached):
        reached()
        try:
            await forever()
        finally:
            cancelled.append(1)

    async def work(reached):
        loop, kept = asyncio.get_running_loop(), []
        loop.call_later(0.01, lambda: kept.append(loop.create_task(late(reached))))

    reached = Reached()
    await bridge.call(work, reached)
    await reached.wait()
    (name,) = bridge.statistics().misuse[Misuse.LEAKED]
    assert "work" in name


async def echo(reader, writer):
    writer.write(await reader.read(1))
    await writer.drain()
    writer.close()


async def serve(servers):
    servers.append(await asyncio.start_server(echo, "127.0.0.1", 0))


async def use(servers):
    reader, writer = await asyncio.open_connection(*servers[0].sockets[0].getsockname())
    writer.write(b"x")
    answer = await reader.read()
    writer.close()
    return answer


async def shut(servers):
    servers[0].close()
    await servers[0].wait_closed()


@pytest.mark.parametrize(
    ("policy", "blamed"),
    [(OnLeak.WARN, None), (OnLeak.CANCEL, "still starts tasks"), (OnLeak.ERROR, "still starts tasks")],
)
async def test_what_a_server_does_that_outlives_its_call(open_any, caplog, policy, blamed):
    """No misuse where tasks may outlive their call; elsewhere it is counted once, not for each connection."""
    servers = []
    async with open_any(on_leak=policy) as bridge:
        await bridge.call(serve, servers)
        for _ in range(3):
            assert await bridge.call(use, servers) == b"x"
        await bridge.call(shut, servers)
        leaked = bridge.statistics().misuse.get(Misuse.LEAKED, {})
    assert list(leaked.values()) == ([] if blamed is None else [1])
    assert blamed is None or blamed in caplog.text


async def test_what_is_meant_to_outlive_its_call_is_not_blamed_for_it(bridge):
    """A server, and a task, started by ``call_keeping``; the bridge ends them when it is left."""
    servers, log = [], []
    assert await bridge.call_keeping(leave_one, Reached(), log) == "value"
    await bridge.call_keeping(serve, servers)
    for _ in range(3):
        assert await bridge.call(use, servers) == b"x"
    assert not log
    await bridge.call(shut, servers)
    assert not bridge.statistics().misuse


async def test_what_is_meant_to_outlive_its_call_ends_with_the_bridge(open_any):
    log = []
    async with open_any() as bridge:
        await bridge.call_keeping(leave_one, Reached(), log)
        assert not log
    assert log == ["cancelled"]
    assert not bridge.statistics().misuse


async def test_a_long_lived_thing_in_an_iterated_generator_is_not_blamed(bridge):
    servers = []

    async def open_server():
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        try:
            yield server
        finally:
            server.close()

    async with bridge.iterate(open_server) as opened:
        servers.append(await anext(opened))
        for _ in range(3):
            assert await bridge.call(use, servers) == b"x"
    assert not servers[0].sockets
    assert not bridge.statistics().misuse


async def test_virtual_time_is_exact_in_loop(autojump_clock):
    """An hour of asyncio's sleep and an hour of grace take no time."""
    begun = trio.current_time()

    async def stubborn():
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                return await asyncio.sleep(3600)

    async with open_bridge("in-loop", settings=BridgeSettings(again=60, grace=600)) as bridge:
        await bridge.call(asyncio.sleep, 3600)
        assert trio.current_time() - begun == 3600
        with trio.move_on_after(100):
            await bridge.call(stubborn)
        assert trio.current_time() - begun == 4300
        assert bridge.statistics().zombies == 1
