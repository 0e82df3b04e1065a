"""Ready-made tools over captured commands and exec sessions: ``shell``, ``exec_command`` and ``write_stdin``.

A model's arguments are checked here, and the model reads about wrong ones. The boundary of blame: a command that is wrong,
denied or over its limit is an answer for the model; a host that can't run the command is a ToolError and ends the rollout.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Protocol, TypeAlias, TypeVar, final

import msgspec

from .._commands.capture import Captured
from .._commands.command import SpawnError
from .._exec.sessions import ExecSessions
from .._exec.values import ExecError, ExecOutput
from .tool import FunctionOutput, Invocation, RespondToModel, Tool, ToolName, ToolOutput

T = TypeVar("T", bound=msgspec.Struct)

# NaN, which Python's JSON parser takes, is not >= 0 either. A time that is too long is cut to the limits.
Milliseconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class CommandArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The command: ``argv``, a list of words, or ``cmd``, a line for the tool's interpreter."""

    argv: list[str] | None = None
    cmd: str | None = None
    workdir: str | None = None

    def words(self, interpreter: tuple[str, ...] | None) -> list[str]:
        """Return the command as words. Raises RespondToModel without a command, or for a line without an interpreter."""
        if self.argv:
            return self.argv
        if self.cmd is None or interpreter is None:
            raise RespondToModel("the command is missing: " + ("argv" if interpreter is None else "argv or cmd"))
        return [*interpreter, self.cmd]


class ShellArguments(CommandArguments, frozen=True, kw_only=True):
    """Arguments of ``shell``."""

    timeout_ms: Milliseconds | None = None


class ExecArguments(CommandArguments, frozen=True, kw_only=True):
    """Arguments of ``exec_command``."""

    tty: bool = False
    yield_time_ms: Milliseconds = 10_000
    max_output_tokens: Count | None = None


class StdinArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of ``write_stdin``."""

    session_id: Count
    chars: str = ""
    yield_time_ms: Milliseconds = 250
    max_output_tokens: Count | None = None


def arguments_of(invocation: Invocation, kind: type[T]) -> T:
    """Return the call's arguments as ``kind``, without unknown names. Raises RespondToModel if one is missing or wrong."""
    try:
        return msgspec.convert(invocation.arguments(), kind)
    except msgspec.ValidationError as error:
        raise RespondToModel(f"{invocation.call.name}: {error}") from error


class RunCaptured(Protocol):
    """A bound ``run_captured``: that of a rollout's tools, or a sandbox's ``exec``."""

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
def _answering_the_model(prefix: str) -> Generator[None]:
    """Turn errors of the command, its policy or its use into answers for the model. Failures of the host go on."""
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
    """The tool ``shell``: one command, run to its end. Arguments: argv or cmd, workdir, timeout_ms."""

    name: ToolName = ToolName("shell")
    supports_parallel = True

    def __init__(self, run: RunCaptured, *, interpreter: tuple[str, ...] | None = None) -> None:
        """Take ``interpreter`` for command lines given as ``cmd``; None: the tool takes only words."""
        self._run, self._interpreter = run, interpreter

    async def handle(self, invocation: Invocation) -> FunctionOutput:
        """Run the command. A timeout is a result, with a line about it on top."""
        arguments = arguments_of(invocation, ShellArguments)
        argv = arguments.words(self._interpreter)
        limit = None if arguments.timeout_ms is None else arguments.timeout_ms / 1000
        with _answering_the_model(f"shell failed for {argv}"):
            result = await self._run(argv, cwd=arguments.workdir, timeout=limit)
        text = f"Exit code: {result.exit_code}\nOutput:\n{result.model_text()}"
        return FunctionOutput(text=text, success=result.exit_code == 0)


@final
class ExecCommandTool(Tool):
    """The tool ``exec_command``: start a process and read its output.

    Arguments: argv or cmd, workdir, tty, yield_time_ms, max_output_tokens.
    """

    name: ToolName = ToolName("exec_command")
    supports_parallel = True

    def __init__(self, sessions: ExecSessions, *, interpreter: tuple[str, ...] | None = None) -> None:
        """Take ``interpreter`` for command lines given as ``cmd``; None: the tool takes only words."""
        self._sessions, self._interpreter = sessions, interpreter

    async def handle(self, invocation: Invocation) -> ExecOutput:
        """Start the process and collect its output."""
        arguments = arguments_of(invocation, ExecArguments)
        argv = arguments.words(self._interpreter)
        with _answering_the_model(f"exec_command failed for {argv}"):
            return await self._sessions.exec_command(
                argv,
                call_id=invocation.call_id,
                cwd=arguments.workdir,
                tty=arguments.tty,
                yield_time=arguments.yield_time_ms / 1000,
                max_output_tokens=arguments.max_output_tokens,
            )

    def post_hook_payload(self, output: ToolOutput) -> object | None:
        """Return the text of a process that has ended: one command, one check."""
        return None if isinstance(output, ExecOutput) and output.alive else output.model_text()


@final
class WriteStdinTool(Tool):
    """The tool ``write_stdin``: write to an exec session, or poll it.

    Arguments: session_id, chars, yield_time_ms, max_output_tokens.
    """

    name: ToolName = ToolName("write_stdin")

    def __init__(self, sessions: ExecSessions) -> None:
        self._sessions = sessions

    async def handle(self, invocation: Invocation) -> ExecOutput:
        """Write and collect the output."""
        arguments = arguments_of(invocation, StdinArguments)
        with _answering_the_model("write_stdin failed"):
            return await self._sessions.write_stdin(
                arguments.session_id,
                arguments.chars,
                yield_time=arguments.yield_time_ms / 1000,
                max_output_tokens=arguments.max_output_tokens,
            )

    def pre_hook_payload(self, invocation: Invocation) -> None:
        """Return None: the call continues a command that was checked."""
        del invocation

    def post_hook_payload(self, output: ToolOutput) -> object | None:
        """Return the text as ``exec_command`` does."""
        return None if isinstance(output, ExecOutput) and output.alive else output.model_text()
