"""The grain is the sample, across nodes: the lost node's samples in flight run again, and everything is counted as in one engine."""

import random
from contextlib import suppress
from functools import partial

import attrs
import numpy as np
import pytest
import trio

from trio_rollout import (
    Cause,
    Deadlines,
    IterableSource,
    Prompt,
    Retry,
    SamplingParams,
    SingleTurn,
    Trajectory,
    open_ledger,
    open_rollout_engine,
)
from trio_rollout.errors import ContextFull, EndOfData, InfrastructureError, RequestRejected, SandboxLost, ServerLost
from trio_rollout.ledger import read_ledger
from trio_rollout.testing import HANG, FakeServers, Say, prompts
from trio_rollout_compat._leasing._service import open_lease_service

from .cluster import EIGHT, SETTINGS, Local, cluster, groups_of, is_settled


def staggered(number, prompt):
    return Say(seconds=1.0 + number % 8)


async def test_f102_a_dead_node_costs_the_samples_that_it_was_running(caplog):
    """Four groups of eight on two nodes; after 4.5 s half of what the dead one had was finished, and stays so."""
    async with cluster(4, nodes=2, settings=EIGHT, plan=staggered) as (service, nodes), trio.open_nursery() as nursery:

        async def kill_one():
            await trio.sleep(4.5)
            lost.append(nodes[1].servers.running)
            nodes[1].kill()

        lost = []
        nursery.start_soon(kill_one)
        groups = await groups_of(service)
        counts, *_ = await service.statistics()
    assert 0 < lost[0] < 16
    assert sum(node.servers.calls for node in nodes) == 4 * 8 + lost[0]
    assert counts.retries[Cause.INFRASTRUCTURE] == lost[0]
    assert sum(counts.retries.values()) == lost[0]
    assert sum(counts.requeues.values()) == 0
    assert all(len(group.trajectories) == 8 and group.attempt == 1 for group in groups)
    assert counts.tokens.delivered == 4 * 8 * 4
    assert is_settled(counts)


@pytest.mark.parametrize("seed", range(12))
async def test_nodes_that_die_at_any_moment_cost_what_was_in_flight_and_no_try(seed, caplog):
    """Each sample has a single try, so a loss that were charged to it would quarantine its group."""
    rng = random.Random(seed)
    plan = lambda number, prompt: Say(seconds=rng.choice([0.5, 1.0, 3.0]))
    settings = attrs.evolve(EIGHT, deadlines=Deadlines(group=None))
    async with cluster(12, nodes=3, settings=settings, plan=plan) as (service, nodes), trio.open_nursery() as nursery:

        async def kill_some():
            while True:
                await trio.sleep(rng.uniform(0.1, 4.0))
                victim = rng.choice(nodes)
                if victim.is_up:
                    victim.kill()

        nursery.start_soon(kill_some)
        groups = await groups_of(service)
        counts, *_ = await service.statistics()
        nursery.cancel_scope.cancel()
    assert len({group.id for group in groups}) == 12
    assert all([row.index for row in group.trajectories] == list(range(8)) for group in groups)
    assert counts.retries[Cause.INFRASTRUCTURE] == sum(node.lost for node in nodes) > 0
    assert (counts.quarantined, sum(counts.requeues.values())) == (0, 0)
    assert is_settled(counts)


async def test_f103_a_service_that_starts_again_samples_what_is_missing(tmp_path, caplog):
    """Finished samples of a group that was not complete are in the ledger, whatever node they ran on."""
    slow = {"p0": 3, "p1": 5}

    async def generate(prompt, rollout):
        calls.append((prompt.id, rollout.index))
        turn = await rollout.generate(rollout.input)
        if first and rollout.index >= slow[prompt.id]:
            await trio.sleep_forever()
        return rollout.finish([turn])

    calls, first = [], [True]
    nodes = [
        Local(f"node {number}", FakeServers(plan=lambda *_: Say(seconds=0.01)), {"generate": generate})
        for number in range(2)
    ]
    opened = partial(
        open_lease_service, nodes, lambda: IterableSource(prompts(2)), settings=EIGHT, ledger=tmp_path / "ledger"
    )
    async with trio.open_nursery() as nursery:
        for node in nodes:
            await nursery.start(node.serve, EIGHT)
        with trio.CancelScope() as scope:
            async with opened(holder="first"):
                await trio.sleep(1)
                scope.cancel()
                await trio.lowlevel.checkpoint()
        first.clear()
        calls.clear()
        async with opened(holder="second") as service:
            groups = await groups_of(service)
        nursery.cancel_scope.cancel()
    assert sorted(calls) == [(name, index) for name, done in slow.items() for index in range(done, 8)]
    assert [len(group.trajectories) for group in groups] == [8, 8]


