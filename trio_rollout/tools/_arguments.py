"""What the ready-made tools take: a model's arguments, checked. What is wrong with them is told to the model."""

from typing import Annotated, TypeAlias, TypeVar

import msgspec

from ._tool import Invocation, RespondToModel

T = TypeVar("T", bound=msgspec.Struct)

# NaN, which Python's JSON parser takes, is not >= 0 either. What is too long is cut to the limits.
Milliseconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class CommandArguments(msgspec.Struct, frozen=True, kw_only=True):
    """What to run: ``argv``, a list of words, or ``cmd``, a line for the tool's interpreter."""

    argv: list[str] | None = None
    cmd: str | None = None
    workdir: str | None = None

    def words(self, interpreter: tuple[str, ...] | None) -> list[str]:
        """The command as words.

        Raises:
          RespondToModel: there is none, or it is a line and there is no interpreter, such as ``sh -c``.

        """
        if self.argv:
            return self.argv
        if self.cmd is None or interpreter is None:
            raise RespondToModel("the command is missing: " + ("argv" if interpreter is None else "argv or cmd"))
        return [*interpreter, self.cmd]


class ShellArguments(CommandArguments, frozen=True, kw_only=True):
    """Of ``shell``."""

    timeout_ms: Milliseconds | None = None


class ExecArguments(CommandArguments, frozen=True, kw_only=True):
    """Of ``exec_command``."""

    tty: bool = False
    yield_time_ms: Milliseconds = 10_000
    max_output_tokens: Count | None = None


class StdinArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Of ``write_stdin``."""

    session_id: Count
    chars: str = ""
    yield_time_ms: Milliseconds = 250
    max_output_tokens: Count | None = None


def arguments_of(invocation: Invocation, kind: type[T]) -> T:
    """The call's arguments as ``kind``; names that it does not know are left out.

    Raises:
      RespondToModel: one is missing, or of another type.

    """
    try:
        return msgspec.convert(invocation.arguments(), kind)
    except msgspec.ValidationError as error:
        raise RespondToModel(f"{invocation.call.name}: {error}") from error
