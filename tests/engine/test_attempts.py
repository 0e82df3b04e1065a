"""Attempts: one outcome each, a cause that is right, and a clean start for the next."""

from contextlib import contextmanager

import attrs
import pytest
import trio

from trio_rollout import (
    Cause,
    PauseMode,
    Retry,
    SamplingParams,
    Segment,
    SingleTurn,
    Status,
    Stop,
    Trajectory,
    VersionSpan,
)
from trio_rollout._core.failures import failure_of
from trio_rollout._core.samples import Samples
from trio_rollout.abc import Keep
from trio_rollout.engine._attempt import Finished, Unfinished, new_attempt
from trio_rollout.errors import RequestRejected, ServerLost
from trio_rollout.sources import IterableSource
from trio_rollout.testing import HANG, Fail, FakeServers, Say, prompts

from .conftest import take_all, world


def attempt(seconds=10.0):
    return new_attempt(prompts(1)[0], 1, Samples.of(2), seconds=seconds)


async def test_the_first_outcome_wins_a_cancellation_after_the_claim_changes_nothing():
    it = attempt()
    done = Finished(group=None)
    assert it.claim(done) is done
    assert not it.cancel(Cause.SHUTDOWN, "late")
    assert it.cause is None


async def test_the_first_outcome_wins_a_result_after_the_cancellation_is_thrown_away():
    it = attempt()
    assert it.cancel(Cause.WEIGHT_UPDATE, "window")
    outcome = it.claim(Finished(group=None))
    assert isinstance(outcome, Unfinished)
    assert outcome.cause is Cause.WEIGHT_UPDATE


async def test_the_deadline_is_not_taken_for_a_shutdown_that_comes_later():
    """F040: both are near; the one that was due first is the cause."""
    it = attempt(seconds=5)
    await trio.sleep(5)
    assert not it.cancel(Cause.SHUTDOWN, "drain")
    assert it.unfinished().cause is Cause.DEADLINE


async def test_a_shutdown_before_the_deadline_is_not_taken_for_the_deadline():
    it = attempt(seconds=5)
    await trio.sleep(4.9)
    assert it.cancel(Cause.SHUTDOWN, "drain")
    await trio.sleep(1)
    assert it.unfinished().cause is Cause.SHUTDOWN


def trajectory(index):
    segment = Segment(tokens=[1, 2], response_length=1, loss_mask=[1], log_probs=[0.0], versions=[VersionSpan(0, 1, 0)])
    return Trajectory(prompt=prompts(1)[0], index=index, segments=[segment])


@contextmanager
def trying(it, index, seconds):
    """A try at this sample for the block."""
    this = it.begin_try(index, seconds)
    try:
        yield this
    finally:
        it.end_try(this)


async def test_the_first_outcome_of_a_try_wins_both_ways():
    it = attempt()
    with trying(it, 0, None) as this:
        assert this.claim(trajectory(0))
        assert not this.cancel(Cause.WEIGHT_UPDATE, "late")
        assert this.is_kept
    with trying(it, 1, None) as this:
        assert this.cancel(Cause.WEIGHT_UPDATE, "window")
        assert not this.claim(trajectory(1))
        assert this.failed().cause is Cause.WEIGHT_UPDATE
    assert [row.index for row in it.samples.kept()] == [0]


async def test_a_result_after_the_end_of_the_attempt_is_thrown_away():
    it = attempt()
    with trying(it, 0, None) as this:
        it.cancel(Cause.SHUTDOWN, "drain")
        assert not this.claim(trajectory(0))
    assert it.samples.kept() == ()


async def test_the_deadline_of_a_try_is_not_taken_for_a_window_that_comes_later():
    it = attempt()
    with trying(it, 0, 3.0) as this:
        await trio.sleep(3)
        assert not this.cancel(Cause.WEIGHT_UPDATE, "window")
        assert this.failed().cause is Cause.DEADLINE


