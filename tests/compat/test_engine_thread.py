"""EngineThread in one process: calls, results, timeouts, crashes, use after close."""

import asyncio
import concurrent.futures
import gc
import threading
import time
from contextlib import asynccontextmanager

import pytest
import trio

from trio_rollout._util.service import open_service
from trio_rollout.errors import EngineClosed
from trio_rollout_compat.bridge import AsyncioCancelled
from trio_rollout_compat.thread import EngineStuck, EngineThread, aopen_engine_thread, open_engine_thread


class Engine:
    """A value with a lifetime: ``log`` says what was cleaned up, ``crash`` ends it."""

    def __init__(self):
        self.log = []
        self.crash = trio.Event()
        self.produced = 0
        self.wanted = trio.Event()

    async def add(self, one, two=0):
        await trio.lowlevel.checkpoint()
        return one + two

    async def hang(self, reached=None):
        try:
            if reached is not None:
                reached.set()
            await trio.sleep_forever()
        finally:
            self.log.append("hang cleaned")

    async def fail(self, error):
        await trio.lowlevel.checkpoint()
        raise error

    async def trigger(self):
        self.crash.set()
        await trio.sleep_forever()


CRASH = RuntimeError("producer")


@asynccontextmanager
async def lifespan():
    engine = Engine()

    async def serve(*, task_status):
        task_status.started()
        await engine.crash.wait()
        raise CRASH.with_traceback(None)  # it lives as long as the tests: it must not keep what each of them was doing

    async def leave(_value, _error):
        await trio.lowlevel.checkpoint()

    async with open_service(serve, leave):
        try:
            yield engine
        finally:
            engine.log.append("left")


@pytest.fixture
def thread():
    with open_engine_thread(lifespan, grace=5) as thread:
        yield thread


def test_a_call_returns_what_the_function_returns(thread):
    assert thread.call(thread.value.add, 1, two=2) == 3
    assert thread.submit(thread.value.add, 1).result() == 1


def test_production_goes_on_between_calls(thread):
    engine = thread.value

    async def produce():
        while engine.produced < 100:
            engine.produced += 1
            await trio.lowlevel.checkpoint()
        engine.wanted.set()

    future = thread.submit(produce)
    thread.call(engine.wanted.wait)
    future.result()
    assert engine.produced == 100


def test_sixteen_threads_call_at_once(thread):
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda number: thread.call(thread.value.add, number), range(64))) == list(range(64))


class Odd(BaseException):
    """An exception that only its caller may see."""


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        TimeoutError("its own"),
        ExceptionGroup("g", [OSError()]),
        SystemExit(3),
        KeyboardInterrupt(),
        Odd(),
        BaseExceptionGroup("g", [SystemExit(3), asyncio.CancelledError()]),
    ],
)
def test_an_error_reaches_its_caller_and_the_engine_lives_on(thread, error):
    with pytest.raises(type(error)) as caught:
        thread.call(thread.value.fail, error, timeout=10)
    assert caught.value is error
    assert thread.call(thread.value.add, 1) == 1


def rogue():
    """A Cancelled that was kept: its scope was left before."""

    async def cancelled():
        with trio.CancelScope() as scope:
            scope.cancel()
            try:
                await trio.sleep_forever()
            except trio.Cancelled as error:
                kept.append(error)
                raise

    kept = []
    trio.run(cancelled)
    return kept[0]


@pytest.mark.parametrize(
    ("make", "seen", "message"),
    [
        (asyncio.CancelledError, AsyncioCancelled, "the Trio side did not ask for"),
        (concurrent.futures.CancelledError, AsyncioCancelled, "the Trio side did not ask for"),
        (StopIteration, RuntimeError, r"fail raised StopIteration\(\)"),
        (GeneratorExit, RuntimeError, r"fail raised GeneratorExit\(\)"),
        (rogue, RuntimeError, "fail raised .*Cancelled"),
    ],
)
def test_what_a_future_can_t_carry_comes_as_an_exception_with_it_as_the_cause(thread, make, seen, message):
    """In a host it would mean that the host's own wait was cancelled, or would not arrive at all."""
    error = make()

    def fail():  # a coroutine would make a RuntimeError of a StopIteration by itself
        raise error

    with pytest.raises(seen, match=message) as caught:
        thread.call(fail, timeout=10)
    assert caught.value.__cause__ is error
    with pytest.raises(seen, match=message):
        asyncio.run(asyncio.wait_for(thread.acall(fail), 10))
    assert thread.call(thread.value.add, 1) == 1


class Unspeakable(StopIteration):
    """An error whose repr fails."""

    def __repr__(self):
        raise ValueError


