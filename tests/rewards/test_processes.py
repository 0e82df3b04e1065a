"""Scorers in processes: their results, their failures, and that no process is left."""

import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import trio
import trio.testing

from trio_rollout._core.enums import Cause
from trio_rollout._core.failures import cause_of, failure_of
from trio_rollout._core.settings import Retry
from trio_rollout._core.values import Trajectory
from trio_rollout.errors import RewardError, SettingsError
from trio_rollout.rewards import open_scorer_processes

from .conftest import Opened, appeared, runs, until_gone


async def test_it_returns_what_the_function_returns_from_another_process(
    opened: Opened, scorers: ModuleType, respond: Callable[..., Trajectory]
):
    async with opened(scorers.length) as reward:
        scores = await reward(respond("abc"))
    assert scores["length"] == 3.0
    assert int(scores["pid"]) != os.getpid()


async def test_an_object_that_is_called_works_too(opened: Opened, scorers: ModuleType):
    async with opened(scorers.Scale(3)) as reward:
        assert await reward(2.0) == 6.0


async def test_what_the_function_raises_is_a_reward_error_with_its_traceback(opened: Opened, scorers: ModuleType):
    async with opened(scorers.complain) as reward:
        with pytest.raises(RewardError, match="the scorer raised: ValueError: 5 is no good") as caught:
            await reward(5)
    assert 'raise ValueError(f"{value} is no good")' in "".join(caught.value.__notes__)


async def test_a_scorer_that_exits_has_raised(opened: Opened, scorers: ModuleType):
    async with opened(scorers.give_up) as reward:
        with pytest.raises(RewardError, match="the scorer raised: SystemExit: 3"):
            await reward(5)


@pytest.mark.parametrize(("scorer", "status"), [("die", -signal.SIGSEGV), ("leave", 3)])
async def test_a_process_that_dies_is_a_reward_error_and_the_next_call_works(
    opened: Opened, scorers: ModuleType, scorer: str, status: int
):
    async with opened(getattr(scorers, scorer)) as reward:
        for _ in range(2):
            with pytest.raises(RewardError, match=rf"process \d+ died while it was asked, exit status {status}$"):
                await reward(5)


async def test_a_scorer_may_print_and_read(opened: Opened, scorers: ModuleType):
    """A scorer's output goes to standard error, its input is empty: it can't reach the pipes to the parent."""
    async with opened(scorers.talk) as reward:
        assert await reward(0) == 1.0


async def test_what_can_not_be_sent_back_is_a_reward_error(opened: Opened, scorers: ModuleType):
    async with opened(scorers.unpicklable) as reward:
        with pytest.raises(RewardError, match=r"the scorer raised: TypeError: .* numbers, texts, .* not function"):
            await reward(0)


async def test_large_values_pass(opened: Opened, scorers: ModuleType):
    async with opened(scorers.Scale(2)) as reward:
        assert len(await reward("x" * 1_000_000)) == 2_000_000


async def test_a_scorer_that_never_returns_is_killed_and_the_others_do_not_notice(opened: Opened, scorers: ModuleType):
    """F079: the hung call ends at its deadline, the other scores arrive, and no process is left."""
    scores: list[float] = []

    async def score(reward: Callable[[Any], Awaitable[float]], number: int) -> None:
        scores.append(await reward(number))

    async with opened(scorers.spin_if_negative, workers=2) as reward:
        async with trio.open_nursery() as nursery:
            for number in range(1, 4):
                nursery.start_soon(score, reward, number)
            with trio.move_on_after(0.5) as limit:
                await reward(-1)
        assert limit.cancelled_caught
        assert sorted(scores) == [1.0, 2.0, 3.0]
        assert await reward(9) == 9.0


async def test_a_scorer_that_holds_the_gil_for_ever_is_killed(opened: Opened, scorers: ModuleType, tmp_path: Path):
    async with opened(scorers.never_releases_the_gil) as reward, trio.open_nursery() as nursery:
        nursery.start_soon(reward, str(tmp_path / "pid"))
        pid = int(await appeared(tmp_path / "pid.done"))
        nursery.cancel_scope.cancel()
    assert not runs(pid)


async def test_what_a_scorer_has_started_dies_with_it(opened: Opened, scorers: ModuleType, tmp_path: Path):
    async with opened(scorers.start_a_sleeper_and_spin) as reward, trio.open_nursery() as nursery:
        nursery.start_soon(reward, str(tmp_path / "pid"))
        pid = int(await appeared(tmp_path / "pid.done"))
        nursery.cancel_scope.cancel()
    await until_gone(pid)