async def test_a_try_that_failed_makes_its_group_no_older():
    """What it sampled is gone: the group is as old as the tries under way and what is finished."""
    it = attempt()
    with trying(it, 0, None) as this:
        this.begin(3)
        this.fail(ValueError("no"), Retry())
        it.settle_try(this, this.failed(), Retry())
    assert it.begun is None
    with trying(it, 0, None) as this, trying(it, 1, None) as sibling:
        sibling.begin(5)
        this.begin(4)
        this.fail(ValueError("no"), Retry())
        it.settle_try(this, this.failed(), Retry())
        assert it.begun == 5


async def test_a_retry_starts_from_the_untouched_prompt():
    """User code's changes of its prompt and metadata show in no later attempt and in no delivered group."""
    seen = []

    async def generate(prompt, rollout):
        seen.append((rollout.attempt, dict(prompt.metadata), list(rollout.input)))
        prompt.metadata["touched"] = rollout.attempt
        if rollout.attempt == 1:
            raise ValueError("first attempt fails")
        return rollout.finish([await rollout.generate(rollout.input)])

    async with world(1, generate=generate) as w:
        (group,) = await take_all(w.engine)

    assert all(metadata == {} for _, metadata, _ in seen)
    assert all(ids == [1, 2, 3] for _, _, ids in seen)
    assert group.prompt.metadata == {}
    assert max(attempt for attempt, *_ in seen) == 2


async def test_a_rejected_prompt_is_quarantined_at_once_with_the_servers_words():
    """F026: 4xx is terminal; nothing is sent twice."""
    plan = lambda n, prompt: (
        Fail(RequestRejected("input is too long: 5000 > 4096", status=400)) if prompt[2] == 3 else Say()
    )
    async with world(3, plan=plan) as w:
        groups = await take_all(w.engine)
        (report,) = w.engine.quarantined()
    assert len(groups) == 2
    assert report.attempts == 1
    assert "5000 > 4096" in report.error.message


async def test_a_lost_server_uses_up_no_attempt():
    async with world(2, plan=lambda n, _: Fail(ServerLost("reset")) if n < 12 else Say(), failure_budget=1) as w:
        assert len(await take_all(w.engine)) == 2
        assert w.engine.statistics().retries[Cause.SERVER_LOST] == 12


async def test_unpenalized_requeues_without_a_new_token_end_after_max_free():
    retry = Retry(max_free=5, backoff_base=0.01, backoff_max=0.01)
    async with world(1, plan=lambda *_: Fail(ServerLost("reset")), retry=retry) as w:
        assert await take_all(w.engine) == []
        (report,) = w.engine.quarantined()
    assert report.cause is Cause.SERVER_LOST
    assert report.attempts == 6


async def test_an_unasked_abort_is_a_retry_that_uses_up_no_attempt():
    async with world(2, plan=lambda *_: Say(seconds=10)) as w:
        await trio.sleep(5)
        w.servers.abort_all()
        assert len(await take_all(w.engine)) == 2
        assert w.engine.statistics().retries[Cause.SERVER_ABORT] == 4


async def test_with_partial_a_turn_goes_on_from_its_tokens_after_an_unasked_abort():
    async with world(1, plan=lambda n, _: Say(tokens=8 if n < 2 else 4, seconds=8), partial=True) as w:
        await trio.sleep(4)
        w.servers.abort_all()
        (group,) = await take_all(w.engine)
    assert [row.segments[0].response_length for row in group.trajectories] == [8, 8]
    assert group.attempt == 1


async def test_an_exception_group_out_of_user_code_is_a_failure_not_a_crash():
    async def generate(prompt, rollout):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            if rollout.attempt == 1:
                raise ValueError("inside a nursery")
            nursery.cancel_scope.cancel()
        return rollout.finish([await rollout.generate(rollout.input)])

    async with world(2, generate=generate) as w:
        assert len(await take_all(w.engine)) == 2
        assert w.engine.statistics().retries[Cause.ERROR] == 4


