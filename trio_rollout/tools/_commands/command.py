"""What to run: an argv with everything that a process would otherwise inherit written out."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

import attrs

Argv: TypeAlias = Sequence[str | bytes | os.PathLike[str]]

# Commands are text programs driven by a model: no colours, no pagers, no locale surprises, and no variable of the host.
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

# Marks every process that a host started through here, however far it has fled: its value is the host's process id.
MARKER = "TRIO_ROLLOUT"


def minimal_environment() -> dict[str, str]:
    """What a command gets when nothing else is said: ``MINIMAL_ENVIRONMENT`` and the marker."""
    return {**MINIMAL_ENVIRONMENT, MARKER: str(os.getpid())}


def _words(argv: Argv) -> tuple[str, ...]:
    if isinstance(argv, str | bytes | os.PathLike):
        raise TypeError(f"argv must be a sequence of words, got {argv!r}; for a shell say ['sh', '-c', line]")
    words = tuple(os.fsdecode(word) for word in argv)
    if not words or not words[0]:
        raise ValueError(f"argv needs a program as its first word, got {list(words)}")
    for word in words:
        if "\0" in word:
            raise ValueError(f"argv: {word!r} has a null character in it, which no program can be given")
    return words


def _environment(env: Mapping[str, str] | None) -> dict[str, str]:
    chosen = minimal_environment() if env is None else dict(env)
    for name, value in chosen.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise ValueError(f"env: {name!r}={value!r} can't be an environment variable")
    return chosen


def _directory(cwd: str | os.PathLike[str] | None) -> str:
    where = str(Path.cwd()) if cwd is None else os.fspath(cwd)
    if "\0" in where:
        raise ValueError(f"cwd: {where!r} has a null character in it")
    return where


@attrs.frozen(kw_only=True)
class Command:
    """One process to start. Nothing of it goes through a shell.

    ``env`` replaces the environment, it is not merged into the host's; None is a minimal one (``MINIMAL_ENVIRONMENT``).
    ``cwd`` None is the host's current directory at this moment. ``rlimits`` are (resource, soft, hard). ``tty`` is the
    size (rows, columns) of the terminal it gets as stdin, stdout and stderr.

    Raises:
      ValueError: argv is empty, or something has a null character in it.
      TypeError: argv is one string.

    """

    argv: tuple[str, ...] = attrs.field(converter=_words)
    cwd: str = attrs.field(default=None, converter=_directory)
    env: dict[str, str] = attrs.field(default=None, converter=_environment, repr=False)  # may hold what logs must not
    umask: int = 0o077
    tty: tuple[int, int] | None = None
    merge_stderr: bool = False
    rlimits: tuple[tuple[int, int, int], ...] = ()


class MakeCommand(Protocol):
    """Makes a command from what a call says: where it runs and in which environment, if the call doesn't say."""

    def __call__(
        self, argv: Argv, *, cwd: str | None, env: Mapping[str, str] | None, tty: tuple[int, int] | None = None
    ) -> Command:
        """The command."""
        ...


def plain_command(
    argv: Argv, *, cwd: str | None, env: Mapping[str, str] | None, tty: tuple[int, int] | None = None
) -> Command:
    """A command with nothing added to what the call says."""
    return Command(argv=argv, cwd=cwd, env=env, tty=tty)
