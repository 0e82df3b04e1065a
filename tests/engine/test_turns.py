"""With ``Resume.TURNS`` a sample that begins anew gets its finished turns back, until the first request that differs."""

from contextlib import suppress

import attrs
import numpy as np
import pytest
import trio

from trio_rollout import (
    Cause,
    Discard,
    Drop,
    IterableSource,
    Keep,
    PauseMode,
    Resume,
    Retry,
    SamplingParams,
    Staleness,
    open_ledger,
)
from trio_rollout._core.ledger_events import TurnRecorded, TurnsDropped
from trio_rollout.errors import (
    ContextFull,
    InfrastructureError,
    RequestRejected,
    ServerError,
    ServerLost,
    SettingsError,
)
from trio_rollout.ledger import read_ledger
from trio_rollout.testing import HANG, Fail, FakeServers, Say, prompts
from trio_rollout.testing._sim.world import SimIO

from .conftest import settings, take_all, world
from .test_restarts import Killed, Runs
from .test_sample_records import Noted

TURNS = {"resume": Resume.TURNS, "samples_per_prompt": 1, "retry": Retry(backoff_base=0)}


@attrs.define(eq=False)
class Agent:
    """A generate function of so many turns; each goes on from the one before. ``notes`` has what it saw, by the try."""

    turns: int = 4
    after: object = None
    """Called with the rollout and the number of the turn after each turn."""
    notes: dict = attrs.field(factory=dict)
    replaying: dict = attrs.field(factory=dict)

    async def __call__(self, prompt, rollout):
        seen = self.notes.setdefault((prompt.id, rollout.index, rollout.attempt), [])
        flags = self.replaying.setdefault((prompt.id, rollout.index, rollout.attempt), [rollout.replaying])
        ids = np.asarray(rollout.input)
        for number in range(self.turns):
            turn = await rollout.generate(ids, SamplingParams(max_new_tokens=8))
            seen.append(turn)
            flags.append(rollout.replaying)
            if self.after is not None:
                await self.after(rollout, number)
            ids = np.concatenate([turn.prompt_ids, turn.output_ids, [7]])
        return rollout.finish(seen)

    def tries(self):
        """Return the texts of the turns that each try got."""
        return [[turn.text for turn in seen] for seen in self.notes.values()]


def nth(number, behaviour, usual=Say()):  # noqa: B008  frozen
    """Return a plan in which only the call of this number behaves so."""
    return lambda call, _: behaviour if call == number else usual


LOST = Fail(ServerLost("reset"), 0.5)


async def test_a_sample_whose_server_was_lost_samples_only_what_was_not_finished():
    agent = Agent()
    async with world(1, generate=agent, plan=nth(2, LOST), **TURNS) as w:
        (group,) = await take_all(w.engine)
        assert w.servers.calls == 5
    first, second = agent.notes.values()
    assert second[:2] == first
    assert [turn.text for turn in second] == ["answer 0", "answer 1", "answer 3", "answer 4"]
    assert group.trajectories[0].turns == 4
    assert np.array_equal(group.trajectories[0].segments[0].loss_mask, ([1] * 4 + [0]) * 3 + [1] * 4)


async def test_by_default_it_samples_every_turn_again():
    agent = Agent()
    async with world(1, generate=agent, plan=nth(2, LOST), **{**TURNS, "resume": Resume.SAMPLES}) as w:
        await take_all(w.engine)
        assert w.servers.calls == 7
    assert agent.replaying.popitem()[1] == [False] * 5
    assert settings().resume is Resume.SAMPLES


@pytest.mark.parametrize("resume", ["turns", None, True])
def test_another_value_of_the_setting_is_refused(resume):
    with pytest.raises(SettingsError, match=rf"EngineSettings.resume: got {resume!r}, allowed: Resume.SAMPLES, Resume"):
        settings(resume=resume)


async def once(rollout, number, what):
    if rollout.attempt == 1 and number == 1:
        await what()


def fails_with(error):
    async def after(rollout, number):
        if rollout.attempt == 1 and number == 1:
            raise error

    return after


async def hangs(rollout, number):
    if rollout.attempt == 1 and number == 1:
        await trio.sleep_forever()


