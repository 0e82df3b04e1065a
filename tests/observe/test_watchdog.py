"""The step watchdog names the code that blocks the event loop, while it blocks and afterwards. In real time."""

import logging
import threading
import time
from collections.abc import Callable

import pytest
import trio

from trio_rollout.observe import SlowStep, StepWatchdog, open_step_watchdog

THRESHOLD = 0.05


def parse_a_huge_answer(seen: Callable[[], bool]) -> None:
    """The culprit: blocks without yielding, at least until it was seen. On a busy machine the sampler has to wait for a turn."""
    began = time.perf_counter()
    while (lasted := time.perf_counter() - began) < 4 * THRESHOLD or not seen():
        assert lasted < 60, "it was never seen"
        time.sleep(0.001)


def looks(caplog: pytest.LogCaptureFixture) -> int:
    """Return the number of the sampler's reports of the culprit."""
    told = [record.getMessage() for record in caplog.records]
    return sum("blocks the event loop" in line and "parse_a_huge_answer" in line for line in told)


async def scorer(seen: Callable[[], bool]) -> None:
    """A task that blocks once."""
    await trio.lowlevel.checkpoint()
    parse_a_huge_answer(seen)
    await trio.lowlevel.checkpoint()


async def run_scorer(seen: Callable[[], bool] = lambda: True) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scorer, seen, name="group 7/reward")


async def test_a_slow_step_is_named_and_shows_what_it_was_doing(caplog: pytest.LogCaptureFixture):
    reported: list[SlowStep] = []
    async with open_step_watchdog(threshold=THRESHOLD, on_slow=reported.append) as watchdog:
        await run_scorer(lambda: looks(caplog) > 0)
    # A busy machine can make any step a slow one; this one was slow by itself.
    slow = [step for step in reported if any("parse_a_huge_answer (" in entry for entry in step.stack)]
    assert len(slow) == 1
    assert slow[0].where.startswith("group 7/reward @ scorer:")
    assert slow[0].task == "group 7/reward"
    assert slow[0].seconds >= 4 * THRESHOLD
    assert slow[0].stack[0].startswith("scorer (")
    assert list(watchdog.slow) == reported
    assert watchdog.longest_s >= slow[0].seconds
    assert "blocked the event loop" in str(slow[0])


async def test_it_is_reported_while_it_still_blocks(caplog: pytest.LogCaptureFixture):
    """The sampler's line comes before the step's end; it comes again when the duration has doubled."""
    seen: list[int] = []

    async def block_and_look() -> None:
        await trio.lowlevel.checkpoint()
        parse_a_huge_answer(lambda: looks(caplog) >= 2)
        seen.append(looks(caplog))

    async with open_step_watchdog(threshold=THRESHOLD, on_slow=lambda _: None), trio.open_nursery() as nursery:
        nursery.start_soon(block_and_look)
    assert seen[0] >= 2


async def test_without_a_callback_it_is_logged(caplog: pytest.LogCaptureFixture):
    async with open_step_watchdog(threshold=THRESHOLD, sample=False):
        await run_scorer()
    assert any("group 7/reward @ scorer" in record.message for record in caplog.records)
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


async def test_quick_steps_are_not_reported():
    async with open_step_watchdog(threshold=30.0) as watchdog:
        for _ in range(100):
            await trio.lowlevel.checkpoint()
    assert watchdog.count == 0
    assert 0 < watchdog.longest_s < 30
    assert "0 steps above 30 s" in repr(watchdog)


async def test_leaving_ends_the_thread_and_the_instrument():
    async with open_step_watchdog(threshold=THRESHOLD) as watchdog:
        assert any("sampler" in thread.name for thread in threading.enumerate())
    assert not any("sampler" in thread.name for thread in threading.enumerate())
    with pytest.raises(KeyError):
        trio.lowlevel.remove_instrument(watchdog)


async def test_the_body_s_exception_comes_out_as_itself():
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught:
        async with open_step_watchdog():
            raise error
    assert caught.value is error


async def test_a_callback_that_raises_does_not_end_the_watching(caplog: pytest.LogCaptureFixture):
    def broken(_: SlowStep) -> None:
        raise RuntimeError("no pager")

    async with open_step_watchdog(threshold=THRESHOLD, on_slow=broken, sample=False) as watchdog:
        await run_scorer()
        await run_scorer()
    assert watchdog.count >= 2
    assert "no pager" in caplog.text


def test_a_threshold_must_be_positive():
    with pytest.raises(ValueError, match="above 0 seconds, got 0"):
        StepWatchdog(threshold=0)