class JudgeDown(Exception):
    """Infrastructure of the user's, named by ``Retry.infrastructure``."""


class MyOutage(InfrastructureError):
    """Infrastructure of the user's, by its base class."""


NAMED = f"{JudgeDown.__module__}.{JudgeDown.__qualname__}"
FAILURES = {
    "user code": ValueError("no such tool"),
    "a class of the user's": MyOutage("no machine"),
    "a named class": JudgeDown("503"),
    "a connection": ConnectionResetError("reset"),
    "a sandbox": SandboxLost("gone"),
    "a server": ServerLost("gone"),
    "input": RequestRejected("too long"),
    "a full context": ContextFull("no room"),
    "a group of errors": ExceptionGroup("two", [SandboxLost("gone"), SandboxLost("too")]),
    "a group of rejections": ExceptionGroup("two", [RequestRejected("a"), RequestRejected("b")]),
    "an exit": SystemExit(3),
    "the rollout's deadline": "deadline",
    "no progress": "no progress",
    "no trajectory": "none",
    "an abort": "abort",
}


def failing(failure, *, times, servers):
    """Return a generate function whose sample 1 fails so often, each time after a turn."""
    left = [times]

    async def generate(prompt, rollout):
        turn = await rollout.generate(rollout.input, SamplingParams(max_new_tokens=4))
        if rollout.index == 1 and left[0]:
            left[0] -= 1
            assert rollout.attempt == times - left[0]
            await trio.sleep(0.25)  # the siblings' turns are over
            if isinstance(failure, BaseException):
                raise failure
            if failure == "none":
                return None
            if failure == "abort":
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(rollout.generate, rollout.input)
                    await trio.sleep(0.5)
                    for server in servers:
                        server.abort_all()
            await trio.sleep({"deadline": 500, "no progress": 80}[failure])
        return rollout.finish([turn])

    return generate


def figures(counts, reports):
    """Return what a failure costs, as the statistics and the report show it."""
    retries = {cause: count for cause, count in counts.retries.items() if count}
    seen = [(report.cause, report.attempts, report.error.type, report.error.message) for report in reports]
    return retries, counts.tokens, counts.generated_tokens, counts.quarantined, seen


async def locally(generate, servers, settings, **parts):
    async with open_rollout_engine(
        IterableSource(prompts(1)), generate, servers=servers, settings=settings, **parts
    ) as engine:
        with suppress(EndOfData):
            await (await engine.next_batch(1)).ack()
        return figures(engine.statistics(), engine.quarantined())


async def lent(settings, servers, **parts):
    async with cluster(1, nodes=2, settings=settings, **parts) as (opened, nodes):
        servers.extend(node.servers for node in nodes)
        await groups_of(opened)
        counts, *_ = await opened.statistics()
        return figures(counts, await opened.quarantined())


@pytest.mark.parametrize("times", [1, 2, 9])
@pytest.mark.parametrize("what", list(FAILURES))
async def test_a_failure_on_a_node_costs_what_it_costs_in_one_engine(what, times, caplog):
    """Cause, class, message, tries and tokens: the same on both sides of the wall."""
    retry = Retry(jitter=0, max_attempts=3, max_free=4, infrastructure=(ConnectionError, NAMED))
    deadlines = Deadlines(rollout=100, no_progress=50, group=None)
    settings = attrs.evolve(EIGHT, samples_per_prompt=3, retry=retry, deadlines=deadlines)
    servers = [FakeServers()]
    here = await locally(failing(FAILURES[what], times=times, servers=servers), servers[0], settings)
    servers.clear()
    generate = failing(FAILURES[what], times=times, servers=servers)
    assert await lent(settings, servers, generate=generate) == here


