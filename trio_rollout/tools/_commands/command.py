"""A command to start: an argv and, written out, everything else that a process would inherit; and its errors.

Both errors are infrastructure failures: the engine runs the sample again. A failure that the policy caused is an observation,
and so a value. For exec sessions see ``ExecError``.
"""

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

import attrs

from ...errors import ToolError

Argv: TypeAlias = Sequence[str | bytes | os.PathLike[str]]

# Commands are text programs driven by a model: no colours, no pagers, one locale, and no variable of the host.
MINIMAL_ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "LC_CTYPE": "C.UTF-8",
    "TERM": "dumb",
    "NO_COLOR": "1",
    "COLORTERM": "",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "GH_PAGER": "cat",
}

# Marks every process that a host started here, also one that left its process group. The value is the host's process id.
MARKER = "TRIO_ROLLOUT"


def minimal_environment() -> dict[str, str]:
    """Return the default environment of a command: ``MINIMAL_ENVIRONMENT`` and the marker."""
    return {**MINIMAL_ENVIRONMENT, MARKER: str(os.getpid())}


def _words(argv: Argv) -> tuple[str, ...]:
    if isinstance(argv, str | bytes | os.PathLike):
        raise TypeError(f"argv must be a sequence of words, got {argv!r}; for a shell say ['sh', '-c', line]")
    words = tuple(os.fsdecode(word) for word in argv)
    if not words or not words[0]:
        raise ValueError(f"argv needs a program as its first word, got {list(words)}")
    for word in words:
        if "\0" in word:
            raise ValueError(f"argv: {word!r} contains a null character, which no program can receive")
    return words


def _environment(env: Mapping[str, str] | None) -> dict[str, str]:
    chosen = minimal_environment() if env is None else dict(env)
    for name, value in chosen.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise ValueError(f"env: {name!r}={value!r} can't be an environment variable")
    return chosen


def _directory(cwd: str | os.PathLike[str] | None) -> str:
    directory = str(Path.cwd()) if cwd is None else os.fspath(cwd)
    if "\0" in directory:
        raise ValueError(f"cwd: {directory!r} contains a null character")
    return directory


@attrs.frozen(kw_only=True)
class Command:
    """One process to start. No part of a command goes through a shell.

    ``env`` replaces the environment and is not merged into the host's; None is ``MINIMAL_ENVIRONMENT`` and the marker.
    ``cwd`` None is the host's current directory at this moment. ``rlimits`` are (resource, soft, hard). ``tty`` is the
    size (rows, columns) of the terminal that the process gets as stdin, stdout and stderr.

    Raises:
      ValueError: argv is empty, or a word, a variable or the directory contains a null character.
      TypeError: argv is one string.
    """

    argv: tuple[str, ...] = attrs.field(converter=_words)
    cwd: str = attrs.field(default=None, converter=_directory)
    env: dict[str, str] = attrs.field(
        default=None, converter=_environment, repr=False
    )  # may hold secrets: not for logs
    umask: int = 0o077
    tty: tuple[int, int] | None = None
    merge_stderr: bool = False
    rlimits: tuple[tuple[int, int, int], ...] = ()


class MakeCommand(Protocol):
    """Makes a command from a call's arguments: supplies the directory and the environment that the call leaves out."""

    def __call__(
        self, *, argv: Argv, cwd: str | None, env: Mapping[str, str] | None, tty: tuple[int, int] | None
    ) -> Command:
        """Return the command."""
        ...


# Errors of a wrong argv or cwd, or of a broken program. Every other errno (EAGAIN, EMFILE, ENOMEM, …) is the host's failure,
# and so is a failure before the exec: a SpawnError about that has no errno.
_CALLERS_FAULT = frozenset({
    errno.ENOENT,
    errno.EACCES,
    errno.ENOEXEC,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.E2BIG,
    errno.EPERM,
    errno.ETXTBSY,
    errno.EINVAL,
    errno.ELIBBAD,
})


class SpawnError(ToolError):
    """A command could not be started: no such program, no such directory, or the host lacks a resource."""

    def __init__(self, message: str, *, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), self.args, {"errno": self.errno})

    @property
    def command_is_wrong(self) -> bool:
        """True if argv or cwd is at fault: then the author of the command, often the policy, should be told."""
        return self.errno in _CALLERS_FAULT


class SupervisorLost(ToolError):
    """The process that contains a rollout's commands died, or did not answer."""
