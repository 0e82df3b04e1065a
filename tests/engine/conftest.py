"""Helpers of the engine's tests: one open engine over fake servers, in virtual time."""

import inspect
import random
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import attrs
import pytest

from trio_rollout import Deadlines, EngineSettings, Ports, Retry, SamplingParams, SingleTurn, open_rollout_engine
from trio_rollout.errors import EndOfData, EngineClosed
from trio_rollout.sources import IterableSource
from trio_rollout.testing import FakeServers, is_conserved, prompts, sim_run
from trio_rollout.testing._sim.conservation import Conservation

QUICK = Retry(backoff_base=0.01, backoff_max=0.1)


async def one(trajectory):
    """The reward of tests that are not about rewards."""
    return 1.0


def settings(**changes):
    """Return settings of two samples a prompt, four rollouts at once and quick retries, with the test's changes."""
    deadlines = Deadlines(**changes.pop("deadlines", {}))
    defaults = {"samples_per_prompt": 2, "max_running": 4, "max_ready": 4, "retry": QUICK}
    return EngineSettings(**{**defaults, **changes}, deadlines=deadlines)


@attrs.define
class World:
    engine: object
    servers: FakeServers
    source: object


@asynccontextmanager
async def world(
    count=6, *, plan=None, source=None, servers=None, generate=None, reward=one, invariants=None, **changes
):
    """Open an engine over one fake server and ``count`` prompts; with ``invariants``, conservation is one of them."""
    servers = servers or (FakeServers(plan=plan) if plan else FakeServers())
    source = source or IterableSource(prompts(count))
    arguments = {
        key: changes.pop(key) for key in ("ledger", "group_reward", "group_filter", "instruments") if key in changes
    }
    async with open_rollout_engine(
        source,
        generate or SingleTurn(SamplingParams(max_new_tokens=8)),
        servers=servers,
        reward=reward,
        settings=settings(**changes),
        ports=Ports(random.Random(0)),
        **arguments,
    ) as engine:
        with invariants.hold(Conservation(engine), "conservation") if invariants is not None else nullcontext():
            yield World(engine, servers, source)
    after = engine.statistics()
    assert is_conserved(after), after
    tokens = after.tokens
    counts = (tokens.in_flight, tokens.kept, tokens.delivered, tokens.filtered, tokens.wasted_total)
    assert tokens.in_flight == 0
    assert min(counts) >= 0, tokens
    if "ledger" not in arguments:  # a ledger may remember tokens of an earlier run
        assert sum(counts) == after.generated_tokens, after
    assert servers.running == 0
    assert after.running_rollouts == 0


async def take_all(engine, size=2):
    """Every group that the engine delivers, acked; none if every one was quarantined."""
    groups = []
    with suppress(EndOfData, EngineClosed):
        while True:
            batch = await engine.next_batch(size)
            groups.extend(batch.groups)
            await batch.ack()
    return groups


def _simulated(afn, *, seed, clock=None, instruments=()):
    assert clock is None, "the engine's tests bring a clock of their own"
    return sim_run(afn, seed=seed, instruments=instruments).value


def pytest_collection_modifyitems(items):
    """Run each of these tests in virtual time, under a schedule drawn from its name: a deadlock fails at once."""
    for item in items:
        if item.path.parent == Path(__file__).parent and inspect.iscoroutinefunction(item.obj):
            item.add_marker(pytest.mark.trio(run=partial(_simulated, seed=item.nodeid)), append=False)