async def test_a_sample_that_is_cut_while_it_is_scored_is_only_scored_again(caplog):
    """By any node, if need be twice; its first scorer hangs until the rollout's deadline, the next two are lost."""

    def scripted():
        calls, left = [], ["hang", ValueError("once"), MyOutage("judge")]

        async def generate(prompt, rollout):
            calls.append(rollout.index)
            return rollout.finish([await rollout.generate(rollout.input)])

        async def reward(trajectory):
            assert trajectory.prompt.epoch == 0
            if trajectory.index != 1 or not left:
                return 1.0
            failure = left.pop(0)
            if failure == "hang":
                await trio.sleep_forever()
            raise failure

        return calls, generate, reward

    deadlines = Deadlines(rollout=20, reward=None, group=None)
    settings = attrs.evolve(EIGHT, samples_per_prompt=3, retry=Retry(jitter=0), deadlines=deadlines)
    calls, generate, reward = scripted()
    here = await locally(generate, FakeServers(), settings, reward=reward)
    assert sorted(calls) == [0, 1, 2]
    calls, generate, reward = scripted()
    there = await lent(settings, [], generate=generate, reward=reward)
    assert sorted(calls) == [0, 1, 2]
    assert there == here
    assert there[0] == {Cause.DEADLINE: 1}
    assert (there[1].delivered, there[1].wasted_total) == (3 * 4, 0)


@pytest.mark.parametrize("error", [ValueError("no number"), MyOutage("judge")])
async def test_a_scorer_that_fails_for_good_keeps_the_tokens_for_another_scorer(
    error, tmp_path, autojump_clock, caplog
):
    calls = []

    async def reward(trajectory):
        calls.append((trajectory.index, trajectory.prompt.epoch))
        if trajectory.index == 1:
            raise error
        return 1.0

    retry = Retry(jitter=0, max_attempts=3, max_free=2)
    settings = attrs.evolve(EIGHT, samples_per_prompt=3, retry=retry)
    unscored = []
    for place in ("here", "there"):
        calls.clear()
        if place == "here":
            async with open_ledger(tmp_path / place) as ledger:
                first = await locally(SingleTurn(), FakeServers(), settings, reward=reward, ledger=ledger)
            wanted = sorted(calls)
        else:
            second = await lent(settings, [], reward=reward, service={"ledger": tmp_path / place})
        with read_ledger(tmp_path / place) as reader:
            (report,) = reader.quarantined()
            rows = reader.samples(report.id).unscored
            unscored.append([(row.index, row.prompt.epoch, row.segments[0].response_length) for row in rows])
    assert second == first
    assert sorted(calls) == wanted
    assert unscored[0] == unscored[1] == [(1, 0, 4)]


async def test_the_group_reward_sees_the_whole_group_and_its_failures_cost_no_sample(caplog):
    """It runs on any node; a failure costs one of its tries, a node that dies under it none, and nothing is sampled again."""
    tries, died = [], []

    async def group_reward(group):
        tries.append(group.id)
        if len(tries) == 2:
            raise ValueError("once")
        if len(tries) == 3 and not died:
            died.append(True)
            for node in running:
                node.kill()
            await trio.sleep_forever()
        assert [row.index for row in group.trajectories] == [0, 1]
        assert group.id.epoch == group.prompt.epoch == 0
        return np.array([0.0, 2.0])

    more = {"group_reward": group_reward}
    settings = attrs.evolve(SETTINGS, retry=Retry(jitter=0, max_attempts=2))
    async with cluster(4, nodes=2, settings=settings, **more) as (service, running):
        groups = await groups_of(service)
        counts, *_ = await service.statistics()
    assert [[row.reward for row in group.trajectories] for group in groups] == [[0.0, 2.0]] * 4
    assert died
    assert sum(node.servers.calls for node in running) == 4 * 2
    assert sum(counts.retries.values()) == 0
    assert is_settled(counts)


async def test_a_group_reward_that_fails_for_good_quarantines_its_group_with_the_nodes_own_words(caplog):
    async def group_reward(group):
        raise KeyError("no such column")

    more = {"group_reward": group_reward}
    async with cluster(1, **more) as (service, _):
        assert await groups_of(service) == []
        (report,) = await service.quarantined()
    assert (report.cause, report.error.type, report.error.message) == (Cause.ERROR, "KeyError", "'no such column'")
    assert "in group_reward" in report.error.traceback


async def test_a_group_may_be_short_where_the_settings_allow_it(caplog):
    async def generate(prompt, rollout):
        if rollout.index == 5:
            raise ValueError("this one never works")
        return await SingleTurn()(prompt, rollout)

    settings = attrs.evolve(EIGHT, min_samples=7)
    async with cluster(2, nodes=2, settings=settings, generate=generate) as (service, _):
        groups = await groups_of(service)
    assert [[row.index for row in group.trajectories] for group in groups] == [[0, 1, 2, 3, 4, 6, 7]] * 2
    assert [(missing.index, missing.failure.type) for missing in groups[0].missing] == [(5, "ValueError")]


