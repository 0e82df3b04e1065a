"""With ``Resume.TURNS``, cancelled at any step, raising at any await: nothing is lost, and no recorded turn is sampled again.

Groups, samples and tokens, those of recorded turns too, are conserved between any two steps of each run (P1, P11).
"""

import attrs
import pytest
import trio

from trio_rollout import Cause, PauseMode, Resume, Retry
from trio_rollout._core.ledger_events import Recovered
from trio_rollout.errors import EndOfData, InfrastructureError, LedgerError, ServerLost
from trio_rollout.testing import Fail, FakeServers, Say, cancel_everywhere, is_conserved, throw_everywhere

from .conftest import one, take_all, world
from .test_everywhere import Kept, State
from .test_restarts import Runs
from .test_turns import Agent

COUNT, SAMPLES, TURNS = 3, 2, 3
OPTIONS = {"resume": Resume.TURNS, "samples_per_prompt": SAMPLES, "retry": Retry(backoff_base=0.1, jitter=0)}
PER_GROUP = SAMPLES * TURNS


def losing(lost):
    """Return a plan in which every fifth call loses its server; it is counted."""

    def plan(number, _):
        if number % 5 != 3:
            return Say()
        lost.append(number)
        return Fail(ServerLost("reset"), 0.5)

    return plan


@attrs.define
class Lives:
    """Two runs over one disk: what the first delivered, and how much of the second was sampled."""

    first: list = attrs.field(factory=list)
    later: list = attrs.field(factory=list)
    missing: int = 0
    """Turns that were not on disk when the second life began."""
    sampled: int = 0
    counts: object = None

    def check(self):
        assert sorted(self.first + self.later) == [f"p{n}" for n in range(COUNT)]
        assert is_conserved(self.counts)
        assert self.sampled == self.missing
        assert self.counts.tokens.wasted_total == 0


def missing_turns(runs):
    """Return the number of turns that are not on disk, of groups that are not finished."""
    if "ledger.db" not in runs.disk.names():  # to connect would make an empty one
        return COUNT * PER_GROUP
    runs.disk.lock()
    db = runs.disk.connect()
    try:
        if not list(db.execute("SELECT name FROM sqlite_schema")):
            return COUNT * PER_GROUP
        count = lambda query: next(db.execute(f"SELECT count(*) FROM {query}"))[0]
        waiting, pulled = count("groups WHERE state = 'waiting'"), count("groups")
        acked = next(db.execute("SELECT coalesce(max(value), 0) FROM meta WHERE key = 'acked'"))[0]
        kept, turns = count("samples"), count("turns")
    finally:
        db.close()
        runs.disk.unlock()
    return (waiting + COUNT - pulled - acked) * PER_GROUP - kept * TURNS - turns


async def consume(engine, delivered):
    while True:
        try:
            batch = await engine.next_batch(1)
        except EndOfData:
            return
        await batch.ack()
        delivered.extend(group.prompt.id for group in batch.groups)


async def second_life(arm, runs, lives):
    lives.missing, servers = missing_turns(runs), FakeServers()
    async with runs.open(invariants=arm.invariants, generate=Agent(turns=TURNS), servers=servers, **OPTIONS) as w:
        lives.later.extend(group.prompt.id for group in await take_all(w.engine))
        lives.counts = w.engine.statistics()
    lives.sampled = servers.calls
    return lives


@pytest.mark.parametrize("variant", ["happy", "lost servers", "windows"])
def test_a_run_cancelled_at_any_step_is_taken_up_turn_by_turn(variant):
    async def scenario(arm):
        runs, lives = Runs(count=COUNT), arm.keep(Lives())
        servers = FakeServers(plan=losing([])) if variant == "lost servers" else FakeServers()
        with trio.CancelScope() as scope:
            arm(scope)
            options = {"generate": Agent(turns=TURNS), "servers": servers, "invariants": arm.invariants, **OPTIONS}
            async with runs.open(**options) as w, trio.open_nursery() as nursery:
                if variant == "windows":
                    nursery.start_soon(update, w)
                await consume(w.engine, lives.first)
                nursery.cancel_scope.cancel()
        missing = missing_turns(runs)
        arm.sometimes("a part of a sample was recorded", missing % TURNS)
        return await second_life(arm, runs, lives)

    sweep = cancel_everywhere(scenario, lambda lives, point: lives.check(), sample=80)
    assert not sweep.failures, sweep
    sweep.require("a part of a sample was recorded")


async def update(w):
    for version in range(1, 4):
        await trio.sleep(2.3)
        async with w.engine.weight_update(version=version, mode=PauseMode.ABORT):
            w.servers.set_version(version)


# One task of a rollout that is cancelled, and no other.


