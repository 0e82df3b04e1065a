"""Asyncio generate functions and scorers in the engine: deadlines, aborts, requeues and drains hold for them."""

import asyncio
import contextlib

import attrs
import pytest
import trio

from trio_rollout import (
    Cause,
    Deadlines,
    Drop,
    EngineSettings,
    IterableSource,
    Keep,
    PauseMode,
    Resume,
    Retry,
    SamplingParams,
    open_rollout_engine,
)
from trio_rollout.errors import InfrastructureError, RequestRejected, SandboxLost, ServerLost
from trio_rollout.testing import HANG, Fail, FakeServers, Say, prompts
from trio_rollout_compat import BridgeSettings, asyncio_generate, asyncio_reward, open_bridge
from trio_rollout_compat.bridge import AsyncioCancelled, AsyncioExit, Misuse, Portal
from trio_rollout_compat.bridge._backends import RunningLoop

from .handshake import forever


async def two_turns(prompt, rollout):
    first = await rollout.generate(rollout.input)
    await asyncio.sleep(0)
    second = await rollout.generate([*first.prompt_ids, *first.output_ids, 7], SamplingParams(max_new_tokens=2))
    return rollout.finish([first, second])


async def score(trajectory):
    await asyncio.sleep(0)
    return float(trajectory.turns)


def settings(*, attempts=3, **deadlines):
    return EngineSettings(
        samples_per_prompt=2,
        max_running=4,
        retry=Retry(max_attempts=attempts, backoff_base=0.01, backoff_max=0.01),
        deadlines=Deadlines(**deadlines),
    )


async def collect(engine):
    return [group async for batch in engine.batches(2) for group in batch.groups]


def requeues(engine):
    return {cause: count for cause, count in engine.statistics().requeues.items() if count}


async def test_functions_run_through_each_backend(bridge):
    """Prompts in, scored groups out, with every part of it asyncio."""

    async def keep_some(group):
        return Drop("asyncio says so") if group.prompt.id == "p1" else Keep()

    async with open_rollout_engine(
        IterableSource(prompts(4)),
        asyncio_generate(two_turns, bridge=bridge, sampling=SamplingParams(max_new_tokens=3)),
        servers=FakeServers(plan=lambda number, prompt: Say(seconds=0)),
        reward=asyncio_reward(score, bridge=bridge),
        group_filter=asyncio_reward(keep_some, bridge=bridge),
        settings=settings(),
    ) as engine:
        groups = await collect(engine)
        assert engine.statistics().filtered == 1
    assert sorted(group.prompt.id for group in groups) == ["p0", "p2", "p3"]
    for row in (row for group in groups for row in group.trajectories):
        assert row.reward == 2.0
        assert row.segments[0].response_length == 3 + 1 + 2
    assert bridge.statistics().running == 0
    assert not bridge.statistics().misuse


class Outage(InfrastructureError):
    """Infrastructure of the user's, by its base class."""


class Named(Exception):
    """Infrastructure of the user's, named by ``Retry.infrastructure``."""