async def test_what_a_scorer_leaves_behind_dies_at_the_latest_when_the_processes_are_left(
    opened: Opened, scorers: ModuleType
):
    async with opened(scorers.start_a_sleeper) as reward:
        pid = await reward(0)
    await until_gone(pid)


class AsPrivate:
    """A scorer that can't be pickled."""

    def __reduce__(self) -> str:
        raise TypeError("a handle")

    def __call__(self, value: object) -> float:
        return 0.0


async def test_a_function_that_another_process_can_not_find_is_refused(opened: Opened):
    for unfindable in (lambda value: value, AsPrivate()):
        with pytest.raises(RewardError, match="can't be sent to a process, because it must be importable by name"):
            async with opened(unfindable):
                pass


async def test_a_module_that_can_not_be_loaded_there_is_a_reward_error(
    opened: Opened, scorers: ModuleType, tmp_path: Path
):
    (tmp_path / "scorers_of_a_user.py").write_text("import no_such_module\n", encoding="utf-8")
    with pytest.raises(RewardError, match="can't be loaded in another process: ModuleNotFoundError"):
        async with opened(scorers.half) as reward:
            await reward(1)


async def test_a_python_that_can_not_be_started_is_a_reward_error(
    opened: Opened, scorers: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "executable", "no-such-python")
    with pytest.raises(RewardError, match=r"a scorer process can't be started: .*No such file"):
        async with opened(scorers.half) as reward:
            await reward(1)


async def test_the_number_of_workers_is_checked(opened: Opened, scorers: ModuleType):
    with pytest.raises(SettingsError, match=r"workers: got 0, allowed: an integer >= 1"):
        async with opened(scorers.half, workers=0):
            pass


async def test_kept_processes_are_reused_and_replaced_when_they_have_died(scorers: ModuleType, respond):
    async with open_scorer_processes(scorers.length, workers=1) as reward:
        (pid,) = reward.pids
        assert {(await reward(respond("x")))["pid"] for _ in range(3)} == {pid}

        os.kill(pid, signal.SIGKILL)
        with trio.fail_after(60):
            while reward.pids:  # a process is gone when its last thread is
                await trio.sleep(0.005)

        assert (await reward(respond("x")))["pid"] != pid
        assert repr(reward) == "<scorer_processes(length): 0 of 1 running, 1 alive>"
    assert reward.pids == ()


async def test_of_one_that_was_killed_while_idle_nothing_is_kept(
    scorers: ModuleType, respond: Callable[..., Trajectory]
):
    """Else each process that the system kills for want of memory would leave three descriptors and a zombie."""

    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def is_there(pid: int) -> bool:
        return Path(f"/proc/{pid}").exists()

    async with open_scorer_processes(scorers.length, workers=1) as reward:
        before = descriptors()
        for _ in range(2):
            (pid,) = reward.pids
            os.kill(pid, signal.SIGKILL)
            with trio.fail_after(60):
                while reward.pids:
                    await trio.sleep(0.005)
            await reward(respond("x"))
            assert not is_there(pid), "a zombie counts too"
            assert descriptors() == before


async def test_leaving_ends_a_call_that_is_still_running(scorers: ModuleType):
    async with trio.open_nursery() as nursery:

        async def score() -> None:
            with pytest.raises(RewardError, match="died while it was asked, exit status -9"):
                await reward(-1)

        async with open_scorer_processes(scorers.spin_if_negative) as reward:
            nursery.start_soon(score)
            await trio.testing.wait_all_tasks_blocked(0.05)
    with pytest.raises(RewardError, match="the scorer processes are closed"):
        await reward(1)


async def test_leaving_while_another_process_starts_leaves_none(scorers: ModuleType):
    async with trio.open_nursery() as nursery:

        async def score() -> None:
            with pytest.raises(RewardError, match="the scorer processes are closed"):
                await reward(1)

        async with open_scorer_processes(scorers.half) as reward:
            reward._idle.clear()  # as if the first process were busy
            nursery.start_soon(score)
            await trio.testing.wait_all_tasks_blocked()


async def test_the_body_error_comes_out_as_itself(scorers: ModuleType):
    mine = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught, trio.CancelScope() as scope:
        async with open_scorer_processes(scorers.half):
            scope.cancel()
            raise mine
    assert caught.value is mine


