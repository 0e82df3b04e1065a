"""The engine tells its ledger of samples in time: a process that is killed later has what was told, and no more."""

import attrs
import pytest
import trio

from trio_rollout import Cause, Discard, Drop, Keep, PauseMode, Retry, Staleness
from trio_rollout._core.ledger_events import (
    Ready,
    Recovered,
    Requeued,
    SampleKept,
    SamplesDropped,
    SamplesTried,
)
from trio_rollout.ledger import open_ledger, read_ledger
from trio_rollout.testing import HANG, Fail, Say
from trio_rollout.testing._sim.world import SimIO

from .conftest import take_all, world


@attrs.define(eq=False)
class Noted:
    """A ledger that remembers each transaction, and nothing from before."""

    transactions: list = attrs.field(factory=list)

    async def begin(self, identity):
        await trio.lowlevel.checkpoint()
        return Recovered()

    async def record(self, events):
        await trio.lowlevel.checkpoint()
        self.transactions.append(tuple(events))

    def of(self, kind):
        """Return the events of this class, in order."""
        return [event for events in self.transactions for event in events if isinstance(event, kind)]

    def kept(self):
        """Return the indices of the finished samples that were recorded, in order."""
        return [event.trajectory.index for event in self.of(SampleKept)]


def first_is_fast(n, _):
    return Say(seconds=1) if n == 0 else HANG


async def test_a_finished_sample_is_written_down_while_its_siblings_sample():
    ledger = Noted()
    async with world(1, plan=first_is_fast, ledger=ledger) as w:
        await trio.sleep(2)
        assert len(ledger.kept()) == 1
        await w.engine.drain(grace=0)


async def test_a_sample_that_finished_just_before_the_end_is_written_down():
    ledger = Noted()
    async with world(1, plan=first_is_fast, ledger=ledger) as w:
        await trio.sleep(1.05)
        assert ledger.kept() == []
        await w.engine.drain(grace=0)
        assert len(ledger.kept()) == 1


async def test_the_samples_of_a_group_that_settles_at_once_are_written_down_in_it_only():
    ledger = Noted()
    async with world(3, ledger=ledger) as w:
        await take_all(w.engine)
        await trio.sleep(1)
    assert len(ledger.of(Ready)) == 3
    assert ledger.kept() == []


async def test_a_try_that_failed_is_written_down_before_its_group_settles():
    """F042: a process that is killed in the rest, or in the next try, has used up this one."""
    plan = lambda n, _: Fail(ValueError("poison"), 1.0) if n == 0 else HANG
    ledger = Noted()
    async with world(1, plan=plan, ledger=ledger, samples_per_prompt=1) as w:
        await trio.sleep(2)
        (event,) = ledger.of(SamplesTried)
        assert [(counts.attempts, counts.tries) for counts in event.samples] == [(1, 1)]
        await w.engine.drain(grace=0)


async def test_samples_that_are_too_old_are_written_down_as_dropped():
    """A restart between the drop and the group's end must not bring them back."""
    ledger, plan = Noted(), lambda n, _: Say(seconds=1 if n == 0 else 60)
    async with world(1, plan=plan, ledger=ledger, staleness=Staleness(spread=0)) as w:
        await trio.sleep(10)
        async with w.engine.weight_update(version=1):
            w.servers.version = 1
        await take_all(w.engine)
    assert [event.indices for event in ledger.of(SamplesDropped)] == [(ledger.kept()[0],)]


async def test_a_group_that_is_too_old_runs_its_old_samples_again_and_keeps_the_fresh_ones():
    """One sample is of version 0, the other of version 1; at version 2 and a bound of 1 the first is too old."""
    ledger, plan = Noted(), lambda n, _: Say(seconds=1 if n == 0 else 5)
    async with world(
        1, plan=plan, ledger=ledger, staleness=Staleness(max_versions=1, policy=Discard()), retry=Retry(backoff_base=0)
    ) as w:
        for version in (1, 2):
            await trio.sleep(4)
            async with w.engine.weight_update(version=version, mode=PauseMode.ABORT):
                w.servers.set_version(version)
            await trio.sleep(10)
        (group,) = await take_all(w.engine, 1)
        assert w.servers.calls == 4, "two tries, one restarted by the first update, one for the old sample"
    assert (group.oldest_version, group.newest_version) == (1, 2)
    (again,) = [events for events in ledger.transactions if isinstance(events[0], Requeued)]
    assert again[0].cause is Cause.STALE
    assert [event.trajectory.segments[0].versions for event in again[1:]] == [((0, 4, 1),)]


@pytest.mark.parametrize("keep_acked", [True, False])
async def test_the_ledger_knows_what_became_of_the_tokens_as_the_statistics_do(tmp_path, keep_acked):
    """Over tries that failed, a scorer that fails for good, a filter, samples that are too old, and groups that wait."""

    async def reward(trajectory):
        if trajectory.prompt.id == "p1":
            raise KeyError("no such key")
        return 1.0

    async def not_the_third(group):
        return Drop("third") if group.prompt.id == "p3" else Keep()

    async def two_tries(prompt, rollout):
        first = await rollout.generate(rollout.input)
        if prompt.id == "p2" and rollout.attempt == 1:
            raise ValueError("after a turn")
        return rollout.finish([first])

    options = {"plan": lambda _, ids: HANG if ids[2] == 9 else Say(seconds=1), "max_running": 4, "max_ready": 2}
    judges = {"reward": reward, "group_filter": not_the_third}
    async with (
        open_ledger(tmp_path, keep_acked=keep_acked, io=SimIO()) as ledger,
        world(
            7,
            ledger=ledger,
            generate=two_tries,
            staleness=Staleness(max_versions=0, policy=Discard()),
            **options,
            **judges,
        ) as w,
    ):
        await (await w.engine.next_batch(1)).ack()
        while w.engine.statistics().ready < 2:
            await trio.sleep(0.1)
        async with w.engine.weight_update(version=1):
            w.servers.set_version(1)
        await (await w.engine.next_batch(1)).ack()
        await trio.sleep(20)
        await w.engine.drain(grace=0)
        counted = w.engine.statistics().tokens
    with read_ledger(tmp_path) as reader:
        known = reader.tokens()
        shown = {one.id.prompt: dict(one.wasted) for one in (*reader.ended(), *reader.summaries())}
    assert {Cause.ERROR, Cause.STALE} <= counted.wasted.keys()
    assert (counted.delivered, counted.filtered) > (0, 0)
    assert known == counted
    assert shown["p2"][Cause.ERROR] > 0