INTERRUPTED = {
    "server lost": (Cause.SERVER_LOST, {"plan": nth(2, LOST)}),
    "infrastructure": (Cause.INFRASTRUCTURE, {"after": fails_with(InfrastructureError("sandbox"))}),
    "a class that Retry names": (Cause.INFRASTRUCTURE, {"after": fails_with(ConnectionResetError("judge"))}),
    "turn": (Cause.DEADLINE, {"plan": nth(2, HANG), "deadlines": {"turn": 5}}),
    "rollout": (Cause.DEADLINE, {"after": hangs, "deadlines": {"rollout": 5}}),
    "no progress": (Cause.NO_PROGRESS, {"after": hangs, "deadlines": {"no_progress": 5}}),
    "group": (Cause.DEADLINE, {"plan": nth(2, HANG), "deadlines": {"group": 10}}),
}


@pytest.mark.parametrize("kind", INTERRUPTED)
async def test_what_user_code_is_not_to_blame_for_loses_no_finished_turn(kind):
    cause, options = INTERRUPTED[kind]
    options = dict(options)
    agent = Agent(after=options.pop("after", None))
    async with world(1, generate=agent, **TURNS, **options) as w:
        await take_all(w.engine)
        assert w.servers.calls == (5 if "plan" in options else 4)
        counts = w.engine.statistics()
    assert agent.tries()[1][:2] == agent.tries()[0] == ["answer 0", "answer 1"]
    assert counts.retries[cause] + counts.requeues[cause] == 1
    assert counts.tokens.wasted_total == 0
    assert counts.tokens.delivered == counts.generated_tokens == 16


async def test_an_error_of_user_code_begins_anew():
    """The same turns would lead to the same error, and to a quarantined group."""
    agent = Agent(after=fails_with(ValueError("this answer has no JSON in it")))
    async with world(1, generate=agent, **TURNS) as w:
        await take_all(w.engine)
        assert w.servers.calls == 6
        assert w.engine.statistics().tokens.wasted == {Cause.ERROR: 8}
    assert agent.replaying.popitem()[1] == [False] * 5


async def test_replaying_is_true_as_long_as_recorded_turns_are_left():
    agent = Agent()
    async with world(1, generate=agent, plan=nth(2, LOST), **TURNS) as w:
        await take_all(w.engine)
    assert list(agent.replaying.values()) == [[False] * 3, [True, True, False, False, False]]


async def test_side_effects_that_ask_for_replaying_happen_once_a_turn_or_twice_for_the_last():
    effects = []

    async def after(rollout, number):
        if not rollout.replaying:
            effects.append(number)

    async with world(1, generate=Agent(after=after), plan=nth(2, LOST), **TURNS) as w:
        await take_all(w.engine)
    assert effects == [0, 1, 1, 2, 3]


# What may differ in the second request of the second try.
PLAIN = {"sampling": SamplingParams(max_new_tokens=8), "extra": {}}
DIFFERENT = {
    "one id": {"ids": [9, 9, 9]},
    "fewer ids": {"ids": [1]},
    "text": {"ids": "text"},
    "more tokens": {"sampling": SamplingParams(max_new_tokens=9)},
    "temperature": {"sampling": SamplingParams(max_new_tokens=8, temperature=0.5)},
    "a stop sequence": {"sampling": SamplingParams(max_new_tokens=8, stop=("\n",))},
    "the sampling's extra": {"sampling": SamplingParams(max_new_tokens=8, extra={"regex": "a"})},
    "an extra field": {"extra": {"lora_path": "b"}},
    "an extra array": {"extra": {"image": np.arange(3)}},
    "an extra that JSON can't express": {"extra": {"image": object()}},
}


@pytest.mark.parametrize("kind", DIFFERENT)
async def test_the_first_request_that_differs_ends_the_replay(kind):
    """The request after it is sampled too, although an earlier try made the same one."""
    flags = []

    async def generate(prompt, rollout):
        turns = []
        for number in range(3):
            asked = {"ids": [1, 2, number], **PLAIN}
            if rollout.attempt == 2 and number == 1:
                asked |= DIFFERENT[kind]
            turns.append(await rollout.generate(asked["ids"], asked["sampling"], extra=asked["extra"]))
            flags.append(rollout.replaying)
        if rollout.attempt == 1:
            raise InfrastructureError("sandbox")
        return rollout.finish(turns)

    async with world(1, generate=generate, **TURNS) as w:
        await take_all(w.engine)
        assert w.servers.calls == 5
        assert w.engine.statistics().tokens.wasted == {Cause.INFRASTRUCTURE: 8}
    assert flags == [False] * 3 + [True, False, False]


