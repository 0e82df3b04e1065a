"""sim_run repeats a run exactly, and ends every run that would not end by itself."""

import cProfile
import time

import pytest
import trio

from trio_rollout.testing import (
    SimDeadlock,
    SimLivelock,
    SimStalled,
    SimStopped,
    SimTimeout,
    SystemTaskLeft,
    sim_run,
)

from .jumble import jumble


async def hang() -> None:
    await trio.Event().wait()


async def hang_shielded() -> None:
    with trio.CancelScope(shield=True):
        await hang()


async def hang_uncancellable() -> None:
    await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)


async def spin() -> None:
    while True:
        await trio.lowlevel.checkpoint()


async def spin_shielded() -> None:
    while True:
        await trio.lowlevel.cancel_shielded_checkpoint()


async def poll_shielded() -> None:
    with trio.CancelScope(shield=True):
        while True:
            await trio.sleep(3600)


async def test_is_for_plain_functions():
    """Inside a Trio run there is already a scheduler."""
    with pytest.raises(RuntimeError, match="from inside"):
        sim_run(jumble, seed=0)


def test_the_value_and_the_virtual_time_come_back():
    began = time.perf_counter()
    result = sim_run(trio.sleep, 86400, seed=0)
    assert (result.value, result.seconds) == (None, 86400)
    assert time.perf_counter() - began < 60
    assert sorted(sim_run(jumble, 3, seed=0).value) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_what_the_function_raises_comes_out_as_it_is_and_names_the_seed():
    error = ValueError("mine")

    async def fail() -> None:
        raise error

    with pytest.raises(ValueError, match="mine") as caught:
        sim_run(fail, seed=17)
    assert caught.value is error
    assert any("seed 17" in note for note in error.__notes__)


@pytest.mark.parametrize("main", [hang, hang_shielded, hang_uncancellable])
def test_a_deadlock_is_found_at_once_and_shows_who_waits_for_what(main, recwarn, capsys):
    """A deadlock is found even if the waiting task cannot be cancelled, and without noise on stderr."""
    with pytest.raises(SimDeadlock) as caught:
        sim_run(main, seed=3)
    assert main.__name__ in str(caught.value)
    assert not recwarn.list
    assert capsys.readouterr() == ("", "")


def test_a_deadlocked_run_cleans_up_after_itself():
    done = []

    async def careful() -> None:
        try:
            await hang()
        finally:
            with trio.move_on_after(5, shield=True):
                await trio.sleep(1)
                done.append("cleaned up")

    with pytest.raises(SimDeadlock):
        sim_run(careful, seed=0)
    assert done == ["cleaned up"]


def test_what_goes_wrong_while_a_stopped_run_unwinds_is_kept_as_the_cause():
    async def clumsy() -> None:
        try:
            await hang()
        finally:
            raise OSError("while unwinding")

    with pytest.raises(SimDeadlock) as caught:
        sim_run(clumsy, seed=0)
    assert isinstance(caught.value.__cause__, OSError)


def test_waiting_for_all_tasks_blocked_is_no_deadlock():
    sim_run(trio.testing.wait_all_tasks_blocked, 0.01, seed=0)


@pytest.mark.parametrize("main", [spin, spin_shielded])
def test_a_livelock_is_found_by_its_steps(main):
    with pytest.raises(SimLivelock, match="more than 500 task steps"):
        sim_run(main, seed=0, max_steps=500)


def test_even_a_task_that_swallows_everything_is_ended():
    async def stubborn() -> None:
        while True:
            try:
                await trio.lowlevel.checkpoint()
            except GeneratorExit:
                raise  # or Python itself complains
            except BaseException:  # ruff: ignore[blind-except]  the bug to be found
                continue

    with pytest.raises(SimLivelock):
        sim_run(stubborn, seed=0, max_steps=100)


async def sleep_too_long() -> None:
    await trio.sleep(101)


@pytest.mark.parametrize("main", [poll_shielded, sleep_too_long])
def test_the_limit_is_on_simulated_time(main):
    with pytest.raises(SimTimeout, match="limit of 100"):
        sim_run(main, seed=0, limit=100)


def test_a_step_that_never_ends_is_found_by_wall_clock_time():
    async def loop() -> None:
        while True:
            try:
                while True:
                    pass
            except Exception:  # ruff: ignore[blind-except]  the bug to be found
                continue

    with pytest.raises(SimStalled, match=r"in loop"):
        sim_run(loop, seed=0, stuck_after=0.2)


def test_a_run_can_be_profiled():
    """The stall watch once left the thread looking for an interrupt that never came; cProfile then hung."""
    profile = cProfile.Profile()
    assert profile.runcall(sim_run, jumble, 3, seed=0).steps > 9


def test_a_system_task_without_an_owner_is_an_error():
    async def spawn() -> None:
        trio.lowlevel.spawn_system_task(trio.sleep_forever)

    with pytest.raises(SystemTaskLeft, match="sleep_forever"):
        sim_run(spawn, seed=0)


def test_a_real_thread_under_virtual_time_is_named_in_the_message():
    """Virtual time does not wait for a real thread."""

    async def use_thread() -> None:
        await trio.to_thread.run_sync(time.sleep, 0.01, abandon_on_cancel=True)

    with pytest.raises(SimStopped, match="real thread"):
        sim_run(use_thread, seed=0)
    assert sim_run(use_thread, seed=0, virtual_time=False).seconds >= 0.01


@pytest.mark.parametrize("main", [hang, hang_shielded])
def test_without_virtual_time_the_limit_still_ends_the_run(main):
    with pytest.raises(SimTimeout, match=r"not over after 0\.1 s"):
        sim_run(main, seed=0, virtual_time=False, limit=0.1)
