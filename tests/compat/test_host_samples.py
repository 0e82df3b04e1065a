"""slime and miles: what fails costs one sample of its group, whatever raised it, and is counted as in any other engine."""

import importlib

import httpx
import pytest

from trio_rollout.errors import InfrastructureError, SandboxLost, ServerLost, ToolError
from trio_rollout_compat import slime

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
