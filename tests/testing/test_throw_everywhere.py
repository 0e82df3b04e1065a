"""throw_everywhere raises at every await of a user's callback, and no point ends the sweep."""

import attrs
import pytest
import trio

from trio_rollout.testing import Faults, Point, throw_everywhere


@attrs.define
class Outcomes:
    """The results of the callbacks that a toy pool ran."""

    finished: int = 0
    failed: list[str] = attrs.field(factory=list)


async def score(number: int) -> int:
    """A user's callback with three awaits, one of them in a function it calls."""
    await trio.sleep(number)
    await helper()
    await trio.lowlevel.checkpoint()
    return number


async def helper() -> None:
    await trio.sleep(0.5)


async def pool(faults: Faults[Outcomes], *, catches: type[BaseException]) -> Outcomes:
    """Run four callbacks at once; failures that the pool expects are recorded."""
    outcomes = Outcomes()
    callback = faults(score)

    async def run(number: int) -> None:
        try:
            assert await callback(number) == number
        except catches as error:
            outcomes.failed.append(str(error))
        else:
            outcomes.finished += 1

    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(run, number)
    return outcomes


def check(outcomes: Outcomes, point: Point | None) -> None:
    """Check that every callback finished or is recorded as failed."""
    assert outcomes.finished + len(outcomes.failed) == 4
    assert len(outcomes.failed) == (point is not None)


def test_a_pool_that_catches_exceptions_loses_nothing():
    found = throw_everywhere(lambda faults: pool(faults, catches=Exception), check)
    found.require()
    assert found.points == 4 * 4  # each callback's start and its three awaits


def test_a_pool_that_catches_only_what_it_expects_loses_everything():
    found = throw_everywhere(lambda faults: pool(faults, catches=ValueError), check)
    assert len(found.failures) == found.points
    throw_everywhere(lambda faults: pool(faults, catches=ValueError), check, exc=ValueError).require()


def test_the_report_says_at_which_await():
    found = throw_everywhere(lambda faults: pool(faults, catches=ValueError), check)
    places = {failure.point.where.rpartition(":")[0] for failure in found.failures}
    assert places == {"", "score @ score", "score @ helper"}


def test_a_callback_is_also_hit_while_it_is_being_cancelled():
    seen: list[str] = []

    async def cleans_up() -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            seen.append("cancelled")
            raise
        except RuntimeError:
            seen.append("hit")
            raise

    async def scenario(faults: Faults[None]) -> None:
        try:
            with trio.move_on_after(1):
                await faults(cleans_up)()
        except RuntimeError:
            faults.sometimes("raised")

    throw_everywhere(scenario, lambda *_: None).require("raised")
    assert seen == ["cancelled", "hit"]


def test_a_wrapped_callback_behaves_as_before():
    """Value, exceptions, cancellation and name of the callback stay."""

    async def scenario(faults: Faults[None]) -> None:
        assert await faults(score)(2) == 2
        assert faults(score).__name__ == "score"
        with trio.move_on_after(0.1) as scope:
            await faults(score)(9)
        assert scope.cancelled_caught

    throw_everywhere(scenario, lambda *_: None, sample=0)


class Callback:
    """A callable object is a callback too."""

    async def __call__(self) -> str:
        await trio.sleep(1)
        return "called"


def test_callable_objects_and_a_sample():
    async def scenario(faults: Faults[None]) -> None:
        for _ in range(5):
            try:
                assert await faults(Callback())() == "called"
            except RuntimeError:
                faults.sometimes("failed")

    found = throw_everywhere(scenario, lambda *_: None, sample=3)
    assert found.require("failed", at_least=3).points == 3


def test_ctrl_c_in_a_callback_may_end_the_scenario():
    points: list[Point] = []

    async def scenario(faults: Faults[list[str]]) -> list[str]:
        log = faults.keep([])
        await faults(helper)()
        log.append("came through")
        return log

    def see(log: list[str], point: Point | None) -> None:
        if point is not None:
            assert not log
            assert isinstance(point.error, KeyboardInterrupt)
            points.append(point)

    throw_everywhere(scenario, see, exc=KeyboardInterrupt).require()
    assert len(points) == 2


def test_whatever_a_check_raises_is_that_points_failure():
    def picky(_: Outcomes, point: Point | None) -> None:
        if point is not None:
            pytest.fail("never content")

    found = throw_everywhere(lambda faults: pool(faults, catches=Exception), picky)
    assert len(found.failures) == found.points


def test_a_sweep_without_a_callback_has_proved_nothing():
    async def scenario(faults: Faults[None]) -> None:
        await trio.sleep(1)

    with pytest.raises(AssertionError, match="no point"):
        throw_everywhere(scenario, lambda *_: None).require()


class OutsideOfException(BaseException):
    """What an extension in Rust raises."""


@pytest.mark.parametrize("exc", [SystemExit, OutsideOfException, GeneratorExit])
def test_f101_any_class_can_be_thrown_and_one_that_escapes_is_its_points_failure(exc):
    """A SystemExit too: it must not end the sweep, or the test program."""
    throw_everywhere(lambda faults: pool(faults, catches=BaseException), check, exc=exc).require()
    found = throw_everywhere(lambda faults: pool(faults, catches=Exception), check, exc=exc)
    assert len(found.failures) == found.points == 4 * 4
