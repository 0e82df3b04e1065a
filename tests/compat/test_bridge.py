"""Calls across the bridge: results, errors, context, misplaced calls, opening and closing."""

import asyncio
import contextvars
import functools
import gc
import threading

import pytest
import sniffio
import trio
import trio.testing

from trio_rollout.errors import SettingsError
from trio_rollout_compat.bridge import (
    AsyncioCancelled,
    AsyncioExit,
    BridgeClosed,
    BridgeError,
    BridgeSettings,
    Misuse,
    open_bridge,
)

from .handshake import Reached, forever

VARIABLE = contextvars.ContextVar("variable", default="unset")


async def add(one, *, two):
    await asyncio.sleep(0)
    return one + two


async def test_a_call_returns_what_the_function_returns(bridge):
    assert await bridge.call(add, 1, two=2) == 3
    assert await bridge.wrap(add)(1, two=3) == 4
    assert bridge.wrap(add).__name__ == "add"


async def test_asyncio_is_whole_inside(bridge):
    """Gather, timeouts, queues, locks, child tasks, threads."""

    async def everything():
        queue, lock = asyncio.Queue(), asyncio.Lock()
        async with lock, asyncio.TaskGroup() as group:
            group.create_task(queue.put(1))
        async with asyncio.timeout(10):
            first, second = await asyncio.gather(queue.get(), asyncio.to_thread(lambda: 2))
        return first + second + await asyncio.wait_for(add(3, two=4), 10), sniffio.current_async_library()

    assert await bridge.call(everything) == (10, "asyncio")


async def test_many_calls_at_once(bridge):
    results = []

    async def one(number):
        results.append(await bridge.call(add, number, two=0))

    async with trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(one, number)
    assert sorted(results) == list(range(50))


@pytest.mark.parametrize(
    "error", [ValueError("x"), TimeoutError("late"), ExceptionGroup("g", [ValueError(1), OSError(2)])]
)
async def test_an_exception_crosses_as_itself(bridge, error):
    async def fail():
        raise error

    with pytest.raises(type(error)) as caught:
        await bridge.call(fail)
    assert caught.value is error


async def test_a_timeout_inside_is_a_timeout_error(bridge):
    async def slow():
        async with asyncio.timeout(0):
            await forever()

    with pytest.raises(TimeoutError):
        await bridge.call(slow)


async def test_an_exit_without_a_repr_is_told_all_the_same(bridge, caplog):
    class Unspeakable(SystemExit):
        def __repr__(self):
            raise ValueError

    class Nameless:
        def __getattr__(self, name):
            raise ValueError(name)

        async def __call__(self):
            raise Unspeakable

    with pytest.raises(AsyncioExit, match=r"Nameless: raised <.*Unspeakable, whose repr fails>"):
        await bridge.call(Nameless())


async def test_a_cancelled_error_of_its_own_becomes_an_exception(bridge):
    async def cancelled():
        raise asyncio.CancelledError("library")

    with pytest.raises(AsyncioCancelled, match=r"cancelled.*the Trio side did not ask for"):
        await bridge.call(cancelled)


async def test_exits_become_exceptions_and_the_bridge_goes_on(bridge, caplog):
    async def leave():
        raise SystemExit(3)

    with pytest.raises(AsyncioExit, match=r"leave.*SystemExit\(3\)"):
        await bridge.call(leave)
    assert await bridge.call(add, 1, two=1) == 2
    assert sum(bridge.statistics().misuse[Misuse.EXITED].values()) == 1


async def test_exits_in_child_tasks_stay_in_their_group(bridge, caplog):
    async def leave():
        raise SystemExit(3)

    async def parent():
        async with asyncio.TaskGroup() as group:
            group.create_task(leave())

    with pytest.raises(ExceptionGroup) as caught:
        await bridge.call(parent)
    assert isinstance(caught.value.exceptions[0], AsyncioExit)


