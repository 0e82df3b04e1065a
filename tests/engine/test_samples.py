"""The grain is the sample: a failure ends one sample, and what is finished is never sampled again."""

import itertools
import random

import pytest
import trio

from trio_rollout import Cause, EngineSettings, IterableSource, Retry, SamplingParams, Staleness, open_rollout_engine
from trio_rollout.errors import InfrastructureError, RequestRejected, SandboxLost, ServerLost, SettingsError, ToolError
from trio_rollout.testing import HANG, Fail, FakeServers, Say, prompts

from .conftest import one, take_all, world


def counting(calls, *, turns=1):
    """A generate function that notes (prompt, index) of each try, and samples so many turns."""

    async def generate(prompt, rollout):
        calls.append((prompt.id, rollout.index))
        context, done = [1, 2, 3], []
        for _ in range(turns):
            turn = await rollout.generate(context, SamplingParams(max_new_tokens=4))
            done.append(turn)
            context = [*turn.prompt_ids, *turn.output_ids]
        return rollout.finish(done)

    return generate


class MyMachine(Exception):
    """A class of the user's, named in Retry.infrastructure."""


@pytest.mark.parametrize(
    ("chance", "most_wasted"),
    [(0.01, 0.01), (0.05, 0.03), (0.10, 0.06), (0.20, 0.12)],
    ids=lambda share: f"{share:.0%}",
)
async def test_f102_a_lost_machine_costs_its_own_sample_only(chance, most_wasted):
    """400 groups of 8 samples of 10 turns; each rollout loses its machine with this chance, at a random turn.

    The four kinds of such failures take turns.
    """
    rng, turns = random.Random(7), 0
    errors = itertools.cycle([ToolError, SandboxLost, ServerLost, MyMachine])

    async def generate(prompt, rollout):
        nonlocal turns
        lost_at = rng.randrange(10) if rng.random() < chance else None
        context, done = [1, 2, 3], []
        for number in range(10):
            if number == lost_at:
                raise next(errors)("the machine is gone")
            done.append(await rollout.generate(context, SamplingParams(max_new_tokens=4)))
            turns += 1
            context = [*done[-1].prompt_ids, *done[-1].output_ids]
        return rollout.finish(done)

    servers = FakeServers(plan=lambda *_: Say(tokens=4, seconds=1.0))
    retry = Retry(infrastructure=(MyMachine,))
    settings = EngineSettings(samples_per_prompt=8, max_running=64, max_ready=400, retry=retry)
    async with open_rollout_engine(
        IterableSource(prompts(400)), generate, servers=servers, reward=one, settings=settings
    ) as engine:
        groups = await take_all(engine, 16)

        assert len(groups) == 400
        now = engine.statistics()
        assert (now.quarantined, sum(now.requeues.values())) == (0, 0)
        assert now.retries[Cause.INFRASTRUCTURE] > 0
        assert now.retries[Cause.SERVER_LOST] > 0
    assert 1 - 400 * 8 * 10 / turns <= most_wasted


@pytest.mark.parametrize(
    "error", [ToolError("no such container"), SandboxLost("gone"), ConnectionError("reset"), ServerLost("reset")]
)
async def test_an_infrastructure_failure_uses_up_no_attempt_and_leaves_the_siblings_alone(error):
    calls, failed = [], 0

    async def generate(prompt, rollout):
        nonlocal failed
        calls.append(rollout.index)
        turn = await rollout.generate(rollout.input)
        if rollout.index == 1 and failed < 7:
            failed += 1
            raise error
        return rollout.finish([turn])

    async with world(1, generate=generate, retry=Retry(max_attempts=1, backoff_base=0.01)) as w:
        (group,) = await take_all(w.engine)
    assert group.attempt == 1
    assert sorted(calls) == [0, *[1] * 8]


async def test_users_may_raise_it_and_name_classes_of_their_own():
    class JudgeDown(Exception):
        """A class of the user's that has nothing to do with this package."""

    calls = []

    async def generate(prompt, rollout):
        calls.append(rollout.index)
        turn = await rollout.generate(rollout.input)
        if len(calls) == 1:
            raise JudgeDown("503")
        if len(calls) == 3:
            raise InfrastructureError("a machine of mine")
        return rollout.finish([turn])

    retry = Retry(max_attempts=1, backoff_base=0.01, infrastructure=(JudgeDown,))
    async with world(1, generate=generate, retry=retry, samples_per_prompt=1) as w:
        assert len(await take_all(w.engine)) == 1
    assert len(calls) >= 2


async def test_infrastructure_failures_without_a_new_token_end_after_max_free():
    async def generate(prompt, rollout):
        raise SandboxLost("never there")

    async with world(1, generate=generate, retry=Retry(max_free=5, backoff_base=0.01, backoff_max=0.01)) as w:
        assert await take_all(w.engine) == []
        (report,) = w.engine.quarantined()
    assert "never there" in report.error.message


async def test_user_code_that_fails_costs_one_try_of_its_own_sample():
    calls = []

    async def generate(prompt, rollout):
        calls.append(rollout.index)
        turn = await rollout.generate(rollout.input)
        if rollout.index == 0 and calls.count(0) < 3:
            raise ValueError("twice")
        return rollout.finish([turn])

    async with world(1, generate=generate) as w:
        (group,) = await take_all(w.engine)
    assert sorted(calls) == [0, 0, 0, 1]
    assert [row.index for row in group.trajectories] == [0, 1]