async def test_the_groups_deadline_keeps_what_is_finished(caplog):
    """It is the service's: the missing samples are revoked, and only they run again."""
    plan = lambda number, prompt: Say(seconds=200.0 if number == 3 else 1.0)
    settings = attrs.evolve(EIGHT, retry=Retry(jitter=0, max_attempts=2))
    async with cluster(1, nodes=1, settings=settings, plan=plan) as (service, (node,)):
        (group,) = await groups_of(service)
        counts, _, out = await service.statistics()
    assert (node.servers.calls, node.servers.aborts) == (9, 1)
    assert (group.attempt, out) == (2, 0)
    assert counts.requeues[Cause.DEADLINE] == 1
    assert is_settled(counts)


async def test_a_sibling_that_failed_for_good_revokes_the_others_and_their_tokens_are_counted(caplog):
    async def generate(prompt, rollout):
        if rollout.index == 1:
            await trio.sleep(3)
            raise RequestRejected("too long")
        return rollout.finish([await rollout.generate(rollout.input) for _ in range(2)])

    plan = lambda number, prompt: Say(seconds=1.0) if number < 7 else HANG
    async with cluster(1, nodes=2, settings=EIGHT, plan=plan, generate=generate) as (service, nodes):
        assert await groups_of(service) == []
        assert trio.current_time() < 5
        counts, _, out = await service.statistics()
        assert out == 0
    assert sum(node.servers.aborts for node in nodes) == 7
    assert counts.tokens.wasted_total == counts.generated_tokens == 7 * 4


async def test_siblings_run_on_one_node_while_it_has_room():
    places = {}

    def parts_of(number):
        async def generate(prompt, rollout):
            places.setdefault(prompt.id, set()).add(number)
            return await SingleTurn()(prompt, rollout)

        return generate

    async with cluster(2, nodes=2, settings=EIGHT) as (service, nodes):
        for number, node in enumerate(nodes):
            node.node.parts = attrs.evolve(node.node.parts, generate=parts_of(number))
        await groups_of(service)
    assert [len(where) for where in places.values()] == [1, 1]


async def test_a_node_without_sandboxes_does_not_draw_all_the_work(caplog):
    """Its samples fail at once, so it always has the most room: the others come first until it works again."""

    async def broken(prompt, rollout):
        failed.append(trio.current_time())
        raise SandboxLost("no daemon")

    failed = []
    settings = attrs.evolve(SETTINGS, samples_per_prompt=1)
    async with cluster(40, nodes=2, settings=settings) as (service, nodes):
        nodes[0].node.parts = attrs.evolve(nodes[0].node.parts, generate=broken)
        groups = await groups_of(service)
        counts, *_ = await service.statistics()
    assert len(groups) == 40
    assert counts.quarantined == 0
    assert counts.retries[Cause.INFRASTRUCTURE] == len(failed) < 100


async def test_user_code_on_a_node_sees_the_sample_and_the_prompt_of_the_service():
    seen = []

    async def generate(prompt, rollout):
        assert (prompt.epoch, rollout.attempt) == (4, 1)
        turn = await rollout.generate(rollout.input)
        assert rollout.new_tokens == 4
        rollout.note_tokens(2)
        made = rollout.finish([turn])
        assert (made.prompt.epoch, made.index) == (4, rollout.index)
        return Trajectory(prompt=prompt, index=7, segments=made.segments, metadata={"mine": rollout.index})

    async def reward(trajectory):
        seen.append((trajectory.prompt.epoch, trajectory.index, trajectory.metadata["mine"]))
        return 1.0

    source = lambda: IterableSource([Prompt(id="p", text="say", epoch=4)])
    nodes = [Local("node", FakeServers(), {"generate": generate, "reward": reward})]
    async with trio.open_nursery() as nursery:
        await nursery.start(nodes[0].serve, SETTINGS)
        async with open_lease_service(nodes, source, settings=SETTINGS, holder="a") as service:
            (group,) = await groups_of(service)
            counts, *_ = await service.statistics()
        nursery.cancel_scope.cancel()
    assert sorted(seen) == [(4, 0, 0), (4, 1, 1)]
    assert [(row.prompt.epoch, row.index) for row in group.trajectories] == [(4, 0), (4, 1)]
    assert counts.tokens.delivered == 2 * (4 + 2)
