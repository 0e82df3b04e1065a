"""Ready-made tools over commands and sessions: what a model is given to work with a machine.

The boundary of blame: a command that is wrong, denied or over its limit is an answer for the model; a host that can't run
it is a ToolError and ends the rollout.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, final

from ._arguments import ExecArguments, ShellArguments, StdinArguments, arguments_of
from ._captured import Captured
from ._errors import SpawnError
from ._session_values import ExecError, ExecOutput
from ._sessions import ExecSessions
from ._tool import Invocation, RespondToModel, Tool
from ._tool_values import FunctionOutput, ToolName, ToolOutput


class RunCaptured(Protocol):
    """A bound ``run_captured``: of a rollout's tools, or a sandbox's ``exec``."""

    async def __call__(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  expiry is a result here, unlike a cancelled scope
    ) -> Captured:
        """Run a command to its end."""
        ...


@contextmanager
def _told_to_the_model(prefix: str) -> Generator[None]:
    """What the command, its policy or its use did wrong is told to the model. Trouble of the host goes on."""
    try:
        yield
    except SpawnError as error:
        if not error.command_is_wrong:
            raise
        raise RespondToModel(f"{prefix}: {error}") from error
    except (ExecError, ValueError) as error:
        raise RespondToModel(f"{prefix}: {error}") from error


@final
class ShellTool(Tool):
    """``shell``: one command, run to its end. Arguments: argv or cmd, workdir, timeout_ms."""

    name: ToolName = ToolName("shell")
    supports_parallel = True

    def __init__(self, run: RunCaptured, *, interpreter: tuple[str, ...] | None = None) -> None:
        """``interpreter`` runs a command line given as ``cmd``; None: only words are taken."""
        self._run, self._interpreter = run, interpreter

    async def handle(self, invocation: Invocation) -> FunctionOutput:
        """Run it. A timeout is a result, with its line on top."""
        arguments = arguments_of(invocation, ShellArguments)
        argv = arguments.words(self._interpreter)
        limit = None if arguments.timeout_ms is None else arguments.timeout_ms / 1000
        with _told_to_the_model(f"shell failed for {argv}"):
            result = await self._run(argv, cwd=arguments.workdir, timeout=limit)
        text = f"Exit code: {result.exit_code}\nOutput:\n{result.model_text()}"
        return FunctionOutput(text=text, success=result.exit_code == 0)


@final
class ExecCommandTool(Tool):
    """``exec_command``: start a process and see what it says. Arguments: argv or cmd, workdir, tty, yield_time_ms, …"""

    name: ToolName = ToolName("exec_command")
    supports_parallel = True

    def __init__(self, sessions: ExecSessions, *, interpreter: tuple[str, ...] | None = None) -> None:
        """``interpreter`` runs a command line given as ``cmd``; None: only words are taken."""
        self._sessions, self._interpreter = sessions, interpreter

    async def handle(self, invocation: Invocation) -> ExecOutput:
        """Start it and collect its output."""
        arguments = arguments_of(invocation, ExecArguments)
        argv = arguments.words(self._interpreter)
        with _told_to_the_model(f"exec_command failed for {argv}"):
            return await self._sessions.exec_command(
                argv,
                call_id=invocation.call_id,
                cwd=arguments.workdir,
                tty=arguments.tty,
                yield_time=arguments.yield_time_ms / 1000,
                max_output_tokens=arguments.max_output_tokens,
            )

    def post_hook_payload(self, output: ToolOutput) -> object | None:
        """Only for a process that has ended: one command, one check."""
        return None if isinstance(output, ExecOutput) and output.alive else output.model_text()


@final
class WriteStdinTool(Tool):
    """``write_stdin``: talk to a session, or poll it. Arguments: session_id, chars, yield_time_ms, max_output_tokens."""

    name: ToolName = ToolName("write_stdin")

    def __init__(self, sessions: ExecSessions) -> None:
        self._sessions = sessions

    async def handle(self, invocation: Invocation) -> ExecOutput:
        """Write and collect."""
        arguments = arguments_of(invocation, StdinArguments)
        with _told_to_the_model("write_stdin failed"):
            return await self._sessions.write_stdin(
                arguments.session_id,
                arguments.chars,
                yield_time=arguments.yield_time_ms / 1000,
                max_output_tokens=arguments.max_output_tokens,
            )

    def pre_hook_payload(self, invocation: Invocation) -> None:
        """Nothing: it goes on with a command that was checked."""
        del invocation

    def post_hook_payload(self, output: ToolOutput) -> object | None:
        """As ``exec_command``."""
        return None if isinstance(output, ExecOutput) and output.alive else output.model_text()
