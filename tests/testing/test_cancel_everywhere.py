"""cancel_everywhere finds the bugs that were planted, says where, and is not ended by anything a point does."""

from functools import partial

import pytest
import trio

from trio_rollout.testing import Arm, Inject, Point, Sweep, cancel_everywhere, sim_run

from .toy_pool import run_toy

BUGS = ["await before try", "marked first", "unshielded requeue"]


def sweep(bug: str, **how) -> Sweep:
    """Sweep all points of the toy pool with this bug."""
    return cancel_everywhere(partial(run_toy, bug=bug), lambda toy, _: toy.require_nothing_lost(), **how)


def test_a_correct_pool_loses_nothing_wherever_it_is_cancelled():
    for seed in range(2):
        found = sweep("", seed=seed, how=[Inject.CANCEL, Inject.CANCEL_TWICE, Inject.INTERRUPT])
        found.require("both in hand")
        assert found.points > 100


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug: str):
    found = sweep(bug)
    assert len(found.failures) > 5
    with pytest.raises(AssertionError, match="points failed"):
        found.require()


@pytest.mark.parametrize("bug", BUGS)
def test_happy_runs_do_not_find_them(bug: str):
    """A single cancellation proves little, so all points are swept."""
    for seed in range(20):
        sim_run(run_toy, Arm(lambda *_: None), seed=seed).value.require_nothing_lost()


def test_some_bugs_need_a_slow_consumer():
    """All points of one course of events are not all points."""
    fast, slow = (
        cancel_everywhere(
            partial(run_toy, bug="marked first", consumer_s=consumer_s), lambda toy, _: toy.require_nothing_lost()
        )
        for consumer_s in (0.0, 1.0)
    )
    assert len(fast.failures) < len(slow.failures)


def test_the_report_says_where():
    found = sweep("await before try", scopes=["workers"])
    assert {failure.point.scope for failure in found.failures} == {"workers"}
    assert any("worker @ worker:" in str(failure.point) for failure in found.failures)
    assert "delivered" in str(found)
    assert "require_nothing_lost" in found.failures[0].traceback


def test_a_sample_is_drawn_from_the_seed():
    found = sweep("await before try", scopes=["pool"], sample=10, seed=5)
    again = sweep("await before try", scopes=["pool"], sample=10, seed=5)
    assert found.points == 10
    assert found.failures == again.failures


async def single(arm: Arm[list[str]]) -> list[str]:
    """Sleep once in one scope, and note a cancellation."""
    log = arm.keep([])
    with trio.CancelScope() as scope:
        arm(scope)
        await trio.sleep(1)
        log.append("slept")
    return log


@pytest.mark.parametrize(
    "failure", [KeyError("a check may raise anything"), trio.Cancelled, pytest.fail.Exception("no")]
)
def test_whatever_a_check_raises_is_that_points_failure(failure):
    def check(_: list[str], point: Point | None) -> None:
        if point is not None:
            raise TypeError("no constructor") if failure is trio.Cancelled else failure

    found = cancel_everywhere(single, check)
    assert len(found.failures) == found.points > 0


def test_a_check_may_also_return_false():
    found = cancel_everywhere(single, lambda log, point: point is None)
    assert len(found.failures) == found.points
    with pytest.raises(AssertionError, match="returned False"):
        cancel_everywhere(single, lambda log, point: False)


def test_what_the_scenario_raises_when_it_is_cancelled_is_a_failure():
    async def fragile(arm: Arm[None]) -> None:
        with trio.CancelScope() as scope:
            arm(scope)
            try:
                await trio.sleep(1)
            except trio.Cancelled:
                raise OSError("cleanup failed") from None

    found = cancel_everywhere(fragile, lambda *_: None)
    assert found.failures
    assert all("cleanup failed" in failure.error for failure in found.failures)


def test_a_deadlock_after_a_cancellation_is_a_failure():
    async def forgetful(arm: Arm[None]) -> None:
        done = trio.Event()

        async def work() -> None:
            with trio.CancelScope() as scope:
                arm(scope)
                await trio.sleep(1)
                done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(work)
            await done.wait()

    found = cancel_everywhere(forgetful, lambda *_: None)
    assert found.failures
    assert all(failure.error.startswith("SimDeadlock") for failure in found.failures)


def test_an_undisturbed_run_that_fails_ends_it():
    with pytest.raises(ZeroDivisionError):
        cancel_everywhere(single, lambda *_: 1 // 0)


def test_a_scenario_without_a_scope_is_refused():
    async def unarmed(arm: Arm[None]) -> None:
        await trio.sleep(1)

    with pytest.raises(ValueError, match="nothing to do"):
        cancel_everywhere(unarmed, lambda *_: None)
    with pytest.raises(ValueError, match="two armed scopes"):
        cancel_everywhere(single, lambda *_: None, how=[Inject.CANCEL_TWICE])


def test_a_state_never_seen_is_an_error():
    """A check that never met its interesting state has proved nothing."""
    with pytest.raises(AssertionError, match="full buffer"):
        cancel_everywhere(single, lambda *_: None).require("full buffer")


def test_an_armed_scope_is_cancelled_only_while_it_lives():
    """After the scope was left there is nothing to cancel, so there are no points."""

    async def long_after(arm: Arm[None]) -> None:
        await single(arm)
        for _ in range(100):
            await trio.lowlevel.checkpoint()

    assert cancel_everywhere(long_after, lambda *_: None).points < 10


def test_an_interrupt_comes_out_of_the_scenario_and_the_check_sees_what_was_kept():
    points: list[Point] = []

    def check(log: list[str], point: Point | None) -> None:
        if point is not None and "slept" not in log:
            assert isinstance(point.error, KeyboardInterrupt)
            points.append(point)

    cancel_everywhere(single, check, how=[Inject.INTERRUPT]).require()
    assert points


def test_code_that_depends_on_more_than_the_seed_is_found():
    steps = iter([9, 9, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1])

    async def moody(arm: Arm[None]) -> None:
        with trio.CancelScope() as scope:
            arm(scope)
            for _ in range(next(steps)):
                await trio.lowlevel.checkpoint()

    found = cancel_everywhere(moody, lambda *_: None)
    assert any("more than the seed" in failure.error for failure in found.failures)


def test_real_threads_can_be_swept_without_virtual_time():
    async def threaded(arm: Arm[None]) -> None:
        with trio.CancelScope() as scope:
            arm(scope)
            await trio.to_thread.run_sync(lambda: None, abandon_on_cancel=True)

    cancel_everywhere(threaded, lambda *_: None, virtual_time=False).require()