@pytest.mark.parametrize("given", [[1, 2], np.array([1, 2]), range(1, 3), "text"])
async def test_a_request_is_the_same_in_any_form_of_its_prompt(given):
    """Ids as a list, an array or a range; a text's ids, which the server found, come back with its turn."""
    seen = []

    async def generate(prompt, rollout):
        turn = await rollout.generate(given, SamplingParams(stop="x"), extra={"b": np.int64(1), "a": (1, b"\0")})
        seen.append(turn)
        if rollout.attempt == 1:
            raise InfrastructureError("sandbox")
        return rollout.finish([turn])

    async with world(1, generate=generate, **TURNS) as w:
        await take_all(w.engine)
        assert w.servers.calls == 1
    assert seen[0] == seen[1]
    assert list(seen[1].prompt_ids) == (list(b"text") if isinstance(given, str) else [1, 2])


@pytest.mark.parametrize("fails", ["refused", "broken", "given up"])
async def test_a_request_that_had_no_answer_does_not_end_the_replay(fails):
    """User code asks, takes the refusal for an answer, and goes on: the second try comes by at the same place."""
    errors = {"refused": RequestRejected("too long"), "broken": ServerError("500")}

    async def generate(prompt, rollout):
        turns = [await rollout.generate([1])]
        with suppress(RequestRejected, ServerError), trio.move_on_after(2):
            turns.append(await rollout.generate([2]))
        turns += [await rollout.generate([number]) for number in (3, 4)]
        if rollout.attempt == 1:
            raise InfrastructureError("sandbox")
        return rollout.finish(turns)

    def plan(call, ids):
        return (Fail(errors[fails], 0.5) if fails in errors else HANG) if ids[0] == 2 else Say()

    async with world(1, generate=generate, plan=plan, **TURNS) as w:
        (group,) = await take_all(w.engine)
        assert w.servers.calls == 4 + 1
        assert w.engine.statistics().tokens.wasted_total == 0
    assert group.trajectories[0].turns == 3


async def test_equal_requests_get_their_answers_in_the_order_in_which_those_were_sampled():
    async def generate(prompt, rollout):
        turns = [await rollout.generate([1, 2]) for _ in range(3)]
        texts.append([turn.text for turn in turns])
        if rollout.attempt == 1:
            raise InfrastructureError("sandbox")
        return rollout.finish(turns)

    texts = []
    async with world(1, generate=generate, **TURNS) as w:
        await take_all(w.engine)
    assert texts == [["answer 0", "answer 1", "answer 2"]] * 2


async def test_streamed_tokens_come_back_at_once():
    streamed = []

    async def generate(prompt, rollout):
        turn = await rollout.generate(
            rollout.input, on_tokens=lambda ids: streamed.append((rollout.attempt, list(ids)))
        )
        if rollout.attempt == 1:
            raise InfrastructureError("sandbox")
        return rollout.finish([turn])

    async with world(1, generate=generate, **TURNS) as w:
        await take_all(w.engine)
    assert [ids for attempt, ids in streamed if attempt == 2] == [[100, 101, 102, 103]]


async def test_a_full_context_is_recorded_like_an_answer():
    """An agent that goes on with a shorter context after it is replayed to its end."""
    full = lambda call, ids: Fail(ContextFull("too long")) if len(ids) == 9 else Say()

    async def generate(prompt, rollout):
        turns = [await rollout.generate(ids) for ids in ([1], [1] * 9, [2])]
        if rollout.attempt == 1:
            raise InfrastructureError("sandbox")
        return rollout.finish(turns)

    async with world(1, generate=generate, plan=full, **TURNS) as w:
        await take_all(w.engine)
        assert w.servers.calls == 3


async def test_an_interrupted_turn_that_went_on_is_recorded_as_a_whole():
    """With ``partial`` a lost server ends no try; the sandbox that fails later does."""
    agent = Agent(after=fails_with(InfrastructureError("sandbox")), turns=2)
    plan = nth(1, Fail(ServerLost("reset"), 1.0))
    async with world(1, generate=agent, plan=plan, partial=True, **TURNS) as w:
        await take_all(w.engine)
        assert w.servers.calls == 3
    first, second = agent.notes.values()
    assert first == second