@pytest.mark.parametrize("where", ["generate", "reward", "in the portal"])
@pytest.mark.parametrize(
    "error",
    [Outage("no machine"), Named("503"), ConnectionResetError("reset"), ServerLost("gone"), SandboxLost("gone")],
    ids=lambda error: type(error).__name__,
)
async def test_f102_infrastructure_stays_that_on_the_way_out_of_asyncio(bridge, where, error):
    """The sample has a single try, and is delivered all the same; the others of its group are sampled once."""
    calls, left = [], [error]

    async def generate(prompt, rollout):
        calls.append(rollout.index)
        turn = await rollout.generate(rollout.input)
        if where == "generate" and rollout.index == 1 and left:
            raise left.pop()
        if where == "in the portal" and rollout.index == 1 and left:
            await rollout.portal.run(raise_in_trio)
        return rollout.finish([turn])

    async def raise_in_trio():
        await trio.lowlevel.checkpoint()
        raise left.pop()

    async def reward(trajectory):
        if where == "reward" and trajectory.index == 1 and left:
            raise left.pop()
        return 1.0

    retry = Retry(max_attempts=1, backoff_base=0.01, backoff_max=0.01, infrastructure=(ConnectionError, Named))
    async with open_rollout_engine(
        IterableSource(prompts(1)),
        asyncio_generate(generate, bridge=bridge),
        servers=FakeServers(plan=lambda number, prompt: Say(seconds=0)),
        reward=asyncio_reward(reward, bridge=bridge),
        settings=EngineSettings(samples_per_prompt=4, max_running=4, retry=retry),
    ) as engine:
        (group,) = await collect(engine)
        retries = {cause: count for cause, count in engine.statistics().retries.items() if count}
    assert not left
    assert len(group.trajectories) == 4
    if where == "reward":
        assert (sorted(calls), retries) == ([0, 1, 2, 3], {})
    else:
        lost = Cause.SERVER_LOST if isinstance(error, ServerLost) else Cause.INFRASTRUCTURE
        assert (sorted(calls), retries) == ([0, 1, 1, 2, 3], {lost: 1})


async def test_a_group_deadline_aborts_the_request_of_an_asyncio_function(autojump_clock):
    """Its own cleanup is awaited, and the request is aborted before the slot is free."""
    log = []
    servers = FakeServers(plan=lambda number, prompt: HANG if number == 0 else Say(seconds=1))

    async def generate(prompt, rollout):
        try:
            return rollout.finish([await rollout.generate(rollout.input)])
        except asyncio.CancelledError:
            log.append(servers.aborts)
            await asyncio.sleep(1)
            log.append("cleaned")
            raise

    async with (
        open_bridge("in-loop") as bridge,
        open_rollout_engine(
            IterableSource(prompts(1)),
            asyncio_generate(generate, bridge=bridge),
            servers=servers,
            settings=settings(group=100),
        ) as engine,
    ):
        assert len(await collect(engine)) == 1
        assert requeues(engine) == {Cause.DEADLINE: 1}
    assert log == [1, "cleaned"]
    assert not bridge.statistics().misuse


async def test_a_hanging_scorer_ends_at_its_deadline_and_is_tried_again(autojump_clock):
    calls = []

    async def hang_once(trajectory):
        calls.append(trajectory.index)
        if len(calls) == 1:
            await forever()
        return 1.0

    async with (
        open_bridge("in-loop") as bridge,
        open_rollout_engine(
            IterableSource(prompts(1)),
            asyncio_generate(two_turns, bridge=bridge),
            servers=FakeServers(),
            reward=asyncio_reward(hang_once, bridge=bridge),
            settings=settings(reward=10),
        ) as engine,
    ):
        (group,) = await collect(engine)
        assert requeues(engine) == {}
    assert len(calls) == 3
    assert group.attempt == 1


async def test_a_request_that_is_refused_reaches_the_function_as_it_is(autojump_clock):
    seen = []

    async def generate(prompt, rollout):
        try:
            await rollout.generate(rollout.input)
        except RequestRejected as error:
            seen.append(error)
        return rollout.finish([await rollout.generate([1])])

    error = RequestRejected("no", status=400)
    async with (
        open_bridge("in-loop") as bridge,
        open_rollout_engine(
            IterableSource(prompts(1)),
            asyncio_generate(generate, bridge=bridge),
            servers=FakeServers(plan=lambda number, prompt: Fail(error) if number == 0 else Say()),
            settings=settings(),
        ) as engine,
    ):
        assert len(await collect(engine)) == 1
    assert seen == [error]


async def test_a_weight_update_restarts_without_using_up_an_attempt(autojump_clock):
    swallowed = []

    async def generate(prompt, rollout):
        try:
            return rollout.finish([await rollout.generate(rollout.input)])
        except Exception as error:  # an interruption is no exception, so this cannot swallow it
            swallowed.append(error)
            raise

    servers = FakeServers(plan=lambda number, prompt: Say(seconds=50))
    async with (
        open_bridge("in-loop") as bridge,
        open_rollout_engine(
            IterableSource(prompts(1)),
            asyncio_generate(generate, bridge=bridge),
            servers=servers,
            settings=settings(),
        ) as engine,
    ):
        await trio.sleep(10)
        async with engine.weight_update(version=1, mode=PauseMode.ABORT):
            servers.set_version(1)
        (group,) = await collect(engine)
        assert engine.statistics().retries[Cause.WEIGHT_UPDATE] == 2
    assert group.oldest_version == 1
    assert not swallowed


