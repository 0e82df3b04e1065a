"""Cancelled at any step, ``take`` has taken nothing and ``give_back`` has taken nothing back."""

from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import trio

from trio_rollout._core.values import Prompt
from trio_rollout.abc import Source
from trio_rollout.sources import IterableSource, JsonlSource, TaskSource
from trio_rollout.testing import Arm, Point, cancel_everywhere

from ._files import ids, questions, run_slowly, written

COUNT = 6


@pytest.fixture(params=["jsonl", "shuffled", "iterable", "tasks"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Source]:
    """Return a maker of sources with six prompts, whose blocking calls take several steps."""
    path = written(tmp_path / "a.jsonl", questions(COUNT))
    makers: dict[str, Callable[[], Source]] = {
        "jsonl": lambda: JsonlSource(path, run_sync=run_slowly),
        "shuffled": lambda: JsonlSource(path, id_key="uid", shuffle_seed=1, run_sync=run_slowly),
        "iterable": lambda: IterableSource([Prompt(id=str(n), text="x") for n in range(COUNT)]),
        "tasks": lambda: TaskSource("gcd", count=COUNT, seed=1, run_sync=run_slowly),
    }
    return makers[request.param]


@attrs.define(eq=False)
class World:
    """The prompts that the caller holds, and those that it can still get."""

    source: Source
    held: list[Prompt] = attrs.field(factory=list)
    rest: list[Prompt] = attrs.field(factory=list)


def test_cancelled_anywhere_nothing_is_lost_or_given_twice(opened: Callable[[], Source]):
    async def scenario(arm: Arm[World]) -> World:
        world = World(opened())
        with trio.CancelScope() as scope:
            arm(scope)
            world.held += await world.source.take(4)
            await world.source.give_back(world.held[1:3])
            del world.held[1:3]
            world.held += await world.source.take(3)
        arm.sometimes("cancelled before anything was held", not world.held)
        arm.sometimes("cancelled after the first take", 0 < len(world.held) < 5)
        while more := await world.source.take(4):
            world.rest += more
        return world

    def check(world: World, point: Point | None) -> None:
        everything = ids([*world.held, *world.rest])
        assert len(everything) == len(set(everything)) == COUNT

    sweep = cancel_everywhere(scenario, check)

    sweep.require("cancelled before anything was held", "cancelled after the first take")