async def test_a_try_that_only_replays_brings_no_new_token():
    """A sandbox that fails each time ends the sample, however many turns come back."""

    async def after(rollout, number):
        raise InfrastructureError("no sandbox")

    agent = Agent(after=after)
    retry = Retry(max_free=5, backoff_base=0)
    async with world(1, generate=agent, **{**TURNS, "retry": retry}) as w:
        assert await take_all(w.engine) == []
        (report,) = w.engine.quarantined()
        assert (w.servers.calls, report.attempts) == (1, 7)
        assert w.engine.statistics().tokens.wasted == {Cause.INFRASTRUCTURE: 4}


async def test_turns_of_an_evaluation_are_not_recorded():
    ledger = Noted()
    async with world(0, generate=Agent(), plan=nth(2, LOST), ledger=ledger, **TURNS) as w:
        await w.engine.evaluate(IterableSource(prompts(1)))
        assert w.servers.calls == 7
    assert ledger.of(TurnRecorded) == []


# Weights.


async def window(w, version, mode=PauseMode.ABORT):
    async with w.engine.weight_update(version=version, mode=mode):
        w.servers.set_version(version)


async def test_a_window_that_aborts_costs_the_turn_under_way_only():
    """Finished turns keep the version that they were sampled under."""
    agent = Agent()
    async with world(1, generate=agent, **TURNS) as w:
        await trio.sleep(2.5)
        await window(w, 1)
        (group,) = await take_all(w.engine)
        assert w.servers.calls == 5
    assert agent.tries() == [["answer 0", "answer 1"], ["answer 0", "answer 1", "answer 3", "answer 4"]]
    (segment,) = group.trajectories[0].segments
    assert [version for *_, version in segment.versions] == [0, 0, 1, 1]


BOUNDS = {
    "no bound": (Staleness(), 1, 5),
    "within max_versions": (Staleness(max_versions=1), 1, 5),
    "beyond max_versions": (Staleness(max_versions=1), 2, 7),
    "beyond max_versions, discarded": (Staleness(max_versions=0, policy=Discard()), 1, 7),
    "within the spread": (Staleness(spread=1), 1, 5),
    "beyond the spread": (Staleness(spread=0), 1, 7),
}


@pytest.mark.parametrize("kind", BOUNDS)
async def test_turns_that_are_too_old_are_not_given_back(kind):
    staleness, version, calls = BOUNDS[kind]
    agent = Agent()
    async with world(1, generate=agent, staleness=staleness, **TURNS) as w:
        await trio.sleep(2.5)
        await window(w, version)
        (group,) = await take_all(w.engine)
        assert w.servers.calls == calls
        wasted = w.engine.statistics().tokens.wasted
    assert wasted.pop(Cause.WEIGHT_UPDATE) == 2, "of the turn that the window aborted"
    assert wasted == ({} if calls == 5 else {Cause.STALE: 8})
    assert agent.replaying.popitem()[1][1] == (calls == 5)
    assert group.oldest_version == (0 if calls == 5 else version)


async def test_a_replay_waits_for_the_gate_and_ends_if_its_turns_grew_too_old_meanwhile():
    """The second try begins inside the window. Given back there, the turns would make a sample that is too old at its end."""

    async def after(rollout, number):
        if rollout.attempt == 1 and number == 1:
            await trio.sleep(0.5)
            raise InfrastructureError("sandbox")

    async with world(1, generate=Agent(after=after), staleness=Staleness(spread=0), **TURNS) as w:
        await trio.sleep(2.2)
        async with w.engine.weight_update(version=1, mode=PauseMode.RETRACT):
            await trio.sleep(5)
            w.servers.set_version(1)
        (group,) = await take_all(w.engine)
        assert w.servers.calls == 2 + 4
        assert w.engine.statistics().tokens.wasted == {Cause.STALE: 8}
    assert (group.oldest_version, group.newest_version) == (1, 1)