@pytest.mark.parametrize("error", [None, ValueError("x")])
def test_a_host_s_callback_that_raises_costs_the_engine_nothing(thread, caplog, error):
    """``concurrent.futures`` lets such a class through, into the engine's thread."""

    def leave(_future):
        raise SystemExit(9)

    release = threading.Event()

    async def wait():
        await trio.to_thread.run_sync(release.wait)
        if error is not None:
            raise error

    future = thread.submit(wait)
    future.add_done_callback(leave)
    release.set()
    assert future.exception(10) is error
    assert thread.call(thread.value.add, 1) == 1
    assert "a callback on the answer of" in caplog.text


def test_an_error_without_a_repr_is_told_all_the_same(thread):
    def fail():
        raise Unspeakable

    with pytest.raises(RuntimeError, match=r"<Unspeakable, whose repr fails>") as caught:
        thread.call(fail, timeout=10)
    assert isinstance(caught.value.__cause__, Unspeakable)
    assert thread.call(thread.value.add, 1) == 1


def test_a_crash_without_a_repr_is_told_all_the_same():
    class Crash(RuntimeError):
        def __repr__(self):
            raise ValueError

    @asynccontextmanager
    async def crashing():
        yield  # ruff: ignore[fallible-context-manager]  that is the point
        raise Crash

    thread = EngineThread(crashing).start()
    with pytest.raises(Crash):
        thread.close()
    with pytest.raises(EngineClosed, match=r"it failed with <.*Crash, whose repr fails>"):
        thread.call(trio.lowlevel.checkpoint)


def test_an_exit_among_the_tasks_of_a_call_ends_that_call_only(thread):
    async def leave():
        await trio.lowlevel.checkpoint()
        raise SystemExit(3)

    async def parent():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave)
            nursery.start_soon(trio.sleep_forever)

    with pytest.raises(BaseExceptionGroup) as caught:
        thread.call(parent, timeout=10)
    assert [type(error) for error in caught.value.exceptions] == [SystemExit]
    assert thread.call(thread.value.add, 1) == 1


def test_what_a_cancelled_call_raises_beside_its_cancellation_is_told(thread):
    """Its cleanup fails, in a nursery, while the engine is closed."""
    reached = threading.Event()

    async def fail():
        try:
            reached.set()
            await trio.sleep_forever()
        finally:
            raise Odd

    async def parent():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)
            nursery.start_soon(trio.sleep_forever)

    future = thread.submit(parent)
    reached.wait()
    thread.close()
    with pytest.raises(BaseExceptionGroup) as caught:
        future.result(10)
    assert [type(error) for error in caught.value.exceptions] == [Odd]
    assert thread.value.log == ["left"]


def test_a_timeout_cancels_and_waits_for_the_cleanup(thread):
    with pytest.raises(TimeoutError, match=r"Engine.hang was cancelled: it had not returned after 0.01 s"):
        thread.call(thread.value.hang, timeout=0.01)
    assert thread.value.log == ["hang cleaned"]


def test_a_result_of_the_last_moment_is_not_lost(thread):
    async def late():
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(release.wait)
        return "a batch"

    release = threading.Event()
    threading.Timer(0.05, release.set).start()
    assert thread.call(late, timeout=0.01) == "a batch"


def test_a_result_that_comes_between_the_timeout_and_the_look_at_it_is_not_lost(thread, monkeypatch):
    """The waiting thread's timeout has passed, but it runs again only when the answer is there."""

    async def late():
        go.set()
        await trio.to_thread.run_sync(release.wait)
        return "a batch"

    go, release, wait = threading.Event(), threading.Event(), concurrent.futures.wait

    def waited(futures, timeout=None):
        answer = wait(futures, timeout)
        go.wait()
        release.set()
        wait(futures)
        return answer

    monkeypatch.setattr(concurrent.futures, "wait", waited)
    monkeypatch.setattr(
        concurrent.futures.Future, "result", timed_out_late(concurrent.futures.Future.result, go, release)
    )
    assert thread.call(late, timeout=0.01) == "a batch"


def timed_out_late(result, go, release):
    """Let ``Future.result`` report its timeout only when the answer is there."""

    def late(future, timeout=None):
        try:
            return result(future, timeout)
        except TimeoutError:
            go.wait()
            release.set()
            result(future)
            raise

    return late


def test_cancelling_the_future_cancels_the_function(thread):
    reached = threading.Event()
    future = thread.submit(thread.value.hang, reached)
    reached.wait()
    assert future.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    thread.call(thread.value.add, 1)
    thread.close()
    assert thread.value.log == ["hang cleaned", "left"]


