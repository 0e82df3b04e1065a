"""User code can't end a run: what it raises, of any class and in any callback, is that rollout's failure (decision 0019).

Those tests that need real threads, processes or an asyncio loop start a Trio run themselves.
"""

import asyncio
import functools
import threading

import pytest
import trio

from trio_rollout import Cause, Keep, SingleTurn
from trio_rollout.errors import SourceError
from trio_rollout.rewards import in_process, in_thread
from trio_rollout.sources import IterableSource
from trio_rollout.testing import prompts, throw_everywhere
from trio_rollout_compat import asyncio_generate, asyncio_reward, open_bridge

from .conftest import take_all, world


class OutsideOfException(BaseException):
    """An exception of an extension in Rust."""


def exit_quietly(code):
    """Exit as a program of a model does."""
    exec("exit(code)", {"code": code})


RAISERS = {
    "SystemExit": exit_quietly,
    "CancelledError": asyncio.CancelledError,
    "GeneratorExit": GeneratorExit,
    "OutsideOfException": OutsideOfException,
    "KeyboardInterrupt": KeyboardInterrupt,
}
EVERYWHERE_ELSE = tuple(RAISERS)
"""In a thread, a process and an asyncio loop no signal can have brought a KeyboardInterrupt."""
IN_A_TASK = tuple(name for name in RAISERS if name != "KeyboardInterrupt")
BAD = "1"


def fail(name):
    error = RAISERS[name](0)
    raise error


def score(trajectory, *, name):
    """A synchronous scorer that fails for one of the prompts; a process can import it."""
    if trajectory.prompt.label == BAD:
        fail(name)
    return 1.0


async def score_async(trajectory, *, name):
    await trio.lowlevel.checkpoint()
    return score(trajectory, name=name)


def settings_for(where, name):
    """The arguments of an engine whose callback ``where`` fails for one prompt."""

    async def on_group(group):
        if group.prompt.label == BAD:
            fail(name)
        return Keep() if where == "group filter" else [1.0] * len(group.trajectories)

    async def generate(prompt, rollout):
        turn = await rollout.generate(prompt.input_ids)
        if prompt.label == BAD:
            fail(name)
        return rollout.finish([turn])

    if where == "generate":
        return {"generate": generate}
    if where == "reward":
        return {"reward": functools.partial(score_async, name=name)}
    return {"reward": None, where.replace(" ", "_"): on_group}


async def require_one_failed(engine, name):
    """Two of three groups are delivered, and the third is quarantined with the type of its failure."""
    groups = await take_all(engine)
    (report,) = engine.quarantined()
    assert sorted(group.prompt.label for group in groups) == ["0", "2"]
    assert (report.cause, report.error.type) == (Cause.ERROR, name)
    assert engine.statistics().quarantined == 1


@pytest.mark.parametrize("name", IN_A_TASK)
@pytest.mark.parametrize("where", ["generate", "reward", "group reward", "group filter"])
async def test_f101_a_callback_that_raises_any_class_costs_only_its_group(where, name):
    async with world(3, **settings_for(where, name)) as w:
        await require_one_failed(w.engine, name)


@pytest.mark.parametrize("name", EVERYWHERE_ELSE)
@pytest.mark.parametrize("wrap", [in_thread, in_process])
def test_f101_a_synchronous_scorer_that_raises_any_class_costs_only_its_group(wrap, name):
    """A KeyboardInterrupt too: there no signal can have brought it."""

    async def main():
        reward, few = wrap(functools.partial(score, name=name)), {"samples_per_prompt": 1, "max_running": 3}
        async with world(3, reward=reward, **few) as w:
            await require_one_failed(w.engine, name)

    trio.run(main, strict_exception_groups=True)


@pytest.mark.parametrize("name", EVERYWHERE_ELSE)
def test_f101_an_asyncio_reward_that_raises_any_class_costs_only_its_group(name):
    async def reward(trajectory):
        await asyncio.sleep(0)
        return score(trajectory, name=name)

    async def main():
        async with open_bridge() as bridge, world(3, reward=asyncio_reward(reward, bridge=bridge)) as w:
            await require_one_failed(w.engine, name)

    trio.run(main, strict_exception_groups=True)


@pytest.mark.parametrize("where", ["generate", "reward", "group reward", "group filter"])
def test_f101_off_the_main_thread_a_keyboard_interrupt_is_user_codes(where):
    """Python delivers signals to the main thread only."""
    ended = []

    async def main():
        async with world(3, **settings_for(where, "KeyboardInterrupt")) as w:
            await require_one_failed(w.engine, "KeyboardInterrupt")
        ended.append("as told")

    thread = threading.Thread(target=trio.run, args=[main])
    thread.start()
    thread.join(60)
    assert ended == ["as told"]