async def test_a_function_that_swallows_every_cancellation_keeps_no_slot(autojump_clock, caplog):
    """It is abandoned after the grace; its group is tried again and becomes ready; the report names the function."""
    runs = []

    async def deaf(prompt, rollout):
        runs.append(rollout.index)
        while len(runs) <= 2:
            try:
                await forever()
            except asyncio.CancelledError:
                continue
        return rollout.finish([await rollout.generate(rollout.input)])

    async with (
        open_bridge("in-loop", settings=BridgeSettings(grace=3)) as bridge,
        open_rollout_engine(
            IterableSource(prompts(1)),
            asyncio_generate(deaf, bridge=bridge),
            servers=FakeServers(),
            settings=settings(group=100),
        ) as engine,
    ):
        assert len(await collect(engine)) == 1
        assert engine.statistics().running_rollouts == 0
        ((name, count),) = bridge.statistics().misuse[Misuse.ABANDONED].items()
    assert name.endswith("deaf")
    assert count == 2


async def test_the_deadline_is_on_the_loop_s_clock(bridge):
    seen = []

    async def generate(prompt, rollout):
        seen.append(rollout.deadline - asyncio.get_running_loop().time())
        assert (rollout.attempt, rollout.weight_version) == (1, 0)
        return await two_turns(prompt, rollout)

    async with open_rollout_engine(
        IterableSource(prompts(1)),
        asyncio_generate(generate, bridge=bridge),
        servers=FakeServers(plan=lambda number, prompt: Say(seconds=0)),
        settings=settings(group=1000),
    ) as engine:
        await collect(engine)
    assert all(990 < left <= 1000 for left in seen)


async def test_the_portal_runs_any_trio_function_and_not_for_longer_than_its_call(bridge):
    kept = []

    async def in_trio(number):
        await trio.lowlevel.checkpoint()
        return number + 1

    async def generate(prompt, rollout):
        kept.append(rollout.portal)
        assert await rollout.portal.run(in_trio, 1) == 2
        return await two_turns(prompt, rollout)

    async def use_late():
        await kept[0].run(in_trio, 1)

    async with open_rollout_engine(
        IterableSource(prompts(1)),
        asyncio_generate(generate, bridge=bridge),
        servers=FakeServers(plan=lambda number, prompt: Say(seconds=0)),
        settings=settings(),
    ) as engine:
        await collect(engine)
    with pytest.raises(RuntimeError, match="this portal's call is over"):
        await bridge.call(use_late)


async def cross(bridge, fn):
    """Call an asyncio function with a portal; it must come back."""
    with trio.fail_after(10):
        return await bridge.call_with_portal(fn)


class Odd(BaseException):
    """An exception that no handler expects."""


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (StopIteration(), RuntimeError),
        (asyncio.CancelledError(), AsyncioCancelled),
        (StopAsyncIteration(), StopAsyncIteration),
        (GeneratorExit(), RuntimeError),
        (Odd(), Odd),
        (ExceptionGroup("g", [ValueError()]), ExceptionGroup),
        (SystemExit(1), AsyncioExit),
    ],
)
async def test_what_a_trio_function_raises_is_the_asyncio_code_s(bridge, caplog, error, seen):
    """For any class: nothing hangs, and neither the call nor the engine ends."""

    def in_trio():
        raise error

    async def fn(portal):
        if isinstance(error, SystemExit):
            await portal.run(in_trio)
        try:
            await portal.run(in_trio)
        except BaseException as caught:  # ruff: ignore[blind-except]  of any class
            return caught

    if seen is AsyncioExit:
        with pytest.raises(AsyncioExit):
            await cross(bridge, fn)
    else:
        caught = await cross(bridge, fn)
        assert type(caught) is seen
        assert error in {caught, caught.__cause__}


