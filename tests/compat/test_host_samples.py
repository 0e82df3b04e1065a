"""slime and miles: what fails costs one sample of its group, whatever raised it, and is counted as in any other engine."""

import importlib
from contextlib import suppress
from types import SimpleNamespace

import attrs
import httpx
import pytest
import trio

from trio_rollout import EngineSettings, IterableSource, open_rollout_engine
from trio_rollout.errors import EndOfData, InfrastructureError, SandboxLost, ServerLost, ToolError
from trio_rollout.testing import FakeServers, cancel_everywhere, prompts
from trio_rollout_compat import slime
from trio_rollout_compat.slime._engine import HostEngine
from trio_rollout_compat.slime._samples import KEY

from .hosting import DataSource, arguments, importable


@pytest.fixture(params=["slime", "miles"])
def host(request, monkeypatch):
    """The name of each host in turn, importable; its loop ends with the test."""
    with importable(monkeypatch, request.param):
        yield request.param


def train(host, args, source):
    """Call the host's rollout function once; return its answer."""
    if host == "slime":
        return slime.generate_rollout(args, 0, source)
    from trio_rollout_compat.miles import TrioRolloutFn

    types = importlib.import_module("miles.rollout.base_types")
    fn = TrioRolloutFn(types.RolloutFnConstructorInput(args=args, data_source=source))
    return fn(types.RolloutFnTrainInput(rollout_id=0, weight_version=0))


class OneGroup(DataSource):
    """A data source that has nothing more after one group: no other one can be delivered first."""

    asked = 0

    def get_samples(self, count):
        self.asked += 1
        assert self.asked < 15, "the group failed for good"
        return [] if self.taken else super().get_samples(1)


class MyOutage(InfrastructureError):
    """Infrastructure of the user's, by its base class."""


LOST = {
    "sandbox": (SandboxLost("gone"), "infrastructure", 0),
    "tool": (ToolError("no such container"), "infrastructure", 0),
    "class of the user's": (MyOutage("no machine"), "infrastructure", 0),
    "connection": (ConnectionResetError("reset"), "infrastructure", 0),
    "client": (httpx.ConnectError("refused"), "infrastructure", 0),
    "group": (ExceptionGroup("two", [SandboxLost("a"), ConnectionError("b")]), "infrastructure", 0),
    "named class": ("NoSandbox", "infrastructure", 0),
    "server": (ServerLost("gone"), "server_lost", 0),
    "aborted by the host": (None, "server_lost", 3),
    "user code": (ValueError("no such tool"), "error", 0),
}


@pytest.mark.parametrize("what", list(LOST))
def test_f102_a_failure_costs_one_sample_of_eight(what, host, seen, server, caplog):
    lost, cause, wasted = LOST[what]
    if isinstance(lost, str):
        lost = getattr(importlib.import_module("user_functions"), lost)("no daemon")
    args = arguments(
        server,
        rollout_batch_size=1,
        n_samples_per_prompt=8,
        custom_rm_path=None,
        custom_generate_function_path="user_functions.loses_a_sandbox",
        rollout_infrastructure=["user_functions.NoSandbox"],
        lost=lost,
    )
    output = train(host, args, OneGroup(8, host))
    (group,) = output.samples
    assert [sample.index for sample in group] == list(range(8))
    assert sorted(index for index in seen if index < 8) == [0, 1, 2, 3, 3, 4, 5, 6, 7]
    figures = {name.removeprefix("rollout/fully_async/"): count for name, count in output.metrics.items() if count}
    expected = {f"retried_{cause}": 1} | ({f"wasted_tokens_{cause}": wasted} if wasted else {})
    assert {name: count for name, count in figures.items() if name.startswith(("re", "wasted"))} == expected
    assert "quarantined" not in figures


async def training_calls(arm):
    """The first call is cancelled before one of its steps; the others take the rest."""

    async def generate(prompt, rollout):
        made = rollout.finish([await rollout.generate(rollout.input)])
        return attrs.evolve(made, metadata={KEY: SimpleNamespace(index=int(prompt.id[1:]))})

    async def train():
        groups, _ = await HostEngine(engine, functions).train()
        taken.extend(one.index for group in groups for one in group)

    taken, functions = [], SimpleNamespace(args=SimpleNamespace(rollout_batch_size=1), dropped={})
    settings = EngineSettings(samples_per_prompt=1, max_running=2)
    source = IterableSource(prompts(4))
    async with open_rollout_engine(source, generate, servers=FakeServers(), settings=settings) as engine:
        with trio.CancelScope() as scope:
            arm(scope)
            await train()
        with suppress(EndOfData):
            while True:
                await train()
    return taken


def test_a_training_call_that_is_cancelled_before_any_step_has_taken_nothing():
    sweep = cancel_everywhere(training_calls, lambda taken, _: sorted(taken) == [0, 1, 2, 3])
    sweep.require()
