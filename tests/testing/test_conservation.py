"""The conservation that a SimWorld checks: each kind of loss, made on purpose, stops the run (P1, P11)."""

import pytest
import trio

from trio_rollout import Cause, EngineSettings, IterableSource, SamplingParams, SingleTurn
from trio_rollout._core.lifecycle import State
from trio_rollout.testing import HANG, FakeServers, InvariantBroken, Say, SimWorld, prompts


def lose_a_group(state, entry):
    state.book.pulled += 1


def lose_a_slot(state, entry):
    state.slots.in_use -= 1


def forget_a_finished_sample(state, entry):
    (row,) = entry.samples.kept()
    state.tally.drop(Cause.ERROR, entry.samples[row.index].tokens)
    entry.samples.drop(row.index)


def lose_kept_tokens(state, entry):
    state.tally.drop(Cause.ERROR, 1)


def count_tokens_twice(state, entry):
    state.tally.keep(1)


def start_a_sample_without_its_group(state, entry):
    waiting = next(state.book.entries(State.WAITING))
    waiting.samples.start(0)


BREAKS = {
    lose_a_group: "in no state or in two",
    lose_a_slot: "tries are under way in",
    forget_a_finished_sample: "finished samples .* are missing again",
    lose_kept_tokens: "tokens are kept",
    count_tokens_twice: "tokens are kept",
    start_a_sample_without_its_group: "is waiting and has samples under way",
}


@pytest.mark.parametrize("broken", [None, *BREAKS], ids=lambda broken: getattr(broken, "__name__", "nothing"))
def test_each_kind_of_loss_stops_the_run(broken):
    async def scenario(world):
        servers = FakeServers(plan=lambda number, _: Say(tokens=4, seconds=1) if number == 0 else HANG)
        async with world.open_engine(
            IterableSource(prompts(3)),
            SingleTurn(SamplingParams(max_new_tokens=4)),
            servers=servers,
            settings=EngineSettings(samples_per_prompt=2, max_running=2),
        ) as engine:
            await trio.sleep(10)  # the first group has one finished sample; the second waits
            (entry,) = engine._state.book.entries(State.RUNNING)
            if broken is not None:
                broken(engine._state, entry)
            await trio.sleep(1)

    if broken is None:
        SimWorld(seed=0).run(scenario)
    else:
        with pytest.raises(InvariantBroken, match=BREAKS[broken]):
            SimWorld(seed=0).run(scenario)