MAIN = """
import sys
import trio
from trio_rollout.rewards import in_process

class Answer:
    def __init__(self, text):
        self.text = text

def length(answer):
    return float(len(answer.text))

async def main():
    print(await in_process(length)(Answer("four")))

if __name__ == "__main__":
    trio.run(main)
"""


@pytest.mark.parametrize(
    ("program", "out", "err"),
    [
        (MAIN, "4.0\n", ""),
        ("import multiprocessing\n" + MAIN, "4.0\n", ""),
        (MAIN.replace('if __name__ == "__main__":', "if True:"), "", "guard what your script runs by"),
        (
            "import multiprocessing\n" + MAIN.replace("if __name__", "if True or __name__"),
            "",
            "lookup length on __mp_main__",
        ),
    ],
    ids=["guarded", "guarded, with multiprocessing", "not guarded", "not guarded, with multiprocessing"],
)
def test_a_scorer_may_be_defined_in_the_main_script_if_that_is_guarded(
    tmp_path: Path, program: str, out: str, err: str
):
    """Without the guard the script would run again in the process, and again in its process; an error says so."""
    (tmp_path / "main.py").write_text(program, encoding="utf-8")
    answer = subprocess.run([sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert answer.stdout == out
    assert err in answer.stderr


ORPHAN = """
import sys
import trio
import scorers_of_a_user
from trio_rollout.rewards import in_process

trio.run(in_process(scorers_of_a_user.never_releases_the_gil), sys.argv[1])
"""


async def test_a_scorer_dies_with_its_parent(scorers: ModuleType, tmp_path: Path):
    """The process dies although it never returns to Python and its parent had no time to kill it."""
    (tmp_path / "main.py").write_text(ORPHAN, encoding="utf-8")
    parent = await trio.lowlevel.open_process([sys.executable, "main.py", str(tmp_path / "pid")], cwd=tmp_path)
    pid = int(await appeared(tmp_path / "pid.done"))

    parent.kill()
    await parent.wait()

    await until_gone(pid)


@pytest.mark.parametrize(
    "name", ["SystemExit", "KeyboardInterrupt", "GeneratorExit", "asyncio.CancelledError", "BaseException", "Outside"]
)
async def test_f101_an_exception_of_any_class_is_the_calls_failure_and_the_process_goes_on(
    scorers: ModuleType, name: str
):
    async with open_scorer_processes(scorers.raise_class, workers=1) as reward:
        (pid,) = reward.pids
        with pytest.raises(RewardError, match=rf"the scorer raised: {name.rpartition('.')[2]}: away") as caught:
            await reward(name)
        assert failure_of(caught.value).type == name.rpartition(".")[2]
        assert await reward("") == 1.0
        assert reward.pids == (pid,)


@pytest.mark.parametrize(
    ("kind", "cause"), [("alone", Cause.INFRASTRUCTURE), ("group", Cause.INFRASTRUCTURE), ("mixed", Cause.ERROR)]
)
async def test_f102_infrastructure_that_a_process_has_lost_is_that_outside_too(
    opened: Opened, scorers: ModuleType, kind: str, cause: Cause
):
    """By the classes that it names: those of the exception, or those that all exceptions of its group share."""
    async with opened(scorers.lose_the_judge) as reward:
        with pytest.raises(RewardError) as caught:
            await reward(kind)
    assert cause_of(caught.value, Retry().infrastructure) is cause
    assert failure_of(caught.value).type == ("NoJudge" if kind == "alone" else "ExceptionGroup")


async def test_f101_a_process_lives_on_if_the_exceptions_text_fails_too(scorers: ModuleType):
    async with open_scorer_processes(scorers.raise_unspeakable, workers=1) as reward:
        pids = reward.pids
        with pytest.raises(RewardError, match=r"Unspeakable: .its __str__ raised SystemExit"):
            await reward(0)
        assert reward.pids == pids


async def test_f101_a_result_that_would_exit_where_it_is_unpickled_is_the_calls_failure(scorers: ModuleType):
    async with open_scorer_processes(scorers.result_that_exits, workers=1) as reward:
        pids = reward.pids
        with pytest.raises(RewardError, match=r"the scorer raised: TypeError: .* not ExitsWhenRead"):
            await reward(0)
        assert reward.pids == pids


async def test_f107_a_scorer_in_a_process_may_use_sigalrm(opened: Opened, scorers: ModuleType):
    async with opened(scorers.with_alarm) as reward:
        assert await reward(0) == 1.0