async def test_a_group_with_a_cancellation_in_it_becomes_a_group_of_exceptions(bridge):
    async def fail():
        raise BaseExceptionGroup("g", [asyncio.CancelledError(), ValueError(1)])

    with pytest.raises(ExceptionGroup) as caught:
        await bridge.call(fail)
    assert [type(error) for error in caught.value.exceptions] == [AsyncioCancelled, ValueError]


async def test_a_background_crash_is_counted_and_named(bridge, caplog):
    async def crash():
        raise ValueError("in the background")

    async def parent():
        task = asyncio.create_task(crash())
        await asyncio.wait([task])
        del task

    await bridge.call(parent)
    gc.collect()  # asyncio speaks of it when the task is thrown away
    await bridge.call(add, 1, two=1)
    (name,) = bridge.statistics().misuse[Misuse.CRASHED]
    assert "parent" in name
    assert "in the background" in caplog.text


async def test_context_variables_are_copied_in(bridge):
    async def read():
        before = VARIABLE.get()
        VARIABLE.set("asyncio")
        return before, await asyncio.create_task(asyncio.sleep(0, VARIABLE.get()))

    VARIABLE.set("trio")
    assert await bridge.call(read) == ("trio", "asyncio")
    assert VARIABLE.get() == "trio"


async def test_a_sync_function_is_refused_with_a_sentence(bridge):
    with pytest.raises(TypeError, match=r"returned int, an awaitable is wanted.*in_thread"):
        await bridge.call(len, "x")


async def test_calls_from_tasks_that_are_no_descendants(open_any):
    """The nursery is outside of the bridge's block."""
    results = []

    async def later(bridge, go):
        await go.wait()
        results.append(await bridge.call(add, 1, two=1))

    async with trio.open_nursery() as nursery:
        go, done = trio.Event(), trio.Event()
        async with open_any() as bridge:

            async def run():
                await later(bridge, go)
                done.set()

            nursery.start_soon(run)
            go.set()
            await done.wait()
    assert results == [2]


async def test_calls_from_worker_threads(bridge):
    def work():
        return trio.from_thread.run(functools.partial(bridge.call, add, 1, two=1))

    assert await trio.to_thread.run_sync(work) == 2


async def test_a_call_outside_of_trio_is_refused(bridge):
    def work():
        with pytest.raises(RuntimeError, match="this is no Trio code"):
            bridge.call(add, 1, two=1).send(None)

    await trio.to_thread.run_sync(work)


async def test_a_call_from_asyncio_code_is_refused(bridge):
    async def inner():
        return await bridge.call(add, 1, two=1)

    with pytest.raises(RuntimeError, match=r"no Trio code|called from asyncio code"):
        await bridge.call(inner)


async def test_a_call_from_another_trio_run_is_refused(bridge):
    async def other():
        with pytest.raises(RuntimeError, match="belongs to another Trio run"):
            await bridge.call(add, 1, two=1)

    await trio.to_thread.run_sync(trio.run, other)


async def test_a_call_after_the_end_is_refused(open_any):
    async with open_any() as bridge:
        pass
    with pytest.raises(BridgeClosed, match="block was left"):
        await bridge.call(add, 1, two=1)


async def test_leaving_ends_the_calls_of_other_tasks(open_any):
    async def hang(reached, cleaned):
        reached()
        try:
            await forever()
        finally:
            await asyncio.sleep(0)
            cleaned()

    async def caller(bridge, reached, cleaned):
        with pytest.raises(BridgeClosed, match="because the bridge was left"):
            await bridge.call(hang, reached, cleaned)

    async with trio.open_nursery() as nursery:
        reached, cleaned = Reached(), Reached()
        async with open_any() as bridge:
            nursery.start_soon(caller, bridge, reached, cleaned)
            await reached.wait()
        await cleaned.wait()


async def test_the_body_s_exception_comes_out_as_itself(open_any):
    error = ValueError("body")
    with pytest.raises(ValueError, match="body") as caught:
        async with open_any():
            raise error
    assert caught.value is error


