"""slime's sandbox protocol, as it is called: its life in one asyncio task, and a command as a line for its shell."""

import os
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self

import httpx  # noqa: ASYNC127  only its exceptions: what the clients of such services raise


class SlimeSandbox(Protocol):
    """slime's ``Sandbox``: asyncio, and commands are lines for a shell."""

    async def __aenter__(self) -> Self:
        """Make it."""
        ...

    async def __aexit__(self, *_error: object) -> None:
        """Destroy it."""
        ...

    async def exec(
        self,
        cmd: str,
        *,
        user: str,
        env: Mapping[str, str] | None,
        timeout: int,  # noqa: ASYNC109  slime's name
        check: bool,
        idempotent: bool,
    ) -> tuple[int, str, str]:
        """Run a line: exit code, stdout, stderr."""
        ...

    async def write_file(self, path: str, content: str | bytes | Path, *, user: str) -> None:
        """Write a file."""
        ...

    async def read_file(self, path: str, *, user: str) -> str:
        """A file's text."""
        ...


def never_ran(error: Exception) -> bool:
    """Whether a request that failed like this certainly had no effect: there was no connection to send it on."""
    return isinstance(error, ConnectionRefusedError | httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)


def command_line(argv: Sequence[str | bytes | os.PathLike[str]], *, cwd: str | None, timeout: float | None) -> str:  # noqa: ASYNC109  part of the line
    """One line for a shell that runs these words there, and that kills them when their time is over.

    ``timeout`` is coreutils', and busybox has it too: slime's own limit gives up waiting, but kills nothing.
    """
    words = [os.fsdecode(word) for word in argv]
    if not words:
        raise ValueError("argv is empty")
    if any("\0" in word for word in (*words, cwd or "")):
        raise ValueError(f"argv or cwd has a null character in it: {words}, {cwd!r}")
    line = shlex.join(words)
    if timeout is not None:
        line = f"timeout -k 1 {max(timeout, 0.001):.3f} {line}"
    return line if cwd is None else f"cd -- {shlex.quote(cwd)} && {line}"


async def life(sandbox: SlimeSandbox) -> AsyncIterator[Exception | None]:  # noqa: ASYNC900  iterated on asyncio
    """On the loop, one task: the first step makes it, each of the others tries to destroy it. They give what went wrong."""
    over = False
    try:
        try:
            await sandbox.__aenter__()  # ruff: ignore[unnecessary-dunder-call]  half made, it must be left all the same
        except Exception as error:  # noqa: BLE001  told to whoever waits for it
            yield error
        else:
            yield None
        while (failed := await _end_of(sandbox)) is not None:
            yield failed
        over = True
    finally:
        if not over:  # the provider is left, or never came back: what there is of it goes
            await _end_of(sandbox)  # noqa: ASYNC102  asyncio code: the bridge bounds it


async def _end_of(sandbox: SlimeSandbox) -> Exception | None:
    try:
        await sandbox.__aexit__(None, None, None)
    except Exception as error:  # noqa: BLE001  a failed cleanup changes no result
        return error
    return None
