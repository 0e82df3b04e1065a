"""Servers that take no requests: clocks stand still, no attempt is used up, and there is one layer of retries."""

import pytest
import trio

from trio_rollout import Deadlines, EngineSettings, IterableSource, Retry, SamplingParams, SingleTurn, Status
from trio_rollout.errors import GenerateError
from trio_rollout.sglang import ServerSettings
from trio_rollout.testing import FakeSGLang, Fault, Reply, Run, SimWorld, prompts

from .conftest import take_all, world

URL = "http://a:1"
BUSY = Reply(status=503, headers={"retry-after": "20"})
TIGHT = [Deadlines(no_progress=10, turn=600), Deadlines(turn=15)]


def simulated(scenario, plan=None, *, count=8, servers=None, **settings):
    """Run a scenario on an engine over one fake server."""

    async def whole(sim):
        fake = FakeSGLang(plan=plan) if plan else FakeSGLang()
        sim.net.add_host(URL, fake.serve, restarted=fake.kill)
        async with (
            sim.open_servers([URL], settings=servers) as opened,
            sim.open_engine(
                IterableSource(prompts(count)),
                SingleTurn(SamplingParams(max_new_tokens=8)),
                servers=opened,
                settings=EngineSettings(**{"samples_per_prompt": 2, "max_running": 8, **settings}),
            ) as engine,
        ):
            return await scenario(engine, fake, sim)

    return SimWorld(seed=1).run(whole).value


@pytest.mark.parametrize("deadlines", TIGHT)
def test_a_fleet_that_is_busy_for_minutes_uses_up_no_attempt(deadlines):
    plan = lambda request: BUSY if request.path == "/generate" and trio.current_time() < 120 else None

    async def scenario(engine, fake, sim):
        groups = await take_all(engine)
        return len(groups), {group.attempt for group in groups}

    assert simulated(scenario, plan, deadlines=deadlines) == (8, {1})


@pytest.mark.parametrize("deadlines", TIGHT)
def test_a_fleet_that_is_away_for_minutes_uses_up_no_attempt(deadlines):
    async def scenario(engine, fake, sim):
        sim.net.host(URL).kill()
        await trio.sleep(120)
        sim.net.host(URL).start()
        return len(await take_all(engine)), engine.statistics().quarantined

    assert simulated(scenario, deadlines=deadlines) == (8, 0)


@pytest.mark.parametrize("partial", [False, True])
def test_a_server_that_resets_everything_is_asked_max_free_times_in_all(partial):
    plan = lambda request: Fault.RESET if request.path == "/generate" else None

    async def scenario(engine, fake, sim):
        assert await take_all(engine) == []
        return len(fake.generates), trio.current_time()

    retry = Retry(max_free=10)
    asked, seconds = simulated(scenario, plan, count=1, samples_per_prompt=1, partial=partial, retry=retry)
    assert asked == 11
    assert seconds > 10  # not in a hot loop


def test_a_turn_that_is_interrupted_when_its_context_is_full_is_over():
    """No token is left to sample: the policy reached its length, and the input is not bad."""
    first = []

    def plan(request):
        if request.path != "/generate" or first:
            return None
        first.append(request)
        return Run(partial=7)

    async def scenario(engine, fake, sim):
        await trio.sleep(1)
        fake.abort("", everything=True)
        (group,) = await take_all(engine)
        return [(row.status, row.segments[0].response_length) for row in group.trajectories]

    settings = ServerSettings(vocab_size=10**6, context_length=len(prompts(1)[0].input_ids) + 7)
    found = simulated(scenario, plan, count=1, samples_per_prompt=1, partial=True, servers=settings)
    assert found == [(Status.TRUNCATED, 7)]


async def test_a_rollout_that_is_over_can_start_nothing():
    """Nothing would end a tool or a session that is started through a handle that was kept."""
    kept = []

    async def generate(prompt, rollout):
        kept.append(rollout)
        return rollout.finish([await rollout.generate(rollout.input)])

    async with world(1, generate=generate) as w:
        await take_all(w.engine)
        calls = w.servers.calls
        with pytest.raises(GenerateError, match="is over"):
            await kept[0].generate([1, 2])
        with pytest.raises(GenerateError, match="is over"):
            _ = kept[0].tools
        with pytest.raises(GenerateError, match="is over"):
            kept[0].session()
        assert w.servers.calls == calls