async def test_a_sample_that_failed_for_good_ends_its_siblings_and_the_group():
    started = []

    async def generate(prompt, rollout):
        started.append(rollout.index)
        if rollout.index == 0:
            raise ValueError("always")
        return rollout.finish([await rollout.generate(rollout.input)])

    plan = lambda n, prompt: HANG if prompt[2] == 3 else Say()
    async with world(2, generate=generate, plan=plan) as w:
        assert await take_all(w.engine) == []
        assert trio.current_time() < 10, "the sibling that hangs was ended"
        reports = w.engine.quarantined()
    assert {report.cause for report in reports} == {Cause.ERROR}
    assert all("always" in report.error.message for report in reports)


async def test_min_samples_delivers_what_finished_and_names_what_is_missing():
    async def generate(prompt, rollout):
        if rollout.index == 0:
            raise ValueError("always")
        return rollout.finish([await rollout.generate(rollout.input)])

    async with world(1, generate=generate, samples_per_prompt=4, min_samples=3) as w:
        (group,) = await take_all(w.engine)
    assert [row.index for row in group.trajectories] == [1, 2, 3]
    ((missing),) = group.missing
    assert missing.index == 0
    assert "always" in missing.failure.message


@pytest.mark.parametrize("wrong", [0, 3, 1.5, True])
def test_min_samples_is_a_number_of_samples(wrong):
    with pytest.raises(SettingsError, match=r"min_samples"):
        EngineSettings(samples_per_prompt=2, max_running=4, min_samples=wrong)


async def test_the_groups_deadline_keeps_the_finished_samples_and_runs_only_the_others():
    calls = []
    plan = lambda n, _: HANG if n == 1 else Say(seconds=1)
    async with world(1, generate=counting(calls), plan=plan, deadlines={"group": 20}) as w:
        (group,) = await take_all(w.engine)
        assert w.engine.statistics().requeues[Cause.DEADLINE] == 1
    assert len(calls) == 3
    assert group.attempt == 2


async def test_each_deadline_of_the_group_is_a_try_of_its_unfinished_samples():
    plan = lambda n, _: Say() if n == 0 else HANG
    async with world(1, plan=plan, deadlines={"group": 20}, retry=Retry(max_attempts=3, backoff_base=0)) as w:
        with trio.fail_after(100):
            assert await take_all(w.engine) == []
        (report,) = w.engine.quarantined()
        assert w.servers.calls == 4, "one that finished, and three tries of the other"
    assert (report.cause, report.attempts) == (Cause.DEADLINE, 3)


async def test_a_weight_update_restarts_what_samples_and_keeps_what_is_finished():
    calls = []
    plan = lambda n, _: Say(seconds=1 if n == 0 else 60)
    async with world(1, generate=counting(calls), plan=plan) as w:
        await trio.sleep(10)
        async with w.engine.weight_update(version=1):
            w.servers.version = 1
        (group,) = await take_all(w.engine)
    assert len(calls) == 3, "one sample was finished, the other began twice"
    assert (group.oldest_version, group.newest_version) == (0, 1)
    assert group.attempt == 1


async def test_a_group_of_mixed_versions_is_bounded_by_spread():
    calls = []
    plan = lambda n, _: Say(seconds=1 if n == 0 else 60)
    staleness = Staleness(spread=0)
    async with world(1, generate=counting(calls), plan=plan, staleness=staleness) as w:
        await trio.sleep(10)
        async with w.engine.weight_update(version=1):
            w.servers.version = 1
        (group,) = await take_all(w.engine)
        assert w.engine.statistics().tokens.wasted == {Cause.STALE: 4}
    assert len(calls) == 4
    assert (group.oldest_version, group.newest_version) == (1, 1)


@pytest.mark.parametrize("min_samples", [None, 1])
async def test_input_that_no_server_takes_ends_the_group_at_once(min_samples):
    """No sibling can differ, so none may make the group complete."""
    plan = lambda n, _: Fail(RequestRejected("too long", status=400), seconds=1) if n == 0 else HANG
    async with world(1, plan=plan, min_samples=min_samples) as w:
        assert await take_all(w.engine) == []
        assert trio.current_time() < 10
        (report,) = w.engine.quarantined()
    assert "too long" in report.error.message


async def test_a_sample_that_rests_holds_no_slot():
    """While a sample of the first group rests, the samples of others have its slot."""
    done = []

    async def generate(prompt, rollout):
        turn = await rollout.generate(rollout.input)
        if prompt.id == "0" and rollout.index == 0 and not done:
            raise SandboxLost("once")
        done.append((prompt.id, trio.current_time()))
        return rollout.finish([turn])

    retry = Retry(backoff_base=1000, backoff_max=1000, jitter=0)
    async with world(6, generate=generate, retry=retry, max_running=2) as w:
        groups = await take_all(w.engine, 1)
    assert len(groups) == 6
    assert sorted(moment for _, moment in done)[-2] < 100


async def test_conservation_at_sample_grain_is_part_of_the_statistics():
    async with world(2, plan=lambda *_: Say(seconds=10), samples_per_prompt=2) as w:
        await trio.sleep(5)
        now = w.engine.statistics()
        assert now.tokens.wasted_total == 0
        await take_all(w.engine)
        assert w.engine.statistics().tokens.delivered == 2 * 2 * 4