@pytest.mark.parametrize("kind", ["thread", "in-loop"])
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
async def test_a_callback_that_exits_does_not_kill_a_loop_of_our_own(caplog, kind, error):
    async def leave():
        asyncio.get_running_loop().call_soon(exit_now)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return "alive"

    def exit_now():
        raise error(1)

    async with open_bridge(kind) as bridge:
        assert await bridge.call(leave) == "alive"
        assert await bridge.call(leave) == "alive"
    assert caplog.text.count("the loop goes on") == 2


@pytest.mark.parametrize("kind", ["thread", "in-loop"])
async def test_stopping_the_loop_does_not_stop_a_loop_of_our_own(kind, caplog):
    async def stop():
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0)
        return "alive"

    async with open_bridge(kind) as bridge:
        assert await bridge.call(stop) == "alive"
        assert await bridge.call(add, 1, two=1) == 2


async def test_who_takes_the_task_factory_away_does_not_get_the_loop(bridge, caplog):
    """A library may replace the task factory without a chain: exits are kept from the loop all the same."""

    async def take_away():
        asyncio.get_running_loop().set_task_factory(None)

    async def leave():
        raise SystemExit(3)

    await bridge.call(take_away)
    for _ in range(2):
        with pytest.raises(AsyncioExit):
            await bridge.call(leave)
    assert await bridge.call(add, 1, two=1) == 2


async def test_a_loop_factory_is_used():
    made = []

    def factory():
        made.append(asyncio.SelectorEventLoop())
        return made[0]

    async def running():
        return asyncio.get_running_loop()

    async with open_bridge("thread", loop_factory=factory) as bridge:
        assert await bridge.call(running) is made[0]
    assert made[0].is_closed()


async def test_attach_runs_on_the_host_s_loop_and_leaves_it_as_it_was(host_loop):
    async def running():
        return asyncio.get_running_loop(), threading.current_thread().name

    async with open_bridge(loop=host_loop) as bridge:
        assert await bridge.call(running) == (host_loop, "host")
    assert host_loop.is_running()
    assert host_loop.get_task_factory() is None
    assert host_loop.get_exception_handler() is None


async def test_attach_chains_to_the_host_s_hooks(host_loop):
    made, seen = [], []

    def factory(loop, coro, **more):
        made.append(coro)
        return asyncio.Task(coro, loop=loop, **more)

    host_loop.set_task_factory(factory)
    host_loop.set_exception_handler(lambda loop, context: seen.append(context["message"]))

    async def child():
        host_loop.call_exception_handler({"message": "hello"})

    async def parent():
        await asyncio.create_task(child())

    async with open_bridge(loop=host_loop) as one, open_bridge(loop=host_loop) as two:
        await one.call(parent)
        await two.call(parent)
    assert len(made) == 4
    assert seen == ["hello", "hello"]
    assert host_loop.get_task_factory() is factory


def without_context(loop, coro):
    """A task factory without ``context``, as before Python 3.11."""
    return asyncio.Task(coro, loop=loop)


async def test_a_host_s_old_task_factory_will_do(host_loop):
    """Contexts reach the function and its children all the same."""
    host_loop.set_task_factory(without_context)

    async def read():
        return VARIABLE.get()

    async def parent():
        return await asyncio.create_task(read()), asyncio.current_task().get_name()

    VARIABLE.set("trio")
    async with open_bridge(loop=host_loop) as bridge:
        value, name = await bridge.call(parent)
    assert value == "trio"
    assert name.endswith("parent")
    assert not bridge.statistics().misuse


@pytest.mark.parametrize("error", [RuntimeError("no tasks please"), SystemExit(1)])
async def test_a_host_s_task_factory_that_raises_fails_the_call(host_loop, error):
    def factory(loop, coro, **more):
        raise error

    host_loop.set_task_factory(factory)
    async with open_bridge(loop=host_loop) as bridge:
        with pytest.raises(BridgeError, match=r"add: .* made no task of it") as caught, trio.fail_after(10):
            await bridge.call(add, 1, two=1)
        assert caught.value.__cause__ is error
        assert bridge.statistics().running == 0
    host_loop.set_task_factory(None)