def test_asyncio_hosts_await_and_cancel(thread):
    reached = threading.Event()

    async def host():
        assert await thread.acall(thread.value.add, 1, two=2) == 3
        task = asyncio.create_task(thread.acall(thread.value.hang, reached))
        await asyncio.to_thread(reached.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert thread.value.log == ["hang cleaned"]
        with pytest.raises(ValueError, match="x"):
            await thread.acall(thread.value.fail, ValueError("x"))

    asyncio.run(host())


def test_a_failed_start_raises_as_itself():
    error = ValueError("start")

    @asynccontextmanager
    async def broken():
        await trio.lowlevel.checkpoint()
        raise error
        yield

    with pytest.raises(ValueError, match="start") as caught, open_engine_thread(broken):
        raise AssertionError
    assert caught.value is error


def test_a_start_that_hangs_is_given_up():
    cleaned = []

    @asynccontextmanager
    async def slow():
        try:
            await trio.sleep_forever()
        finally:
            cleaned.append(1)
        yield

    with (
        pytest.raises(EngineStuck, match=r"not ready after 0.01 s; its thread is in"),
        open_engine_thread(slow, start_timeout=0.01),
    ):
        raise AssertionError
    assert cleaned


def test_use_after_close_and_before_start():
    thread = EngineThread(lifespan)
    with pytest.raises(EngineClosed, match="not started"):
        thread.call(trio.sleep, 0)
    thread.start()
    engine = thread.value
    thread.close()
    thread.close()
    assert engine.log == ["left"]
    with pytest.raises(EngineClosed, match="the engine is closed") as caught:
        thread.call(engine.add, 1)
    assert caught.value.__cause__ is None
    with pytest.raises(EngineClosed):
        asyncio.run(thread.acall(engine.add, 1))
    assert "closed" in repr(thread)


def test_closed_before_it_was_started():
    thread = EngineThread(lifespan)
    thread.close()
    with pytest.raises(EngineClosed):
        thread.start()
    thread.close()


def test_it_can_t_be_started_again(thread):
    thread.close()
    with pytest.raises(EngineClosed, match=r"start: the engine is closed"):
        thread.start()


def test_a_failed_one_can_t_be_started_again():
    thread = EngineThread(lifespan).start()
    with pytest.raises(EngineClosed):
        thread.call(thread.value.trigger)
    with pytest.raises(EngineClosed, match="producer") as caught:
        thread.start()
    assert caught.value.__cause__ is CRASH


def test_before_it_is_started_there_is_no_value():
    with pytest.raises(EngineClosed, match="value: the engine is not started"):
        _ = EngineThread(lifespan).value


def test_started_from_many_threads_at_once_it_starts_once(monkeypatch):
    starts, thread = [], EngineThread(lifespan)
    real, barrier = threading.Thread.start, threading.Barrier(8)

    def start(self):
        if self.name == "trio-rollout engine":
            starts.append(1)
            threading.Event().wait(0.05)  # everybody else comes here meanwhile, if nothing keeps them out
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)

    def run():
        barrier.wait()
        return thread.start()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert {future.result() for future in [pool.submit(run) for _ in range(8)]} == {thread}
    assert starts == [1]
    thread.close()


def test_an_exit_by_a_signal_as_the_thread_starts_is_no_reason_to_leave_it_running(monkeypatch):
    cleaned, reached = [], threading.Event()
    real = threading.Thread.start

    @asynccontextmanager
    async def slow():
        reached.set()
        try:
            await trio.sleep_forever()
        finally:
            cleaned.append(1)
        yield

    def start(self):
        real(self)
        if self.name == "trio-rollout engine":
            reached.wait()
            raise SystemExit(143)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(SystemExit), open_engine_thread(slow):
        raise AssertionError
    assert cleaned


