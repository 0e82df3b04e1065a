"""Invariants are checked before every step; a broken one ends the run with its error."""

import pytest
import trio

from trio_rollout.testing import InstrumentDropped, InvariantBroken, Invariants, sim_run


async def steps(count: int) -> None:
    for _ in range(count):
        await trio.lowlevel.checkpoint()


def test_a_check_is_made_before_every_step_while_it_holds():
    held = Invariants()

    async def main() -> int:
        with held.hold(lambda: True):
            await steps(20)
        checked = held.checked
        await steps(20)
        assert held.checked == checked
        return checked

    assert sim_run(main, seed=0, invariants=held).value >= 20


def test_what_a_check_raises_is_the_cause():
    held = Invariants()

    def broken() -> None:
        raise KeyError("gone")

    async def main() -> None:
        with held.hold(broken, "the shelf"):
            await steps(5)

    with pytest.raises(InvariantBroken, match="the shelf") as caught:
        sim_run(main, seed=0, invariants=held)
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_instrument_that_asserts_is_noticed(caplog: pytest.LogCaptureFixture):
    """Trio drops the instrument and goes on: without this error its checks would silently stop."""

    class Strict(trio.abc.Instrument):
        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            raise AssertionError(task.name)

    with pytest.raises(InstrumentDropped, match="Strict"):
        sim_run(steps, 5, seed=0, instruments=[Strict()])
    assert "AssertionError" in caplog.text