@pytest.mark.parametrize("name", IN_A_TASK)
def test_f101_an_asyncio_generate_function_that_raises_any_class_costs_only_its_group(name):
    async def generate(prompt, rollout):
        turn = await rollout.generate(prompt.input_ids)
        if prompt.label == BAD:
            fail(name)
        return rollout.finish([turn])

    async def main():
        async with open_bridge() as bridge, world(3, generate=asyncio_generate(generate, bridge=bridge)) as w:
            await require_one_failed(w.engine, name)

    trio.run(main, strict_exception_groups=True)


@pytest.mark.parametrize("name", IN_A_TASK)
async def test_f101_a_nursery_of_user_code_that_mixes_classes_costs_only_its_group(name):
    async def generate(prompt, rollout):
        async def child():
            await trio.lowlevel.checkpoint()
            fail(name)

        turn = await rollout.generate(prompt.input_ids)
        if prompt.label == BAD:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(child)
                raise ValueError("beside it")
        return rollout.finish([turn])

    async with world(3, generate=generate) as w:
        assert len(await take_all(w.engine)) == 2
        (report,) = w.engine.quarantined()
    assert "beside it" in report.error.message


async def test_f101_a_cancelled_that_user_code_kept_costs_only_its_group():
    async def reward(trajectory):
        with trio.CancelScope() as scope:
            scope.cancel()
            try:
                await trio.sleep_forever()
            except trio.Cancelled as error:
                kept = error
                raise
        if trajectory.prompt.label == BAD:
            raise kept
        return 1.0

    async with world(3, reward=reward) as w:
        assert len(await take_all(w.engine)) == 2
        assert len(w.engine.quarantined()) == 1


@pytest.mark.parametrize("name", IN_A_TASK)
async def test_f101_an_instrument_that_raises_any_class_gets_no_more_events(name):
    heard = []

    class Fails:
        def event(self, event):
            heard.append(event)
            fail(name)

    async with world(3, instruments=[Fails()]) as w:
        assert len(await take_all(w.engine)) == 3
    assert len(heard) == 1


class BadSource:
    """A source of which one method fails."""

    def __init__(self, where, name):
        self.where, self.name, self.inner = where, name, IterableSource(prompts(3))

    def _fail_in(self, where):
        if where == self.where:
            fail(self.name)

    async def take(self, count):
        self._fail_in("take")
        return await self.inner.take(count)

    async def give_back(self, given):
        self._fail_in("give_back")
        await self.inner.give_back(given)

    def state(self):
        self._fail_in("state")
        return {}

    def restore(self, state):
        pass


@pytest.mark.parametrize("name", IN_A_TASK)
async def test_f101_a_source_that_raises_any_class_is_the_engines_failure(name):
    with pytest.raises(SourceError, match=f"the source failed: {name}: ") as caught:
        async with world(source=BadSource("take", name)) as w:
            await w.engine.next_batch(1)
    assert type(caught.value.__cause__).__name__ == name


@pytest.mark.parametrize("name", IN_A_TASK)
async def test_f101_a_source_that_raises_any_class_when_prompts_go_back_is_the_engines_failure(name):
    async def generate(prompt, rollout):
        await trio.sleep_forever()

    with pytest.raises(SourceError, match=f"the source failed: {name}: "):
        async with world(source=BadSource("give_back", name), generate=generate) as w:
            await trio.sleep(1)
            await w.engine.drain(0)


@pytest.mark.parametrize("name", IN_A_TASK)
async def test_f101_the_source_of_an_evaluation_may_raise_any_class(name):
    """The caller gets it as itself, and the engine goes on."""
    async with world(3) as w:
        with pytest.raises(BaseException, match=r"^0$") as caught:
            await w.engine.evaluate(BadSource("take", name))
        assert type(caught.value).__name__ == name
        assert len(await take_all(w.engine)) == 3


@pytest.mark.parametrize("exc", [SystemExit, OutsideOfException, asyncio.CancelledError, GeneratorExit])
def test_f101_any_class_at_any_await_of_a_callback_costs_only_its_sample(exc):
    """Every prompt is delivered: what failed once is tried again."""

    async def scenario(faults):
        async def reward(trajectory):
            await trio.sleep(0.1)
            return 1.0

        async def group_reward(group):
            await trio.lowlevel.checkpoint()
            return [row.reward for row in group.trajectories]

        async def group_filter(group):
            await trio.sleep(0.1)
            return Keep()

        single = SingleTurn()

        async def generate(prompt, rollout):
            return await single(prompt, rollout)

        async with world(
            2,
            generate=faults(generate),
            reward=faults(reward),
            group_reward=faults(group_reward),
            group_filter=faults(group_filter),
        ) as w:
            return await take_all(w.engine)

    def check(groups, point):
        assert len(groups) == 2, point

    throw_everywhere(scenario, check, exc=exc).require()
