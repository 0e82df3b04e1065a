"""Invalid numbers from a model or a caller: refused before anything is started, without effect on other calls."""

import json
import math

import pytest

from trio_rollout.tools import (
    ExecCommandTool,
    ExecLimits,
    LocalSandboxes,
    ShellTool,
    ToolCall,
    ToolName,
    TurnCancellation,
    WriteStdinTool,
    open_rollout_tools,
    run_captured,
)
from trio_rollout.tools._commands.capture import Expiration
from trio_rollout.tools._exec.sessions import open_exec_sessions
from trio_rollout.tools._sandboxes.sandbox import open_sandbox

from .fake_child import FakeBackend


@pytest.fixture
async def ask():
    """Call a tool as a model does: with arguments in JSON, as Python parses it."""
    async with open_rollout_tools() as tools, tools.open_sessions() as sessions:
        runtime = tools.runtime([ShellTool(tools.run_captured), ExecCommandTool(sessions), WriteStdinTool(sessions)])

        async def ask(name, arguments):
            call = ToolCall(call_id="c", name=ToolName(name), payload=json.loads(arguments))
            return (await runtime.call(call, turn=TurnCancellation())).output.model_text()

        yield ask


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("shell", '{"argv": ["true"], "timeout_ms": NaN}', "Expected `float` >= 0.0"),
        ("shell", '{"argv": ["true"], "timeout_ms": -5}', "Expected `float` >= 0.0"),
        ("shell", '{"argv": ["true"], "timeout_ms": Infinity}', "Exit code: 0"),
        ("shell", '{"argv": ["true"], "timeout_ms": 1e308}', "Exit code: 0"),
        ("shell", f'{{"argv": ["true"], "timeout_ms": {"9" * 400}}}', "out of range"),
        ("exec_command", '{"argv": ["true"], "yield_time_ms": NaN}', "Expected `float` >= 0.0"),
        ("exec_command", '{"argv": ["true"], "yield_time_ms": -Infinity}', "Expected `float` >= 0.0"),
        ("exec_command", '{"argv": ["true"], "yield_time_ms": 1e308}', "exited with code 0"),
        ("exec_command", '{"argv": ["true"], "max_output_tokens": -3}', "Expected `int` >= 0"),
        ("exec_command", '{"argv": ["echo", "hello"], "max_output_tokens": 0}', "tokens truncated"),
        ("exec_command", '{"argv": ["echo", "hello"], "max_output_tokens": 1000000000000000000000}', "hello"),
        ("write_stdin", '{"session_id": -1}', "Expected `int` >= 0"),
        ("write_stdin", '{"session_id": 1, "yield_time_ms": NaN}', "Expected `float` >= 0.0"),
        ("write_stdin", f'{{"session_id": {"9" * 40}}}', "Unknown process id"),
    ],
)
async def test_a_models_numbers_are_refused_or_cut_and_the_next_call_is_as_ever(ask, name, arguments, answer):
    assert answer in await ask(name, arguments)
    assert "exited with code 0" in await ask("exec_command", '{"argv": ["true"]}')


async def test_nan_is_refused_before_anything_is_started():
    backend = FakeBackend()
    async with open_exec_sessions(backend.spawn) as sessions:
        for call in (
            lambda: sessions.exec_command(["x"], call_id="c", yield_time=math.nan),
            lambda: sessions.exec_to_completion(["x"], call_id="c", timeout=math.nan),
            lambda: sessions.write_stdin(1000, "x", yield_time=math.nan),
            lambda: sessions.poll(1000, yield_time=math.nan),
        ):
            with pytest.raises(ValueError, match="seconds: got nan"):
                await call()
        assert (sessions.statistics().started, backend.children) == (0, [])


async def test_nan_is_no_timeout_of_a_command_or_a_sandbox(processes, tmp_path):
    with pytest.raises(ValueError, match="seconds: got nan"):
        await run_captured(["true"], timeout=math.nan)
    async with open_rollout_tools() as tools:
        with pytest.raises(ValueError, match="seconds: got nan"):
            await tools.run_captured(["true"], timeout=math.nan)
        with pytest.raises(ValueError, match="seconds: got nan"):
            tools.budget(math.nan)
        assert processes.children() == 0
    async with open_sandbox(LocalSandboxes(tmp_path / "boxes")) as sandbox:
        with pytest.raises(ValueError, match="seconds: got nan"):
            await sandbox.exec(["true"], timeout=math.nan)


def test_infinity_and_negative_numbers_keep_their_meaning():
    assert Expiration(timeout=math.inf).deadline(5.0) == math.inf
    assert Expiration(timeout=-1.0).deadline(5.0) == 5.0
    assert (ExecLimits().output_tokens(None), ExecLimits().output_tokens(0)) == (10_000, 0)