async def test_a_turn_that_came_after_its_try_had_ended_is_not_recorded():
    """User code kept the call in a nursery around it; its answer comes while the next try is under way."""

    async def generate(prompt, rollout):
        if rollout.attempt == 1:
            outer.start_soon(rollout.generate, [1])
            await trio.sleep(0.5)
            raise InfrastructureError("sandbox")
        turns = [await rollout.generate([number]) for number in (3, 2, 1)]
        if rollout.attempt == 2:
            raise InfrastructureError("sandbox")
        assert not rollout.replaying
        return rollout.finish(turns)

    async with trio.open_nursery() as outer, world(1, generate=generate, **TURNS) as w:
        await take_all(w.engine)
        assert w.servers.calls == 1 + 3
        assert w.engine.statistics().tokens.wasted == {Cause.INFRASTRUCTURE: 4}


# Several conversations at once.


async def test_a_conversation_that_was_interrupted_does_not_end_the_replay_of_another():
    """Both begin again at once. The one whose turn was under way asks for it before the other has got all of its turns back."""

    async def generate(prompt, rollout):
        turns = []

        async def talk(first, count):
            ids = np.array([first])
            for _ in range(count):
                turn = await rollout.generate(ids)
                turns.append(turn)
                ids = np.concatenate([turn.prompt_ids, turn.output_ids])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(talk, 1, 1)
            nursery.start_soon(talk, 2, 5)
        return rollout.finish(turns)

    def plan(call, ids):
        if len(ids) == 1 and ids[0] == 1:
            return Say(seconds=60)
        return LOST if call == 4 else Say()

    async with world(1, generate=generate, plan=plan, **TURNS) as w:
        await take_all(w.engine)
        # 1 + 3 answers and a lost one; then the interrupted conversation, the lost turn and the last one
        assert w.servers.calls == 5 + 3
        assert w.engine.statistics().tokens.wasted_total == 0


async def test_conversations_in_another_order_get_their_own_turns_back():
    async def generate(prompt, rollout):
        answers = {}

        async def ask(first):
            await trio.sleep(first if rollout.attempt == 1 else 10 - first)
            answers[first] = (await rollout.generate([first])).text

        async with trio.open_nursery() as nursery:
            for first in range(4):
                nursery.start_soon(ask, first)
        tries.append(answers)
        if rollout.attempt == 1:
            raise InfrastructureError("sandbox")
        return rollout.finish([await rollout.generate([9])])

    tries = []
    async with world(1, generate=generate, **TURNS) as w:
        await take_all(w.engine)
        assert w.servers.calls == 5
    assert tries[0] == tries[1]


# Over the end of the process.


async def test_the_next_life_samples_only_the_turns_that_were_not_finished():
    """The recorded turns come back equal, in every field."""
    runs, agents, servers = Runs(count=2), [Agent(), Agent()], FakeServers()
    with suppress(Killed):
        async with runs.open(generate=agents[0], servers=servers, **TURNS):
            await trio.sleep(2.5)
            raise Killed
    assert servers.calls == 6
    async with runs.open(generate=agents[1], servers=servers, **TURNS) as w:
        assert w.engine.statistics().tokens.kept == 16
        groups = await take_all(w.engine)
        assert servers.calls == 6 + 4
        counts = w.engine.statistics()
    for (prompt, index, _), turns in agents[0].notes.items():
        assert agents[1].notes[prompt, index, 2][:2] == turns
        assert len(turns) == 2
    assert sorted(agents[1].replaying.values()) == [[True, True, False, False, False]] * 2
    assert sum(group.trajectories[0].turns for group in groups) == 8
    assert (counts.generated_tokens, counts.tokens.delivered, counts.tokens.wasted_total) == (16, 32, 0)


async def test_versions_stay_as_recorded_over_a_restart_and_their_bound_too():
    for bound, calls in ((1, 2), (0, 4)):
        runs, servers = Runs(count=1), FakeServers()
        with suppress(Killed):
            async with runs.open(generate=Agent(), servers=servers, **TURNS):
                await trio.sleep(2.5)
                raise Killed
        before = servers.calls
        servers.set_version(1)
        agent = Agent()
        staleness = Staleness(max_versions=bound, policy=Discard())
        async with runs.open(generate=agent, servers=servers, staleness=staleness, **TURNS) as w:
            await w.engine.note_weight_version(1)
            (group,) = await take_all(w.engine)
        assert servers.calls - before == calls
        assert group.oldest_version == 1 - bound


