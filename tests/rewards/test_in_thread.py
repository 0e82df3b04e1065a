"""Scorers in threads: a bounded number at once; hung threads are counted, and too many are an error."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator

import attrs
import pytest
import trio

from trio_rollout._core.failures import failure_of
from trio_rollout.errors import RewardError, SettingsError
from trio_rollout.rewards import in_thread


@attrs.define(eq=False)
class Doors:
    """A scorer that reports its start, and waits until the test lets it go."""

    begun: list[trio.Event] = attrs.field(factory=lambda: [trio.Event() for _ in range(5)])
    let_go: threading.Event = attrs.field(factory=threading.Event)
    token: trio.lowlevel.TrioToken = attrs.field(factory=trio.lowlevel.current_trio_token)

    def __call__(self, number: int) -> float:
        self.token.run_sync_soon(self.begun[number].set)
        self.let_go.wait(60)
        return number / 2


@pytest.fixture
async def doors() -> Iterator[Doors]:
    """A scorer whose threads end with the test."""
    doors = Doors()
    yield doors
    doors.let_go.set()


async def hang(reward: Callable[[int], object], doors: Doors, number: int) -> None:
    """Make a call and cancel it once its thread runs."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reward, number)
        await doors.begun[number].wait()
        nursery.cancel_scope.cancel()


async def until_ended(reward: object) -> None:
    """Wait until the hung threads have ended."""
    with trio.fail_after(60):
        while reward.hung:
            await trio.lowlevel.checkpoint()


async def test_it_returns_what_the_function_returns_from_another_thread():
    assert await in_thread(abs)(-2) == 2
    assert await in_thread(lambda _: threading.get_ident())(0) != threading.get_ident()


async def test_it_raises_what_the_function_raises():
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda value: 1 / value)(0)


async def test_no_more_than_limit_run_at_once(doors: Doors):
    reward = in_thread(doors, limit=2)
    scores: list[float] = []

    async def score(number: int) -> None:
        scores.append(await reward(number))

    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(score, number)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert sum(event.is_set() for event in doors.begun) == 2
        assert "2 of 2 running" in repr(reward)
        doors.let_go.set()
    assert sorted(scores) == [0.0, 0.5, 1.0]
    assert reward.running == reward.hung == 0


async def test_a_cancelled_call_frees_its_slot_at_once_and_its_thread_counts_as_hung(doors: Doors):
    reward = in_thread(doors, limit=1)

    await hang(reward, doors, 0)
    assert (reward.running, reward.hung) == (0, 1)
    await hang(reward, doors, 1)
    assert repr(reward) == "<in_thread(Doors): 0 of 1 running, 2 of 8 hung>"

    doors.let_go.set()
    await until_ended(reward)
    assert await reward(2) == 1.0


async def test_too_many_hung_threads_are_an_error_until_some_have_ended(doors: Doors):
    reward = in_thread(doors, limit=1, max_hung=1)
    for number in range(2):
        await hang(reward, doors, number)

    with pytest.raises(
        RewardError, match="2 threads hang, 1 are allowed; a scorer that can hang belongs into in_process"
    ):
        await reward(2)
    assert not doors.begun[2].is_set()

    doors.let_go.set()
    await until_ended(reward)
    assert await reward(2) == 1.0


async def test_a_call_that_waited_for_a_slot_is_refused_too(doors: Doors):
    """Else the call would wait for threads that never end."""
    reward = in_thread(doors, limit=1, max_hung=0)
    refused = trio.Event()

    async def wait_for_a_slot() -> None:
        with pytest.raises(RewardError, match="1 threads hang, 0 are allowed"):
            await reward(1)
        refused.set()

    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as first:
            first.start_soon(reward, 0)
            await doors.begun[0].wait()
            nursery.start_soon(wait_for_a_slot)
            await trio.testing.wait_all_tasks_blocked()
            first.cancel_scope.cancel()
        await refused.wait()
    doors.let_go.set()
    await until_ended(reward)


async def test_cancelled_before_it_starts_nothing_hangs():
    reward = in_thread(abs)
    with trio.CancelScope() as scope:
        scope.cancel()
        await reward(1)
    assert scope.cancelled_caught
    assert (reward.running, reward.hung) == (0, 0)


@pytest.mark.parametrize(("limit", "max_hung", "field"), [(0, 1, "limit"), (1, -1, "max_hung")])
def test_limits_are_checked(limit: int, max_hung: int, field: str):
    with pytest.raises(SettingsError, match=rf"InThread\.{field}: got"):
        in_thread(abs, limit=limit, max_hung=max_hung)


class OutsideOfException(BaseException):
    """What an extension in Rust raises."""


@pytest.mark.parametrize(
    "raised", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, OutsideOfException]
)
async def test_f101_an_exception_of_any_class_is_the_calls_failure_with_its_type(raised: type[BaseException]):
    def score(value: object) -> float:
        raise raised("away")

    with pytest.raises(RewardError, match=rf"score raised {raised.__name__}: away") as caught:
        await in_thread(score)(0)
    assert isinstance(caught.value.__cause__, raised)
    assert failure_of(caught.value).type == raised.__name__


async def test_f107_a_scorer_that_needs_the_main_thread_is_told_of_in_process():
    def score(value: object) -> float:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return 1.0

    with pytest.raises(ValueError, match="main thread") as caught:
        await in_thread(score)(0)
    assert "in_process(fn)" in failure_of(caught.value).message