async def test_two_bridges_on_one_loop_are_told_apart(host_loop, caplog):
    """Misuse is counted by the bridge that made the call, and by no other."""
    settings = BridgeSettings(slow_step=0.01, grace=10.0)

    async def everything_wrong():
        threading.Event().wait(0.02)
        task = asyncio.create_task(asyncio.sleep(1000))
        asyncio.get_running_loop().call_soon(fail)
        await asyncio.sleep(0)
        del task
        raise SystemExit(1)

    def fail():
        raise ValueError("in a callback")

    async def wrong(bridge):
        with pytest.raises(AsyncioExit):
            await bridge.call(everything_wrong)
        return told(bridge)

    def told(bridge):
        """Return the count of each kind; True for slow steps, because on a busy machine any step may be slow."""
        misuse = bridge.statistics().misuse
        return {kind: kind is Misuse.BLOCKED or sum(names.values()) for kind, names in misuse.items()}

    async with (
        open_bridge(loop=host_loop, settings=settings) as outer,
        open_bridge(loop=host_loop, settings=settings) as inner,
    ):
        counts = await wrong(inner)
        assert set(counts) == {Misuse.BLOCKED, Misuse.LEAKED, Misuse.CRASHED, Misuse.EXITED}
        assert not outer.statistics().misuse
        assert await wrong(outer) == counts
        assert told(inner) == counts


async def test_bridges_that_overlap_leave_nothing_on_the_host_s_loop(host_loop):
    """The first bridge is left first: the second must not put its hooks back."""
    async with trio.open_nursery() as nursery:
        entered, go = trio.Event(), trio.Event()

        async def first():
            async with open_bridge(loop=host_loop) as bridge:
                entered.set()
                await go.wait()
                await bridge.call(add, 1, two=1)

        nursery.start_soon(first)
        await entered.wait()
        async with open_bridge(loop=host_loop) as bridge:
            go.set()
            while nursery.child_tasks:
                await trio.testing.wait_all_tasks_blocked()
                await bridge.call(add, 1, two=1)
    assert host_loop.get_task_factory() is None
    assert host_loop.get_exception_handler() is None


async def test_attach_to_a_closed_loop_is_refused():
    loop = asyncio.SelectorEventLoop()
    loop.close()
    with pytest.raises(BridgeError, match="it is closed"):
        async with open_bridge(loop=loop):
            pass


async def test_attach_to_a_loop_that_does_not_run_is_refused(autojump_clock):
    loop = asyncio.SelectorEventLoop()
    with pytest.raises(BridgeError, match=r"did not run a function within 10.0 s.*this very thread"):
        async with open_bridge(loop=loop):
            pass
    loop.close()


def run_and_close(loop):
    loop.run_forever()
    loop.close()


async def test_the_host_closes_its_loop(caplog):
    """New calls are refused; one that was under way is cancelled by its deadline and abandoned at once."""
    loop = asyncio.SelectorEventLoop()
    thread = threading.Thread(target=run_and_close, args=[loop])
    thread.start()

    async def hang(reached, tasks):
        tasks.append(asyncio.current_task())
        reached()
        await forever()

    async with open_bridge(loop=loop, settings=BridgeSettings(grace=60.0)) as bridge, trio.open_nursery() as nursery:
        reached, tasks = Reached(), []
        nursery.start_soon(bridge.call, hang, reached, tasks)
        await reached.wait()
        loop.call_soon_threadsafe(loop.stop)
        await trio.to_thread.run_sync(thread.join)
        with pytest.raises(BridgeClosed, match=r"the host's .* is closed"):
            await bridge.call(add, 1, two=1)
        nursery.cancel_scope.cancel()
    assert "its event loop is closed" in caplog.text
    tasks[0]._log_destroy_pending = False
    tasks.pop().get_coro().close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "green"}, "allowed: 'attach', 'thread', 'in-loop'"),
        ({"backend": "attach"}, "which needs one"),
        ({"backend": "in-loop", "loop_factory": asyncio.SelectorEventLoop}, "makes no loop"),
    ],
)
async def test_arguments_that_do_not_fit(arguments, message):
    with pytest.raises(SettingsError, match=message):
        async with open_bridge(**arguments):
            pass