async def test_user_code_that_raises_while_being_cancelled_does_not_change_the_cause():
    async def generate(prompt, rollout):
        try:
            return rollout.finish([await rollout.generate(rollout.input)])
        finally:
            if rollout.attempt == 1:
                raise RuntimeError("cleanup failed")

    async with world(1, generate=generate, plan=lambda n, _: HANG if n < 2 else Say(), deadlines={"group": 5.0}) as w:
        assert len(await take_all(w.engine)) == 1
        assert w.engine.statistics().requeues[Cause.DEADLINE] == 1


async def test_a_generate_function_that_swallows_everything_cannot_hold_its_slot():
    """An interrupted turn cancels the attempt: there is nothing that `except Exception` could keep."""

    async def stubborn(prompt, rollout):
        while True:
            try:
                return rollout.finish([await rollout.generate(rollout.input)])
            except Exception:  # noqa: BLE001  this is what stubborn users write
                await trio.lowlevel.checkpoint()

    async with world(2, generate=stubborn, plan=lambda n, _: HANG if n < 4 else Say(), deadlines={"turn": 3.0}) as w:
        assert len(await take_all(w.engine)) == 2


@pytest.mark.parametrize("bad", [None, "text", 7])
async def test_a_generate_function_that_returns_no_trajectory_is_named(bad):
    async def generate(prompt, rollout):
        return bad

    async with world(1, generate=generate) as w:
        await take_all(w.engine)
        (report,) = w.engine.quarantined()
    assert report.error.type == "GenerateError"
    assert type(bad).__name__ in report.error.message


async def test_an_aborted_trajectory_of_user_code_is_never_delivered():
    """F003, F069."""

    async def generate(prompt, rollout):
        turn = await rollout.generate(rollout.input)
        return rollout.finish([turn], status=Status.ABORTED if rollout.attempt == 1 else None)

    async with world(1, generate=generate) as w:
        (group,) = await take_all(w.engine)
        assert w.engine.statistics().retries[Cause.ERROR] == 2
    assert {row.status for row in group.trajectories} == {Status.COMPLETED}


async def test_several_turns_become_one_segment_with_tool_output_masked():
    async def generate(prompt, rollout):
        first = await rollout.generate(rollout.input)
        context = [*first.prompt_ids, *first.output_ids, 7, 8, 9]
        second = await rollout.generate(context)
        return rollout.finish([first, second])

    async with world(1, generate=generate, plan=lambda *_: Say(tokens=3, stop=Stop.LENGTH)) as w:
        (group,) = await take_all(w.engine)
    (segment,) = group.trajectories[0].segments
    assert segment.loss_mask.tolist() == [1, 1, 1, 0, 0, 0, 1, 1, 1]
    assert segment.tokens.tolist() == [1, 2, 3, 100, 101, 102, 7, 8, 9, 100, 101, 102]
    assert segment.versions == ((0, 3, 0), (6, 9, 0))
    assert group.trajectories[0].status is Status.TRUNCATED
    assert group.trajectories[0].turns == 2


async def test_a_rewritten_context_begins_another_segment():
    async def generate(prompt, rollout):
        turns = [await rollout.generate(rollout.input), await rollout.generate([9, 9])]
        return rollout.finish(turns)

    async with world(1, generate=generate) as w:
        (group,) = await take_all(w.engine)
    assert [len(segment.tokens) for segment in group.trajectories[0].segments] == [7, 6]


async def test_a_rollouts_own_deadline_ends_the_attempt():
    async with world(1, plan=lambda n, _: HANG if n < 2 else Say(), deadlines={"rollout": 4.0}) as w:
        began = trio.current_time()
        assert len(await take_all(w.engine)) == 1
        assert trio.current_time() - began < 8


async def test_sampling_of_the_call_wins_over_the_prompts_and_that_over_the_functions():
    lengths = []

    class Noting(FakeServers):
        async def generate(self, input_ids, sampling, **more):
            lengths.append(sampling.max_new_tokens)
            return await super().generate(input_ids, sampling, **more)

    plain, own = prompts(2)
    source = IterableSource([plain, attrs.evolve(own, sampling=SamplingParams(max_new_tokens=5))])
    single = SingleTurn(SamplingParams(max_new_tokens=6))
    async with world(source=source, servers=Noting(), generate=single, samples_per_prompt=1, max_running=1) as w:
        await take_all(w.engine, 1)
    assert lengths == [6, 5]


