"""The ready-made tools: the model reads about failures of its commands; a failure of the host ends the rollout."""

import errno

import pytest
import trio

from trio_rollout.errors import ToolError
from trio_rollout.tools import (
    AbortedOutput,
    ExecCommandTool,
    ExecLimits,
    ShellTool,
    SpawnError,
    ToolCall,
    ToolName,
    ToolOutcome,
    TurnCancellation,
    WriteStdinTool,
    open_rollout_tools,
)
from trio_rollout.tools._exec.sessions import open_exec_sessions

from .fake_child import FakeBackend
from .stage_play import PlayHooks

SHELL = ("sh", "-c")


class Desk:
    """A rollout's tools, called as a model calls them."""

    def __init__(self, tools, sessions, hooks=None):
        self.turn = TurnCancellation()
        self.runtime = tools.runtime(
            [
                ShellTool(tools.run_captured, interpreter=SHELL),
                ExecCommandTool(sessions, interpreter=SHELL),
                WriteStdinTool(sessions),
            ],
            hooks=hooks,
        )

    async def call(self, name, **arguments):
        call = ToolCall(call_id=name, name=ToolName(name), payload=arguments)
        return await self.runtime.call(call, turn=self.turn)


@pytest.fixture
async def desk():
    async with open_rollout_tools(limits=ExecLimits(min_poll=0.1)) as tools, tools.open_sessions() as sessions:
        yield Desk(tools, sessions)


async def test_a_command_line_or_words(desk):
    line = await desk.call("shell", cmd="echo $((1 + 1))")
    words = await desk.call("shell", argv=["echo", "$((1 + 1))"])

    assert line.output.model_text() == "Exit code: 0\nOutput:\n2\n"
    assert words.output.model_text() == "Exit code: 0\nOutput:\n$((1 + 1))\n"


async def test_a_failing_command_and_one_over_its_limit_are_answers(desk):
    failing = await desk.call("shell", cmd="exit 3")
    slow = await desk.call("shell", argv=["sleep", "60"], timeout_ms=100)

    assert (failing.output.success, failing.outcome) == (False, ToolOutcome.UNSUCCESSFUL)
    assert "Exit code: 124\nOutput:\ncommand timed out after" in slow.output.model_text()


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("shell", {}, "the command is missing"),
        ("shell", {"argv": "ls"}, "Expected `array | null`, got `str`"),
        ("shell", {"argv": [1]}, "Expected `str`, got `int`"),
        ("shell", {"argv": ["a\0b"]}, "null character"),
        ("shell", {"argv": ["nosuchprogram"]}, "No such file or directory"),
        ("shell", {"cmd": "true", "workdir": "nowhere"}, "No such file or directory"),
        ("exec_command", {"cmd": "true", "tty": "yes"}, "Expected `bool`, got `str`"),
        ("exec_command", {"argv": ["nosuchprogram"]}, "exec_command failed for"),
        ("write_stdin", {}, "missing required field `session_id`"),
        ("write_stdin", {"session_id": 1}, "write_stdin failed: Unknown process id 1"),
    ],
)
async def test_what_is_wrong_with_a_call_is_told_to_the_model(desk, name, arguments, answer):
    result = await desk.call(name, **arguments)

    assert answer in result.output.model_text()
    assert result.output.success is False


async def test_a_failure_of_the_host_is_not_the_models_fault():
    backend = FakeBackend()
    backend.error = SpawnError("fork: out of processes", errno=errno.EAGAIN)
    async with open_rollout_tools() as tools, open_exec_sessions(backend.spawn) as sessions:
        with pytest.raises(ToolError, match="out of processes"):
            await Desk(tools, sessions).call("exec_command", cmd="true")


async def test_a_session_over_several_calls(desk):
    started = await desk.call("exec_command", argv=["cat"], tty=True, yield_time_ms=250)
    session = started.output.process_id
    said = await desk.call("write_stdin", session_id=session, chars="hello\n")
    ended = await desk.call("write_stdin", session_id=session, chars="\x04", yield_time_ms=5000)

    assert f"Process running with session ID {session}" in started.output.model_text()
    assert "hello\r\nhello\r\n" in said.output.model_text()
    assert "Process exited with code 0" in ended.output.model_text()
    assert "Unknown process id" in (await desk.call("write_stdin", session_id=session)).output.model_text()


async def test_a_cancelled_turn_ends_the_call_with_a_text_and_the_process_with_it(desk, processes):
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def cancel():
            with trio.fail_after(120):
                while not processes.marked():
                    await trio.sleep(0.01)  # noqa: ASYNC110  a process's birth can't be waited for
            desk.turn.cancel()

        result = await desk.call("exec_command", argv=["sleep", "600"])

    assert isinstance(result.output, AbortedOutput)
    assert result.output.model_text().startswith("Wall time: ")
    assert processes.marked() == []


async def test_one_command_has_one_check_before_and_one_after_it_has_ended():
    """``write_stdin`` continues a command that was checked; a process that still runs has no result to check."""
    hooks = PlayHooks()
    async with open_rollout_tools() as tools, tools.open_sessions() as sessions:
        desk = Desk(tools, sessions, hooks)
        started = await desk.call("exec_command", argv=["cat"], tty=True, yield_time_ms=250)
        await desk.call("write_stdin", session_id=started.output.process_id, chars="\x04", yield_time_ms=5000)

    assert [kind for kind, _ in hooks.seen] == ["pre", "post"]


async def test_ids_of_one_rollout_mean_nothing_in_another(desk):
    started = await desk.call("exec_command", argv=["sleep", "600"], yield_time_ms=250)
    async with open_rollout_tools() as tools, tools.open_sessions() as sessions:
        other = Desk(tools, sessions)
        result = await other.call("write_stdin", session_id=started.output.process_id, chars="\x03")

    assert "Unknown process id" in result.output.model_text()
    assert (await desk.call("write_stdin", session_id=started.output.process_id, yield_time_ms=100)).output.alive