async def test_a_life_without_the_setting_ignores_the_turns_of_the_one_before():
    """And so is the way out where a turn, given back, ends the process each time."""
    runs, servers = Runs(count=1), FakeServers()
    with suppress(Killed):
        async with runs.open(generate=Agent(), servers=servers, **TURNS):
            await trio.sleep(2.5)
            raise Killed
    before, agent = servers.calls, Agent()
    async with runs.open(generate=agent, servers=servers, **{**TURNS, "resume": Resume.SAMPLES}) as w:
        await take_all(w.engine)
        counts = w.engine.statistics()
    assert servers.calls - before == 4
    assert agent.replaying.popitem()[1] == [False] * 5
    assert counts.tokens.delivered == 16


async def test_only_the_sample_that_is_missing_gets_turns_back():
    """Its finished sibling is a sample of the ledger, and has no turns there."""
    runs, servers = Runs(count=1), FakeServers()
    plan = lambda call, _: HANG if call == 5 else Say()
    servers.plan = plan
    options = {**TURNS, "samples_per_prompt": 2}
    with suppress(Killed):
        async with runs.open(generate=Agent(turns=3), servers=servers, **options):
            await trio.sleep(6)
            raise Killed
    async with runs.open(generate=Agent(turns=3), servers=servers, **options) as w:
        await take_all(w.engine)
        assert servers.calls == 6 + 1


async def test_the_turns_of_a_sample_whose_tries_were_used_up_are_not_recovered():
    plan = lambda call, ids: Say() if len(ids) == 3 else HANG
    runs = Runs(count=1)
    options = {**TURNS, "samples_per_prompt": 2, "min_samples": 1, "retry": Retry(max_attempts=1, backoff_base=0)}

    async def generate(prompt, rollout):
        turns = [await rollout.generate(rollout.input)]
        if rollout.index == 0:
            await trio.sleep(5)
        turns.append(await rollout.generate([1] * 4))
        return rollout.finish(turns)

    with suppress(Killed):
        async with runs.open(generate=generate, plan=plan, deadlines={"rollout": 4}, **options):
            await trio.sleep(4.5)
            raise Killed
    async with runs.open(generate=generate, plan=plan, deadlines={"rollout": 4}, **options) as w:
        assert w.engine.statistics().tokens.kept == 0
        assert await take_all(w.engine) == []


# The records.


async def test_a_turn_is_written_down_while_its_sample_goes_on():
    ledger = Noted()
    async with world(1, generate=Agent(), ledger=ledger, **TURNS) as w:
        await trio.sleep(2.5)
        assert [event.record.number for event in ledger.of(TurnRecorded)] == [0, 1]
        assert all(not len(event.record.turn.prompt_ids) for event in ledger.of(TurnRecorded))
        await w.engine.drain(grace=0)


async def test_a_turn_just_before_the_end_is_written_down():
    ledger = Noted()
    async with world(1, generate=Agent(), ledger=ledger, **TURNS) as w:
        await trio.sleep(1.05)
        assert ledger.of(TurnRecorded) == []
        await w.engine.drain(grace=0)
        assert len(ledger.of(TurnRecorded)) == 1


async def test_the_turns_of_a_sample_that_is_finished_at_once_are_not_written_down():
    async def after(rollout, number):
        if rollout.index == 1:
            await trio.sleep_forever()

    ledger, quick = Noted(), lambda *_: Say(seconds=0.04)
    options = {**TURNS, "samples_per_prompt": 2}
    async with world(1, generate=Agent(after=after), plan=quick, ledger=ledger, **options) as w:
        await trio.sleep(1)
        assert ledger.kept() == [0]
        assert [(event.index, event.record.number) for event in ledger.of(TurnRecorded)] == [(1, 0)]
        await w.engine.drain(grace=0)


async def test_no_turn_is_written_down_without_the_setting():
    ledger = Noted()
    async with world(1, generate=Agent(), ledger=ledger, **{**TURNS, "resume": Resume.SAMPLES}) as w:
        await take_all(w.engine)
    assert ledger.of(TurnRecorded) == []