async def test_a_failure_as_a_value_keeps_no_reference_to_the_exception():
    error = ValueError("x")
    failure = failure_of(error, group=None, attempt=2)
    assert (failure.type, failure.message, failure.attempt) == ("ValueError", "x", 2)


async def test_no_progress_is_a_limit_apart_from_the_deadline():
    """A slow rollout with new tokens goes on; one without is tried again with cause NO_PROGRESS."""
    slow = Say(tokens=8, seconds=80)
    async with world(3, plan=lambda n, _: HANG if n == 0 else slow, deadlines={"no_progress": 15.0}) as w:
        assert len(await take_all(w.engine)) == 3
        counts = w.engine.statistics()
    assert counts.retries[Cause.NO_PROGRESS] == 1
    assert counts.retries[Cause.DEADLINE] == 0


async def test_the_clock_of_no_progress_stands_still_in_a_weight_update():
    async with world(1, plan=lambda *_: Say(tokens=8, seconds=80), deadlines={"no_progress": 20.0}) as w:
        await trio.sleep(5)
        async with w.engine.weight_update(version=1, mode=PauseMode.IN_PLACE):
            await trio.sleep(100)
            w.servers.set_version(1)
        assert len(await take_all(w.engine)) == 1
        assert w.engine.statistics().retries[Cause.NO_PROGRESS] == 0


async def test_partial_goes_on_from_what_a_lost_server_had_streamed():
    """The attempt is kept: its first part comes from the tokens that were in ServerLost."""

    class Dying(FakeServers):
        async def generate(self, input_ids, sampling, **more):
            turn = await super().generate(input_ids, sampling, **more)
            if self.calls <= 2:
                part = attrs.evolve(turn, stop=Stop.ABORT)
                raise ServerLost("died in the middle", tokens=part)
            return turn

    async with world(1, servers=Dying(plan=lambda *_: Say(tokens=4)), partial=True) as w:
        (group,) = await take_all(w.engine)
    assert group.attempt == 1
    assert [row.segments[0].response_length for row in group.trajectories] == [8, 8]


async def test_when_a_groups_deadline_passes_the_log_shows_what_was_stuck(caplog):
    """F016: each task is logged with its await at that moment, before the cancellation changes it."""

    async def the_judge_that_hangs():
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(1)

    async def reward(trajectory):
        await the_judge_that_hangs()

    async with world(1, reward=reward, deadlines={"group": 10.0}, retry=Retry(max_attempts=1)) as w:
        assert await take_all(w.engine) == []
    (record,) = [record for record in caplog.records if "has passed" in record.message]
    assert "group 0/p0" in record.message
    assert "the_judge_that_hangs" in record.message
    assert "> sleep_forever" in record.message
    assert "rollout 0/p0 attempt 1 index 1" in record.message


async def test_each_overdue_group_is_logged_once(caplog):
    """One task looks after all groups: while one that is overdue still cleans up, and after one that ended early."""

    async def generate(prompt, rollout):
        if prompt.id == "p0":
            return rollout.finish([await rollout.generate(rollout.input)])
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(1)

    class OneByOne(IterableSource):
        async def take(self, limit):
            await trio.sleep(0.25)
            return await super().take(min(1, limit))

    retry, deadlines = Retry(max_attempts=1), {"group": 10.0}
    async with world(source=OneByOne(prompts(5)), generate=generate, deadlines=deadlines, retry=retry) as w:
        await take_all(w.engine)
    logged = [record.message.split()[1] for record in caplog.records if "has passed" in record.message]
    assert logged == [f"0/p{number}:" for number in range(1, 5)]


async def test_an_attempt_that_is_cancelled_for_another_reason_logs_no_tasks(caplog):
    async with world(2, plan=lambda *_: HANG) as w:
        await trio.sleep(1)
        await w.engine.drain(grace=0)
    assert not [record for record in caplog.records if "has passed" in record.message]


