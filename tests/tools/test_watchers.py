"""Callbacks of tools: ``on_output`` reports progress without a limit, and an error in a callback changes nothing."""

import pytest
import trio

from trio_rollout.tools import ExecLimits, LocalSandboxes, NetworkGrant, ProcessFailed, ToolOutcome, open_rollout_tools
from trio_rollout.tools._exec.sessions import open_exec_sessions

from .fake_child import FakeBackend
from .stage_play import Play

TALK = ["sh", "-c", "for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.02; done"]
FEW = ExecLimits(max_deltas=2)


@pytest.fixture
async def told(tmp_path):
    """Tools that pass on two chunks of output, and the calls of their ``on_output``."""
    calls = []
    async with open_rollout_tools(limits=FEW, on_output=lambda: calls.append(trio.current_time())) as tools:
        yield tools, calls, LocalSandboxes(tmp_path / "boxes", limits=FEW)


async def test_a_command_that_goes_on_talking_makes_progress_beyond_its_last_event(told):
    tools, calls, _ = told
    passed_on = []
    await tools.run_captured(TALK, on_chunk=lambda *_: passed_on.append(1))

    assert (len(passed_on), len(calls) > 4) == (2, True)


async def test_a_command_in_a_sandbox_makes_progress_too(told):
    tools, calls, provider = told
    async with tools.open_sandbox(provider) as sandbox:
        await sandbox.exec(TALK)

    assert len(calls) > 4


async def test_a_session_makes_progress_too(told):
    tools, calls, provider = told
    async with tools.open_sessions() as sessions:
        await sessions.exec_command(TALK, call_id="c")
    assert len(calls) > 4

    calls.clear()
    async with tools.open_sandbox(provider) as sandbox:
        await sandbox.start(TALK, yield_time=10)
    assert len(calls) > 4


async def test_an_on_timing_that_fails_changes_no_result(autojump_clock, caplog):
    def fail(_call, _timing):
        raise RuntimeError("metrics are down")

    play = Play()
    play.runtime._on_timing = fail
    result = await play.call()

    assert (result.output.model_text(), result.outcome) == ("ok", ToolOutcome.COMPLETED)
    assert "on_timing failed for tool" in caplog.text


async def test_a_policy_that_fails_to_forget_a_session_changes_no_result(autojump_clock, caplog):
    def fail():
        raise RuntimeError("the policy is down")

    class Policy:
        def grant(self):
            self.granted = NetworkGrant(on_finish=fail)
            return self.granted

    backend, policy = FakeBackend(), Policy()
    async with open_exec_sessions(backend.spawn, network=policy) as sessions, trio.open_nursery() as nursery:

        @nursery.start_soon
        async def deny():
            await backend.child(0)
            policy.granted.deny("no")

        with pytest.raises(ProcessFailed, match="no"):
            await sessions.exec_command(["x"], call_id="c")

    assert "a network policy failed to forget a session" in caplog.text