def test_where_no_thread_can_be_started_there_is_nothing_to_close(monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"), open_engine_thread(lifespan, grace=5):
            raise AssertionError


def test_closing_ends_the_calls_under_way():
    thread = EngineThread(lifespan).start()
    reached = threading.Event()
    future = thread.submit(thread.value.hang, reached)
    reached.wait()
    thread.close()
    with pytest.raises(EngineClosed, match=r"Engine.hang: the engine is closed"):
        future.result()
    assert thread.value.log == ["hang cleaned", "left"]


def test_a_crash_reaches_every_waiting_call_with_its_cause():
    thread = EngineThread(lifespan).start()
    reached = threading.Event()
    waiting = [thread.submit(thread.value.hang, reached) for _ in range(3)]
    reached.wait()
    with pytest.raises(EngineClosed, match=r"it failed with RuntimeError\('producer'\)") as caught:
        thread.call(thread.value.trigger)
    assert caught.value.__cause__ is CRASH
    for future in waiting:
        with pytest.raises(EngineClosed) as caught:
            future.result()
        assert caught.value.__cause__ is CRASH
    with pytest.raises(EngineClosed) as caught:
        thread.call(thread.value.add, 1)
    assert caught.value.__cause__ is CRASH
    thread.close()  # it was told


def test_a_crash_that_no_call_was_told_of_is_raised_on_closing():
    thread = EngineThread(lifespan).start()
    thread.call(trio.lowlevel.checkpoint)
    thread._engine_run._post(thread.value.crash.set)
    thread._engine_run.over.result()
    with pytest.raises(RuntimeError, match="producer") as caught:
        thread.close()
    assert caught.value is CRASH
    thread.close()


def test_calls_that_race_with_a_crash_get_its_cause():
    """A call is submitted in the very step in which the producer fails, and in the steps after it."""
    for _ in range(30):
        thread = EngineThread(lifespan).start()
        engine, futures = thread.value, []

        def race(engine=engine, thread=thread, futures=futures):
            engine.crash.set()
            futures.extend(thread.submit(engine.hang) for _ in range(3))

        thread._engine_run._post(race)
        with pytest.raises(EngineClosed) as refused:
            while True:
                futures.append(thread.submit(engine.add, 1))
                time.sleep(0)  # or it holds the GIL and submits thousands before the engine gets a turn
        errors = [refused.value, *(error for future in futures if (error := future.exception()) is not None)]
        assert {error.__cause__ for error in errors} == {CRASH}
        assert len(errors) > 3
        thread.close()


def test_the_body_s_exception_comes_out_as_itself():
    error = ValueError("body")
    with pytest.raises(ValueError, match="body") as caught, open_engine_thread(lifespan):
        raise error
    assert caught.value is error


def test_a_blocking_call_on_the_engine_s_own_thread_is_refused(thread):
    async def inside(what):
        await trio.lowlevel.checkpoint()
        what()

    with pytest.raises(RuntimeError, match="would wait for itself"):
        thread.call(inside, lambda: thread.call(thread.value.add, 1))
    with pytest.raises(RuntimeError, match="would wait for itself"):
        thread.call(inside, thread.close)


def test_a_wedged_engine_is_named_and_left_to_itself(monkeypatch):
    wedged, release, wait = threading.Event(), threading.Event(), concurrent.futures.wait

    async def wedge():
        await trio.lowlevel.checkpoint()
        wedged.set()
        release.wait()

    def timed_out_once_it_is_wedged(futures, timeout=None):
        wedged.wait()
        return wait(futures, timeout)

    thread = EngineThread(lifespan, grace=0.05).start()
    monkeypatch.setattr(concurrent.futures, "wait", timed_out_once_it_is_wedged)
    with pytest.raises(EngineStuck, match=r"wedge was cancelled and did not end within 0.05 s.*wedge \("):
        thread.call(wedge, timeout=0.01)
    with pytest.raises(EngineStuck, match=r"close: the engine did not end within 0.05 s.*wedge \("):
        thread.close(0.05)
    release.set()
    thread.close()


def test_asyncio_hosts_open_it_without_a_thread_that_waits():
    error = ValueError("body")

    async def host():
        async with aopen_engine_thread(lifespan) as thread:
            engine = thread.value
            assert await thread.acall(engine.add, 1) == 1
        assert engine.log == ["left"]
        with pytest.raises(ValueError, match="body") as caught:
            async with aopen_engine_thread(lifespan):
                raise error
        assert caught.value is error

    asyncio.run(host())


def test_an_asyncio_host_that_is_cancelled_gives_the_start_up(caplog):
    cleaned = []

    @asynccontextmanager
    async def slow():
        try:
            await trio.sleep_forever()
        finally:
            cleaned.append(1)
        yield

    async def host():
        async with asyncio.timeout(0.05), aopen_engine_thread(slow):
            raise AssertionError

    with pytest.raises(TimeoutError):
        asyncio.run(host())
    assert cleaned

    async def patient():
        async with aopen_engine_thread(slow, start_timeout=0.01):
            raise AssertionError

    with pytest.raises(EngineStuck, match=r"not ready after 0.01 s"):
        asyncio.run(patient())
    assert len(cleaned) == 2
    gc.collect()
    assert not caplog.records  # no future with an exception that was never retrieved


def test_what_an_asyncio_host_s_engine_died_of_is_told():
    async def host():
        async with aopen_engine_thread(lifespan) as thread:
            thread._engine_run._post(thread.value.crash.set)
            await asyncio.to_thread(thread._engine_run.over.result)

    with pytest.raises(RuntimeError, match="producer"):
        asyncio.run(host())
