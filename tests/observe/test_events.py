"""The events that instruments get: each kind comes, with what it says, and only for production."""

from collections import Counter

import attrs
import pytest
import trio

from trio_rollout import (
    Cause,
    Discard,
    Drop,
    EngineSettings,
    IterableSource,
    Keep,
    PauseMode,
    Retry,
    SamplingParams,
    SingleTurn,
    Staleness,
    abc,
    open_rollout_engine,
)
from trio_rollout.abc import (
    BatchAcked,
    BatchDelivered,
    Event,
    GroupFiltered,
    GroupQuarantined,
    GroupReady,
    GroupRequeued,
    GroupStarted,
    GroupStarved,
    SampleFinished,
    SampleRetried,
    ServersStayedPaused,
    TurnFinished,
    VersionNoted,
    WindowClosed,
    WindowOpened,
)
from trio_rollout.errors import RolloutError, ServerError
from trio_rollout.testing import Fail, FakeServers, Say, prompts

KINDS = [kind for kind in vars(abc).values() if isinstance(kind, type) and issubclass(kind, Event)]


@attrs.define
class Heard:
    """An instrument that keeps every event, and fails at some of them if told to."""

    events: list = attrs.field(factory=list)
    fails_at: type | None = None

    def event(self, event):
        self.events.append(event)
        if type(event) is self.fails_at:
            raise ZeroDivisionError

    def of(self, kind):
        return [event for event in self.events if type(event) is kind]


async def reward(trajectory):
    await trio.lowlevel.checkpoint()
    return 1.0


async def drop_p1(group):
    return Drop("unwanted") if group.prompt.id == "p1" else Keep()


def open_engine(heard, count=4, *, plan=lambda *_: Say(tokens=4, seconds=1), servers=None, **settings):
    """Open an engine of groups of two samples, of which p1 is filtered out."""
    settings = {
        "samples_per_prompt": 2,
        "max_running": 4,
        "retry": Retry(max_attempts=2, backoff_base=0.01),
        **settings,
    }
    return open_rollout_engine(
        IterableSource(prompts(count)),
        SingleTurn(SamplingParams(max_new_tokens=8)),
        servers=servers or FakeServers(plan=plan),
        reward=reward,
        group_filter=drop_p1,
        settings=EngineSettings(**settings),
        instruments=[heard],
    )


def test_every_kind_is_public_frozen_and_documented():
    assert set(Event.__subclasses__()) | {Event} == set(KINDS)
    for kind in KINDS:
        assert kind.__name__ in abc.__all__
        assert kind.__doc__
        assert attrs.has(kind)
        assert kind.__setattr__ is not object.__setattr__


async def test_a_groups_life(autojump_clock):
    tries = Counter()

    def plan(number, prompt):
        tries[prompt[2]] += 1
        return Fail(ValueError("broken"), 0.5) if prompt[2] == 3 and tries[3] == 1 else Say(tokens=4, seconds=1)

    heard = Heard()
    async with open_engine(heard, plan=plan) as engine:
        batches = []
        async for batch in engine.batches(3):
            batches.append(batch)
            await batch.ack()
    (batch,) = batches
    kinds = Counter(map(type, heard.events))
    once = {GroupStarted: 4, SampleRetried: 1, GroupFiltered: 1, GroupReady: 3, BatchDelivered: 1, BatchAcked: 1}
    assert kinds == {**once, TurnFinished: 8, SampleFinished: 8}
    (retried,) = heard.of(SampleRetried)
    assert (retried.id.prompt, retried.attempt, retried.tries, retried.cause) == ("p0", 1, 1, Cause.ERROR)
    assert "broken" in retried.error.message
    assert [(event.id.prompt, event.reason) for event in heard.of(GroupFiltered)] == [("p1", "unwanted")]
    assert {len(event.turn.output_ids) for event in heard.of(TurnFinished)} == {4}
    assert {event.trajectory.reward for event in heard.of(SampleFinished)} == {1.0}
    (delivered,), (acked,) = heard.of(BatchDelivered), heard.of(BatchAcked)
    assert (delivered.id, delivered.step, delivered.redelivered) == (batch.id, batch.step, False)
    assert delivered.groups == tuple(group.id for group in batch.groups)
    assert (acked.id, acked.step) == (batch.id, batch.step)


