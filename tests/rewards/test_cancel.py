"""Scorer processes that are cancelled at any step of their start, request and end: none is left (P2)."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import trio

from trio_rollout.rewards import in_process, open_scorer_processes
from trio_rollout.testing import Arm, Point, cancel_everywhere


def children() -> set[str]:
    """Return the ids of all direct children, zombies included."""
    found: set[str] = set()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that ended while we looked
            found.update((thread / "children").read_text().split())
    return found


@pytest.fixture
def no_child() -> Callable[[object, Point | None], None]:
    """A check that no process is left, except those that the session's fixtures had started."""
    before = children()

    def check(_: object, point: Point | None) -> None:
        assert children() <= before

    return check


def test_in_process_cancelled_anywhere_leaves_no_process(scorers: ModuleType, no_child: Callable[..., None]):
    async def scenario(arm: Arm[None]) -> None:
        reward = in_process(scorers.half)
        with trio.CancelScope() as scope:
            arm(scope)
            await reward(1)
        arm.sometimes("cancelled", scope.cancelled_caught)
        assert "0 of 2 running" in repr(reward)

    cancel_everywhere(scenario, no_child, virtual_time=False).require("cancelled")


def test_kept_processes_cancelled_anywhere_leave_none_and_the_next_call_works(
    scorers: ModuleType, no_child: Callable[..., None]
):
    async def scenario(arm: Arm[None]) -> None:
        with trio.CancelScope() as outer:
            arm(outer, "outer")
            async with open_scorer_processes(scorers.half, workers=1) as reward:
                with trio.CancelScope() as call:
                    arm(call, "call")
                    await reward(1)
                arm.sometimes("one call was cancelled", call.cancelled_caught)
                assert await reward(2) == 1.0
        arm.sometimes("all was cancelled", outer.cancelled_caught)

    sweep = cancel_everywhere(scenario, no_child, virtual_time=False)

    sweep.require("one call was cancelled", "all was cancelled")
