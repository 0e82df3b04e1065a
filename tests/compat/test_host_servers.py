"""Implementations of the two protocols of servers: signatures agree, and a host's servers pass everything on."""

import inspect

import pytest

from trio_rollout import Deadlines, PauseMode, Prompt, SamplingParams, SGLangServers
from trio_rollout.abc import InferenceServers, ServerControl
from trio_rollout.testing import FakeServers
from trio_rollout_compat._host_servers import HostServers
from trio_rollout_compat._leasing._service import NoServers

PROMPT = Prompt(id="a", input_ids=[1, 2, 3])


def methods(protocol):
    return {name: item for name, item in vars(protocol).items() if inspect.isfunction(item) and name[0] != "_"}


def arguments(function):
    """Names and kinds; defaults may be other values that mean the same."""
    return [(item.name, item.kind) for item in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(
    ("owner", "protocols"),
    [
        (SGLangServers, [InferenceServers, ServerControl]),
        (FakeServers, [InferenceServers, ServerControl]),
        (HostServers, [InferenceServers]),
    ],
)
def test_an_implementation_has_every_method_with_the_same_arguments(owner, protocols):
    wanted = {name: arguments(item) for protocol in protocols for name, item in methods(protocol).items()}
    assert {name: arguments(getattr(owner, name)) for name in wanted} == wanted


async def test_a_hosts_servers_pass_everything_on_except_the_required_version():
    fake = FakeServers(version=7)
    servers = HostServers(fake).under(Deadlines())
    told = []

    servers.require_version(8)
    await servers.pause(PauseMode.ABORT)
    assert fake.paused is PauseMode.ABORT
    await servers.resume()
    turn = await servers.generate(
        servers.encode(PROMPT),
        SamplingParams(max_new_tokens=2),
        affinity="a",
        extra={"b": 1},
        on_progress=lambda: told.append("progress"),
        on_tokens=lambda ids: told.append(list(ids)),
    )

    assert (fake.required, fake.paused) == (None, None)
    assert (turn.prompt_ids.tolist(), len(turn.output_ids)) == ([1, 2, 3], 2)
    assert "progress" in told
    assert [100, 101] in told
    assert await servers.versions() == {"fake": 7}
    assert servers.statistics().servers[0].requests == 1


async def test_the_lease_service_has_no_servers_to_ask():
    """A generate function that asked would be a mistake; a version may be required, and nothing is known of any."""
    servers = NoServers().under(Deadlines())
    assert methods(InferenceServers).keys() <= set(dir(servers))

    servers.require_version(3)
    await servers.resume()
    assert await servers.versions() == {}
    assert servers.statistics().servers == ()
    with pytest.raises(Exception, match="no servers, its nodes have them"):
        await servers.generate([1], SamplingParams(), affinity="a")
    with pytest.raises(Exception, match="no servers, its nodes have them"):
        await servers.pause(PauseMode.ABORT)
    with pytest.raises(Exception, match="no servers, its nodes have them"):
        servers.encode(PROMPT)