async def test_the_events_of_one_group_come_in_order(autojump_clock):
    heard = Heard()
    async with open_engine(heard, count=1, samples_per_prompt=1) as engine:
        await (await engine.next_batch(1)).ack()
    order = [GroupStarted, TurnFinished, SampleFinished, GroupReady, BatchDelivered, BatchAcked]
    assert list(map(type, heard.events)) == order


async def test_a_group_that_is_given_up(autojump_clock):
    heard = Heard()
    async with open_engine(heard, count=1, plan=lambda *_: Fail(ValueError("broken"))) as engine:
        with pytest.raises(RolloutError, match="no group was delivered"):
            await anext(engine.batches(1))
    (given_up,) = heard.of(GroupQuarantined)
    assert given_up.id == given_up.report.id
    assert given_up.report == engine.quarantined()[0]


async def test_windows(autojump_clock):
    heard, servers = Heard(), FakeServers(plan=lambda *_: Say(tokens=4, seconds=5))
    async with open_engine(heard, servers=servers) as engine:
        await trio.sleep(1)
        async with engine.weight_update(version=1, mode=PauseMode.ABORT):
            (opened,) = heard.of(WindowOpened)
            assert not heard.of(WindowClosed)
            servers.set_version(1)
            await trio.sleep(2)
        with pytest.raises(ZeroDivisionError):
            async with engine.weight_update(version=2, mode=PauseMode.RETRACT):
                raise ZeroDivisionError
        await engine.note_weight_version(3)
    assert (opened.version, opened.mode, set(opened.seconds)) == (1, PauseMode.ABORT, {"pause", "quiet"})
    good, bad = heard.of(WindowClosed)
    assert (good.version, good.adopted, good.seconds["body"]) == (1, True, 2.0)
    assert set(good.seconds) == {"pause", "quiet", "body", "confirm", "resume", "open"}
    assert (bad.version, bad.adopted, set(bad.seconds)) == (2, False, {"pause", "body", "resume", "open"})
    assert [event.version for event in heard.of(VersionNoted)] == [3]


async def test_servers_that_cannot_be_resumed(autojump_clock):
    class Stuck(FakeServers):
        async def resume(self):
            await super().resume()
            raise ServerError("http://a:1 does not answer")

    heard, servers = Heard(), Stuck()
    async with open_engine(heard, servers=servers) as engine, engine.weight_update(version=1):
        servers.set_version(1)
    assert [(event.version, event.error) for event in heard.of(ServersStayedPaused)] == [
        (1, "http://a:1 does not answer")
    ]


async def test_groups_that_grow_too_old(autojump_clock):
    heard, servers = Heard(), FakeServers()
    stale = Staleness(max_versions=0, policy=Discard(max_recycles=1))
    async with open_engine(heard, count=1, servers=servers, staleness=stale) as engine:
        await trio.sleep(10)
        async with engine.weight_update(version=1, mode=PauseMode.RETRACT):
            servers.set_version(1)
        await engine.next_batch(1)
    (requeued,) = heard.of(GroupRequeued)
    assert (requeued.cause, requeued.error) == (Cause.STALE, None)
    assert [(event.id.prompt, event.recycles) for event in heard.of(GroupStarved)] == [("p0", 1)]


async def test_evaluations_are_no_events(autojump_clock):
    heard = Heard()
    async with open_engine(heard, count=0) as engine:
        await engine.evaluate(IterableSource(prompts(2)))
    assert not heard.events


async def test_an_instrument_that_raises_gets_no_more_events(autojump_clock, caplog):
    heard = Heard(fails_at=GroupReady)
    async with open_engine(heard) as engine:
        await engine.next_batch(3)
    assert len(heard.of(GroupReady)) == 1
    assert not heard.of(BatchDelivered)
    assert "failed at GroupReady and gets no more events" in caplog.text
