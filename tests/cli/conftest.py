"""Fixtures of the command line's tests."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from trio_rollout._core.enums import Cause
from trio_rollout._core.ledger_events import (
    Acked,
    Delivered,
    Pulled,
    Quarantined,
    Ready,
    Requeued,
    RunIdentity,
    VersionChanged,
)
from trio_rollout._core.statistics import EngineStatistics, TokenCounts
from trio_rollout._core.values import (
    Failure,
    Group,
    GroupId,
    Prompt,
    QuarantineReport,
    Segment,
    Trajectory,
    VersionSpan,
)
from trio_rollout.ledger import open_ledger

NO_TOKENS = TokenCounts(in_flight=0, kept=0, delivered=0, filtered=0, wasted={})
StatisticsOf = Callable[..., EngineStatistics]


@pytest.fixture
def statistics_of() -> StatisticsOf:
    """Return a maker of statistics with the given counts, and zeros elsewhere."""

    def make(**counts: Any) -> EngineStatistics:
        zeros: dict[str, Any] = dict.fromkeys(
            (
                *("pulled", "waiting", "running", "ready", "delivered", "acked", "filtered", "quarantined", "returned"),
                *("late", "orphans", "running_rollouts", "max_running", "generated_tokens", "weight_version"),
            ),
            0,
        )
        return EngineStatistics(**{**zeros, "requeues": {}, "retries": {}, "tokens": NO_TOKENS, **counts})

    return make


def _group(name: str, rewards: Sequence[float | Mapping[str, float]], *, attempt: int = 1, version: int = 4) -> Group:
    prompt = Prompt(id=name, text=f"what is {name}?", label="two", metadata={"level": 3})
    segment = Segment(
        tokens=[5, 6, 7, 8, 9],
        response_length=3,
        loss_mask=[1, 1, 1],
        log_probs=[-0.5, -0.25, -1.0],
        versions=[VersionSpan(0, 2, version - 1), VersionSpan(2, 3, version)],
        text=f"it is \x1b[31m{name}",
    )
    return Group(
        id=prompt.group_id,
        attempt=attempt,
        prompt=prompt,
        trajectories=[
            Trajectory(prompt=prompt, index=index, segments=[segment], reward=reward)
            for index, reward in enumerate(rewards)
        ],
    )


def _failure(message: str) -> Failure:
    return Failure(
        cause=Cause.ERROR, type="RewardError", message=message, traceback="Traceback: the judge's own words\n"
    )


async def _fill(path: Path) -> None:
    """Write the groups a (acked), b (delivered), c (ready after a requeue), d (quarantined), e (waiting)."""
    a, b, c = _group("a", [1.0, 0.0]), _group("b", [{"style": 0.5}, {"style": 1.5}]), _group("c", [1.0, 1.0], attempt=2)
    given_up = QuarantineReport(id=GroupId(0, "d"), cause=Cause.ERROR, attempts=3, error=_failure("NaN"))
    waiting = [Prompt(id="d", input_ids=range(100)), Prompt(id="e", messages=[{"role": "user", "content": "hi"}])]
    async with open_ledger(path, keep_acked=True) as ledger:
        await ledger.begin(RunIdentity(source="five prompts", samples_per_prompt=2))
        await ledger.record([Pulled(prompts=(a.prompt, b.prompt, c.prompt, *waiting), source_state={})])
        await ledger.record([Ready(group=a), Ready(group=b)])
        await ledger.record([
            Delivered(step=0, ids=(a.id,)),
            Acked(step=0, ids=(a.id,)),
            Delivered(step=1, ids=(b.id,)),
        ])
        await ledger.record([
            Requeued(id=c.id, attempt=1, cause=Cause.SERVER_LOST, attempts=0, unpenalized=1),
            Ready(group=c),
        ])
        await ledger.record([Quarantined(report=given_up), VersionChanged(version=4)])


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Return a folder of results with a group in each kind of state."""
    path = tmp_path / "results"
    trio.run(_fill, path)
    return path
