"""Our own client against both servers: what it promises must be true of the real one."""

from collections.abc import AsyncIterator

import attrs
import pytest
import trio

from trio_rollout import PauseMode, SamplingParams, Stop
from trio_rollout.abc import ModelInput
from trio_rollout.errors import RequestRejected
from trio_rollout.sglang import SGLangServers, open_sglang_servers

from ._server import PROMPT, Server, tiles

LENGTH = 300
LONG = SamplingParams(max_new_tokens=2000, ignore_eos=True)  # twenty seconds
RUNNING = SamplingParams(max_new_tokens=LENGTH, ignore_eos=True)


@pytest.fixture
async def client(server: Server) -> AsyncIterator[SGLangServers]:
    """Our client, of this one server."""
    async with open_sglang_servers([server.target.url]) as servers:
        yield servers


@attrs.define(eq=False)
class Asked:
    """A call of the client in a cancel scope, and its result."""

    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    turns: list = attrs.field(factory=list)
    over: trio.Event = attrs.field(factory=trio.Event)

    async def run(self, client: SGLangServers, ids: ModelInput, sampling: SamplingParams) -> None:
        """Ask, and note the answer."""
        with self.scope:
            self.turns.append(await client.generate(ids, sampling))
        self.over.set()


async def running(server: Server, client: SGLangServers, sampling: SamplingParams) -> Asked:
    """A call whose request is being decoded."""
    asked = Asked()
    server.nursery.start_soon(asked.run, client, PROMPT, sampling)
    await server.until(lambda load: load["num_running_reqs"] == 1)
    return asked


def spans(turn) -> list[dict[str, int]]:
    """The turn's version spans in the wire's shape."""
    return [{"start": span.start, "end": span.stop} for span in turn.versions]


async def test_a_turn_is_what_the_server_said(server: Server, client: SGLangServers):
    turn = await client.generate(PROMPT, SamplingParams(max_new_tokens=20, ignore_eos=True))

    assert turn.prompt_ids.tolist() == PROMPT
    assert len(turn.output_ids) == len(turn.log_probs) == 20
    assert turn.stop is Stop.LENGTH
    assert tiles(spans(turn), 20)
    assert turn.log_probs.tolist() == pytest.approx(await server.log_probs(PROMPT, turn.output_ids.tolist()), abs=1e-4)


async def test_a_cancelled_call_leaves_nothing_running(server: Server, client: SGLangServers):
    asked = await running(server, client, LONG)
    asked.scope.cancel()
    with trio.fail_after(10):
        await asked.over.wait()
    load = await server.load()
    await server.until_idle()

    assert asked.turns == []
    assert load["num_waiting_reqs"] == 0
    assert (client.statistics().orphans, client.statistics().owed_aborts) == (0, 0)


async def test_calls_cancelled_at_any_moment_leave_nothing_running(server: Server, client: SGLangServers):
    """Before the request is registered, while it waits, while it is decoded."""
    for delay in (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05):
        with trio.move_on_after(delay):
            await client.generate(PROMPT, LONG)
    with trio.fail_after(10):
        await server.until_idle()

    assert client.statistics().orphans == 0


async def test_more_calls_than_the_server_takes_all_come_back(server: Server, client: SGLangServers):
    """Eight run and four wait; the others are refused with 503, and asked again."""
    calls = [Asked() for _ in range(24)]
    async with trio.open_nursery() as nursery:
        for asked in calls:
            nursery.start_soon(asked.run, client, PROMPT, SamplingParams(max_new_tokens=10, ignore_eos=True))

    assert [len(turn.output_ids) for asked in calls for turn in asked.turns] == [10] * 24


async def test_what_the_server_refuses_is_told_in_its_own_words(client: SGLangServers):
    with pytest.raises(RequestRejected, match="unknown field `foo`"):
        await client.generate(PROMPT, SamplingParams(max_new_tokens=1, extra={"foo": 1}))


async def test_an_id_outside_the_vocabulary_never_reaches_the_server(server: Server, client: SGLangServers):
    with pytest.raises(RequestRejected, match=str(server.target.vocabulary)):
        await client.generate([*PROMPT, server.target.vocabulary], RUNNING)

    assert await server.is_ready()


async def test_pausing_in_abort_mode_ends_the_calls_with_what_they_have(server: Server, client: SGLangServers):
    asked = await running(server, client, LONG)
    await client.pause(PauseMode.ABORT)
    with trio.fail_after(10):
        await asked.over.wait()
    ready = await server.is_ready()
    await client.resume()

    assert not ready
    assert await server.is_ready()
    assert asked.turns[0].stop is Stop.ABORT
    assert 0 < len(asked.turns[0].output_ids) < 2000


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_pausing_in_the_other_modes_lets_calls_go_on_later(
    server: Server, client: SGLangServers, mode: PauseMode
):
    await server.post("/update_weight_version", new_version="50")
    asked = await running(server, client, RUNNING)
    await client.pause(mode)
    await server.post("/update_weight_version", new_version="51", abort_all_requests=False)
    versions = await client.versions()
    await client.resume()
    await asked.over.wait()
    (turn,) = asked.turns

    assert list(versions.values()) == [51]
    assert turn.stop is Stop.LENGTH
    assert [span.version for span in turn.versions] == [50, 51]
    assert tiles(spans(turn), LENGTH)
    assert turn.weight_version == 51


async def test_a_call_cancelled_in_a_pause_is_gone_after_it(server: Server, client: SGLangServers):
    """Its abort cannot be obeyed now: the call ends all the same, and the abort is paid after the resume."""
    asked = await running(server, client, LONG)
    await client.pause(PauseMode.IN_PLACE)
    asked.scope.cancel()
    with trio.fail_after(10):
        await asked.over.wait()
    await client.resume()
    with trio.fail_after(10):
        await server.until_idle()

    assert client.statistics().orphans == 0


async def test_everything_can_be_aborted_and_flushed(server: Server, client: SGLangServers):
    asked = await running(server, client, LONG)
    await client.abort_until_idle()
    await asked.over.wait()
    await client.flush_cache()

    assert asked.turns[0].stop is Stop.ABORT
    assert (await server.load())["num_running_reqs"] == 0


async def test_health_tells_ready_from_paused(server: Server, client: SGLangServers):
    before = await client.health()
    await client.pause(PauseMode.ABORT)
    during = await client.health()
    await client.resume()

    assert (list(before.values()), list(during.values())) == ([True], [False])