def _kept(scope_s=1):
    """Return a helper for generate functions that raises the Cancelled of a scope that has been left."""

    async def raise_it():
        kept = None
        with trio.move_on_after(scope_s):
            try:
                await trio.sleep_forever()
            except trio.Cancelled as error:
                kept = error
                raise
        raise kept

    return raise_it


@pytest.mark.parametrize("grouped", [False, True])
async def test_a_cancelled_that_user_code_kept_is_a_failure_and_no_group_comes_short(grouped):
    """The rollouts' nursery would swallow it, and the group would be delivered with the siblings' rows only."""
    again = _kept()

    async def generate(prompt, rollout):
        turn = await rollout.generate(rollout.input)
        if rollout.index == 1 and rollout.attempt == 1:
            try:
                await again()
            except trio.Cancelled as error:
                raise BaseExceptionGroup("kept", [error]) if grouped else error from None
        return rollout.finish([turn])

    async with world(2, generate=generate) as w:
        groups = await take_all(w.engine)
        assert [len(group.trajectories) for group in groups] == [2, 2]
        assert [group.attempt for group in groups] == [1, 1]
        assert w.engine.statistics().retries[Cause.ERROR] == 2
        (row,) = (await w.engine.evaluate(IterableSource(prompts(1, prefix="e")), samples_per_prompt=1))[0].trajectories
        assert row.status is Status.COMPLETED


async def test_the_sample_whose_code_kept_a_cancelled_is_named():
    again = _kept()

    async def generate(prompt, rollout):
        if rollout.index == 1:
            await again()
        return rollout.finish([await rollout.generate(rollout.input)])

    async with world(0, retry=Retry(max_attempts=1)) as w:
        (group,) = await w.engine.evaluate(IterableSource(prompts(1)), generate, samples_per_prompt=2)
    assert [row.status for row in group.trajectories] == [Status.COMPLETED, Status.FAILED]
    assert group.trajectories[1].error.cause is Cause.ERROR


@pytest.mark.parametrize("where", ["reward", "group_reward", "group_filter"])
async def test_a_cancelled_that_a_scorer_kept_is_its_failure(where):
    again = _kept()
    calls = []

    async def score(it):
        calls.append(it)
        if len(calls) == 1:
            await again()
        return {"reward": 1.0, "group_reward": [1.0, 1.0], "group_filter": Keep()}[where]

    how = {"reward": None, where: score, "deadlines": {"group": None}}
    async with world(1, **how) as w:
        (group,) = await take_all(w.engine)
    assert group.attempt == 1  # the scorer alone ran again


async def test_a_refusal_out_of_a_nursery_of_user_code_is_final_and_in_the_servers_words():
    async def generate(prompt, rollout):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rollout.generate, rollout.input)

    plan = lambda *_: Fail(RequestRejected("too long, says the server", status=400))
    async with world(2, generate=generate, plan=plan) as w:
        assert await take_all(w.engine) == []
        reports = w.engine.quarantined()
    assert [(report.attempts, report.error.type, report.error.message) for report in reports] == [
        (1, "RequestRejected", "too long, says the server")
    ] * 2


async def test_of_a_group_of_failures_each_is_named():
    async def generate(prompt, rollout):
        raise ExceptionGroup("two", [ValueError("this"), ExceptionGroup("inner", [KeyError("that")])])

    async with world(1, generate=generate) as w:
        assert await take_all(w.engine) == []
        (report,) = w.engine.quarantined()
    assert "ValueError: this" in report.error.message
    assert "KeyError: 'that'" in report.error.message


async def test_an_exception_whose_text_cannot_be_had_is_recorded_all_the_same():
    class Bad(Exception):
        def __str__(self):
            raise ValueError("no text")

    async def generate(prompt, rollout):
        raise Bad

    async with world(1, generate=generate) as w:
        assert await take_all(w.engine) == []
        (report,) = w.engine.quarantined()
    assert (report.error.type, report.cause) == (Bad.__qualname__, Cause.ERROR)
    assert "__str__ raised ValueError" in report.error.message
