"""The stock instruments, on a whole engine and on single events."""

import logging

import pytest
import trio

from trio_rollout import (
    Cause,
    EngineSettings,
    Failure,
    Group,
    GroupId,
    IterableSource,
    PauseMode,
    Prompt,
    QuarantineReport,
    Retry,
    SamplingParams,
    SingleTurn,
    open_rollout_engine,
)
from trio_rollout.abc import (
    GroupQuarantined,
    GroupReady,
    GroupRequeued,
    GroupStarted,
    WindowClosed,
    WindowOpened,
)
from trio_rollout.errors import ServerLost
from trio_rollout.observe import CountingInstrument, LogInstrument, MetricsInstrument
from trio_rollout.testing import Fail, FakeServers, Say, prompts

GROUP = GroupId(0, "p1")


async def reward(_: object) -> float:
    await trio.lowlevel.checkpoint()
    return 1.0


async def run_engine(*instruments) -> None:
    """Six groups of two samples, the third call loses its server, one weight update."""
    servers = FakeServers(
        plan=lambda number, _: Fail(ServerLost("gone"), 1.0) if number == 2 else Say(tokens=4, seconds=2)
    )
    async with open_rollout_engine(
        IterableSource(prompts(6)),
        SingleTurn(SamplingParams(max_new_tokens=8)),
        servers=servers,
        reward=reward,
        settings=EngineSettings(samples_per_prompt=2, max_running=4, retry=Retry(backoff_base=0.01)),
        instruments=instruments,
    ) as engine:
        await engine.next_batch(3)
        async with engine.weight_update(version=1, mode=PauseMode.RETRACT):
            await trio.sleep(3)
            servers.set_version(1)
        await engine.next_batch(3)


async def test_counting(autojump_clock):
    counting = CountingInstrument()
    await run_engine(counting)
    assert counting.events[GroupReady] == 6
    assert counting.events[WindowOpened] == counting.events[WindowClosed] == 1
    assert counting.retries == {Cause.SERVER_LOST: 1}
    assert not counting.requeues
    assert counting.events[GroupStarted] == 6
    assert "'GroupReady': 6" in repr(counting)


async def test_metrics(autojump_clock):
    metrics = MetricsInstrument(window_s=5.0)
    assert metrics.snapshot().tokens_per_s == 0.0
    assert metrics.snapshot().group_s_median is None
    await run_engine(metrics)
    now = metrics.snapshot()
    assert (now.groups_ready, now.tokens, now.retries) == (6, 48, {Cause.SERVER_LOST: 1})
    assert now.group_s_median == pytest.approx(2.5, abs=0.75)
    assert now.group_s_p95 >= now.group_s_median
    assert now.tokens_per_s > 0
    assert now.groups_per_s > 0
    assert now.weight_updates == 1
    assert now.weight_update_s == pytest.approx(3.0, abs=0.5)
    assert now.flat()["retries/server_lost"] == 1
    assert all(isinstance(value, int | float) for value in now.flat().values())
    await trio.sleep(60)
    assert metrics.snapshot().tokens_per_s == 0.0


async def test_metrics_without_a_reader_keep_no_more_than_their_window(autojump_clock):
    metrics = MetricsInstrument(window_s=5.0)
    group = Group(id=GROUP, attempt=1, prompt=Prompt(id="p1", text="x"), trajectories=())
    for _ in range(100):
        metrics.event(GroupReady(id=GROUP, attempt=1, group=group))
        await trio.sleep(1)
    assert len(metrics._recent) == 5
    assert metrics.snapshot().groups_ready == 100


async def test_logging(caplog: pytest.LogCaptureFixture, autojump_clock):
    caplog.set_level(logging.INFO, logger="trio_rollout.events")
    await run_engine(LogInstrument())
    lines = [record.message for record in caplog.records if record.name == "trio_rollout.events"]
    assert any(line.startswith("GroupReady id=0/p") and "<2 trajectories>" in line for line in lines)
    levels = {record.message.partition(" ")[0]: record.levelno for record in caplog.records}
    assert levels["SampleRetried"] == logging.WARNING
    assert levels["GroupReady"] == logging.INFO
    assert max(map(len, lines)) < 500


def test_a_logger_that_does_not_listen_costs_nothing(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.ERROR, logger="trio_rollout.events")
    LogInstrument().event(GroupRequeued(id=GROUP, attempt=1, cause=Cause.DEADLINE, error=None))
    assert not caplog.records


def test_a_quarantine_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture):
    failure = Failure(cause=Cause.ERROR, type="ValueError", message="no such judge")
    report = QuarantineReport(id=GROUP, cause=Cause.ERROR, attempts=3, error=failure)
    LogInstrument().event(GroupQuarantined(id=GROUP, report=report))
    assert "0/p1 (error: ValueError: no such judge)" in caplog.text