def test_a_turn_cancelled_at_any_step_is_given_back_whole_or_sampled():
    """User code gives up a turn, at any step of its replay or its sampling, and asks again."""

    async def scenario(arm):
        state = arm.keep(State(FakeServers(), Kept(1)))
        texts = []

        async def generate(prompt, rollout):
            turns = []
            for number in range(TURNS):
                turn = None
                if rollout.attempt == 2:
                    with trio.CancelScope() as scope:
                        if number == 0:
                            arm(scope)
                        turn = await rollout.generate([1, number])
                turns.append(turn or await rollout.generate([1, number]))
                if rollout.attempt == 1 and number == 1:
                    raise InfrastructureError("sandbox")
            texts.append([turn.text for turn in turns])
            return rollout.finish(turns)

        async with world(
            source=state.source,
            servers=state.servers,
            generate=generate,
            invariants=arm.invariants,
            **{**OPTIONS, "samples_per_prompt": 1},
        ) as w:
            state.engine = w.engine
            state.delivered.extend(group.prompt.id for group in await take_all(w.engine))
        assert texts == [["answer 0", "answer 1", "answer 2"]]
        return state

    sweep = cancel_everywhere(scenario, lambda state, point: check_acked(state))
    assert not sweep.failures, sweep


def check_acked(state):
    counts = state.engine.statistics()
    assert is_conserved(counts), counts
    assert (counts.acked, counts.tokens.in_flight, counts.tokens.kept) == (1, 0, 0)
    assert state.servers.running == 0


@pytest.mark.parametrize("exc", [InfrastructureError, ValueError])
def test_user_code_raising_at_any_await_keeps_its_turns_or_drops_them(exc):
    """Infrastructure loses no turn that was finished; an error of user code begins anew."""

    async def scenario(faults):
        state = faults.keep(State(FakeServers(), Kept(COUNT)))

        async def slow_one(trajectory):
            await trio.sleep(0.5)
            return await one(trajectory)

        async with world(
            source=state.source,
            servers=state.servers,
            generate=faults(Agent(turns=TURNS)),
            reward=slow_one,
            invariants=faults.invariants,
            **OPTIONS,
        ) as w:
            state.engine = w.engine
            state.delivered.extend(group.prompt.id for group in await take_all(w.engine, 1))
        return state

    def check(state, point):
        counts = state.engine.statistics()
        assert is_conserved(counts), counts
        assert (counts.acked, len(state.delivered)) == (COUNT, COUNT)
        if exc is InfrastructureError or point is None:
            # a turn that raised in place of its answer is sampled again; none that was finished is
            assert COUNT * PER_GROUP <= state.servers.calls <= COUNT * PER_GROUP + 1
        wasted = {cause for cause, tokens in counts.tokens.wasted.items() if tokens}
        assert wasted <= ({Cause.INFRASTRUCTURE} if exc is InfrastructureError else {Cause.ERROR})

    sweep = throw_everywhere(scenario, check, exc=exc, sample=120)
    assert not sweep.failures, sweep


# The recorder.


@attrs.define(eq=False)
class Failing:
    """A ledger whose write of this number fails, and every one after it."""

    number: int
    writes: int = 0

    async def begin(self, identity):
        await trio.lowlevel.checkpoint()
        return Recovered()

    async def record(self, events):
        await trio.lowlevel.checkpoint()
        self.writes += 1
        if self.writes >= self.number:
            raise LedgerError("the disk is full")


@pytest.mark.parametrize("number", range(2, 9))
async def test_a_ledger_that_breaks_while_turns_are_recorded_stops_the_engine_and_says_so(number):
    with pytest.raises(LedgerError, match="the disk is full"):
        async with world(COUNT, generate=Agent(turns=TURNS), ledger=Failing(number), **OPTIONS) as w:
            await take_all(w.engine)


async def test_a_running_group_waits_for_no_disk():
    """The writes of turns take a minute each; the samples are finished in the time that their turns take."""

    class Slow(Failing):
        async def record(self, events):
            await trio.sleep(60 if self.writes else 0)
            self.writes += 1

    async with world(
        source=Kept(1), generate=Agent(turns=TURNS), ledger=Slow(99), **{**OPTIONS, "samples_per_prompt": 1}
    ) as w:
        await trio.sleep(TURNS + 0.5)
        assert w.engine.statistics().tokens.kept == TURNS * 4
        await take_all(w.engine)


async def test_a_record_has_no_prompt():
    """The prompts of a conversation grow with the square of its turns."""
    noted = []

    class Noting(Failing):
        async def record(self, events):
            noted.extend(events)

    agent = Agent(turns=6)
    async with world(source=Kept(1), generate=agent, ledger=Noting(99), **{**OPTIONS, "samples_per_prompt": 1}) as w:
        await trio.sleep(5.5)
        sizes = [len(event.record.turn.prompt_ids) for event in noted if hasattr(event, "record")]
        assert sizes == [0] * 5
        await take_all(w.engine)