async def test_the_portal_can_be_used_from_another_loop(bridge):
    """The function runs a loop in another thread, and one of its tasks is cancelled there."""
    log = []

    async def in_trio(number):
        await trio.lowlevel.checkpoint()
        return number + 1

    async def hang():
        try:
            await trio.sleep_forever()
        finally:
            log.append("cleaned")

    async def elsewhere(portal):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await portal.run(hang)
        return await portal.run(in_trio, 1)

    async def fn(portal):
        def work():
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                return runner.run(elsewhere(portal))

        return await asyncio.to_thread(work)

    assert await cross(bridge, fn) == 2
    assert log == ["cleaned"]


async def test_the_portal_is_refused_where_no_loop_runs(bridge):
    async def fn(portal):
        def work():
            with pytest.raises(RuntimeError, match=r"portal.run: .* asyncio code"):
                portal.run(trio.lowlevel.checkpoint).send(None)

        await asyncio.to_thread(work)

    await cross(bridge, fn)


async def test_there_and_back_and_there_again(bridge):
    """Asyncio calls Trio, which calls asyncio, which calls Trio."""

    async def in_asyncio(depth, portal):
        return await portal.run(in_trio, depth - 1) if depth else "bottom"

    async def in_trio(depth):
        async def again(portal):
            return await in_asyncio(depth, portal)

        return await bridge.call_with_portal(again)

    async def fn(portal):
        return await in_asyncio(5, portal)

    assert await cross(bridge, fn) == "bottom"


async def test_an_asyncio_generate_function_has_the_rollouts_tools(bridge):
    """Tools belong to Trio: the function reaches them through its portal, and they end with the rollout."""

    async def generate(prompt, rollout):
        result = await rollout.portal.run(rollout.tools.run_captured, ["echo", "hello"])
        assert result.stdout == b"hello\n"
        return rollout.finish([await rollout.generate(rollout.input)])

    async with open_rollout_engine(
        IterableSource(prompts(1)),
        asyncio_generate(generate, bridge=bridge, sampling=SamplingParams(max_new_tokens=3)),
        servers=FakeServers(plan=lambda number, prompt: Say(seconds=0)),
        settings=settings(attempts=1),
    ) as engine:
        assert len(await collect(engine)) == 1


async def test_a_request_to_a_portal_that_closes_meanwhile_can_be_cancelled():
    """The refusal and the cancellation cross: the asking task ends, and does not wait for a function that never ran."""

    async def ask():
        posted = []
        running = RunningLoop(
            loop=asyncio.get_running_loop(),
            post=posted.append,
            reply=posted.append,
            prepare=lambda context: None,
            foreign=True,
            describe="a loop",
        )
        portal = Portal(running, object())
        task = asyncio.create_task(portal.run(trio.lowlevel.checkpoint))
        await asyncio.sleep(0)
        portal.close()
        task.cancel()
        await asyncio.sleep(0)  # it waits for the end of the function now
        for fn in posted:
            fn()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)

    await trio.to_thread.run_sync(asyncio.run, ask())


async def test_recorded_turns_come_back_to_an_asyncio_function(bridge):
    flags = []

    async def generate(prompt, rollout):
        flags.append(rollout.replaying)
        first = await rollout.generate(rollout.input)
        flags.append(rollout.replaying)
        if rollout.attempt == 1:
            raise InfrastructureError("sandbox")
        return rollout.finish([first])

    servers = FakeServers(plan=lambda number, prompt: Say(seconds=0))
    async with open_rollout_engine(
        IterableSource(prompts(1)),
        asyncio_generate(generate, bridge=bridge),
        servers=servers,
        settings=attrs.evolve(settings(), samples_per_prompt=1, resume=Resume.TURNS),
    ) as engine:
        await collect(engine)
    assert servers.calls == 1
    assert flags == [False, False, True, False]