async def test_turns_that_will_not_be_given_back_are_deleted():
    """After an error of user code all of them; after a difference those that were left."""
    ledger = Noted()
    async with world(1, generate=Agent(after=fails_with(ValueError("no JSON"))), ledger=ledger, **TURNS) as w:
        await take_all(w.engine)
    assert [event.numbers for event in ledger.of(TurnsDropped)] == [(0, 1)]

    async def generate(prompt, rollout):
        turns = [await rollout.generate([rollout.attempt if number else 0, number]) for number in range(3)]
        if rollout.attempt == 1:
            raise InfrastructureError("sandbox")
        return rollout.finish(turns)

    ledger = Noted()
    async with world(1, generate=generate, ledger=ledger, **TURNS) as w:
        await take_all(w.engine)
    assert [event.numbers for event in ledger.of(TurnsDropped)] == [(1, 2)]


def stored_turns(runs):
    """Return the number of turns on the disk of these runs."""
    runs.disk.lock()
    db = runs.disk.connect()
    try:
        ((count,),) = db.execute("SELECT count(*) FROM turns")
        return count
    finally:
        db.close()
        runs.disk.unlock()


@pytest.mark.parametrize("end", ["kept", "ready", "quarantined", "filtered"])
async def test_the_records_go_with_the_sample_or_its_group(end):
    async def only_kept(rollout, number):
        if rollout.index == 0 and number == 2:
            await trio.sleep_forever()

    async def poisoned(rollout, number):
        if rollout.index == 0 and number == 2:
            raise ValueError("poison")

    async def nothing(group):
        return Drop("drawn") if end == "filtered" else Keep()

    runs = Runs(count=1)
    after = {"kept": only_kept, "quarantined": poisoned}.get(end)
    options = {**TURNS, "samples_per_prompt": 2, "retry": Retry(max_attempts=1), "group_filter": nothing}
    with suppress(Killed):
        async with runs.open(generate=Agent(after=after), **options):
            await trio.sleep(2.5)
            raise Killed
    assert stored_turns(runs) == 4
    with suppress(Killed):
        async with runs.open(generate=Agent(after=after), **options):
            await trio.sleep(10)
            raise Killed
    assert stored_turns(runs) == (3 if end == "kept" else 0)


async def test_a_turn_that_cannot_be_stored_costs_its_record_only():
    """It is still given back in this life; the next one samples from there."""

    class OddServers(FakeServers):
        async def generate(self, *args, **options):
            turn = await FakeServers.generate(self, *args, **options)
            return attrs.evolve(turn, meta_info={"raw": object()}) if turn.text == "answer 1" else turn

    runs, servers, failed = Runs(count=1), OddServers(), []
    agent = Agent(after=fails_with(InfrastructureError("sandbox")), turns=6)
    with suppress(Killed):
        async with runs.open(generate=agent, servers=servers, **TURNS) as w:
            await trio.sleep(4.5)
            failed += w.engine.quarantined()
            raise Killed
    assert (servers.calls, failed) == (5, [])
    assert agent.tries()[1] == ["answer 0", "answer 1", "answer 2", "answer 3"]
    assert stored_turns(runs) == 3
    before, agent = servers.calls, Agent(turns=6)
    async with runs.open(generate=agent, servers=servers, **TURNS) as w:
        await take_all(w.engine)
    assert agent.tries()[0][0] == "answer 0"
    assert servers.calls - before == 5


async def test_the_ledger_counts_the_tokens_of_turns_as_the_engine_does(tmp_path):
    """Recorded turns are kept tokens there too, and those that were dropped are wasted."""

    async def generate(prompt, rollout):
        for number in range(4):
            await rollout.generate([1, number, rollout.attempt if number == 1 else 0])
        raise InfrastructureError("sandbox")

    plan = lambda call, ids: HANG if call == 6 else Say()
    async with (
        open_ledger(tmp_path, io=SimIO()) as ledger,
        world(1, generate=generate, plan=plan, ledger=ledger, **TURNS) as w,
    ):
        await trio.sleep(10)
        await w.engine.drain(grace=0)
        counted = w.engine.statistics().tokens
    with read_ledger(tmp_path) as reader:
        (summary,) = reader.summaries()
        assert reader.tokens() == counted
    assert (counted.kept, counted.wasted) == (12, {Cause.INFRASTRUCTURE: 12})
    assert (summary.kept, summary.turns, summary.tokens) == (0, 3, 12)
