"""One sandbox of slime's protocol, as a backend of ``trio_rollout.tools``.

On the loop's thread one asyncio task enters the sandbox, and leaves it when it is told to (``lifetime``). Commands become lines for the
sandbox's shell.
"""

import logging
import math
import os
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol, Self, final

import attrs
import httpx  # noqa: ASYNC127  only its exceptions: what the clients of such services raise
import trio

from trio_rollout.errors import ToolError
from trio_rollout.lowlevel import wait_s
from trio_rollout.tools import Captured, NeverRan, SandboxSpec, StopKind

from ..bridge import Bridge


class SlimeSandbox(Protocol):
    """slime's ``Sandbox``: asyncio, and commands are lines for a shell."""

    async def __aenter__(self) -> Self:
        """Make the sandbox."""
        ...

    async def __aexit__(self, *_error: object) -> None:
        """Destroy the sandbox."""

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
        """Run a line and return exit code, stdout, stderr."""
        ...

    async def write_file(self, path: str, content: str | bytes | Path, *, user: str) -> None:
        """Write a file."""

    async def read_file(self, path: str, *, user: str) -> str:
        """Return a file's text."""
        ...


def never_ran(error: Exception) -> bool:
    """Return True if a request that failed like this certainly had no effect: there was no connection to send it on."""
    return isinstance(error, ConnectionRefusedError | httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)


def command_line(argv: Sequence[str | bytes | os.PathLike[str]], *, cwd: str | None, timeout: float | None) -> str:  # noqa: ASYNC109  part of the line
    """Return one line for a shell that runs these words in ``cwd``, and kills them after ``timeout`` seconds.

    The command ``timeout`` is from coreutils, and busybox has it too: slime's own limit stops waiting, but kills nothing.
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


async def lifetime(sandbox: SlimeSandbox) -> AsyncIterator[Exception | None]:  # noqa: ASYNC900  iterated on asyncio
    """On the loop's thread: make the sandbox in the first step, try to destroy it in each of the others; yield the error."""
    over = False
    try:
        try:
            await sandbox.__aenter__()  # ruff: ignore[unnecessary-dunder-call]  half made, it must be left all the same
        except Exception as error:  # noqa: BLE001  raised to the code that waits for it
            yield error
        else:
            yield None
        while (failed := await _end_of(sandbox)) is not None:
            yield failed
        over = True
    finally:
        if not over:  # the provider is left, or never came back: the sandbox must go
            await _end_of(sandbox)  # noqa: ASYNC102  asyncio code: the bridge bounds it


async def _end_of(sandbox: SlimeSandbox) -> Exception | None:
    try:
        await sandbox.__aexit__(None, None, None)
    except Exception as error:  # noqa: BLE001  a failed cleanup changes no result
        return error
    return None


_log: Final = logging.getLogger("trio_rollout.tools")

_TRIES: Final = 3
_PAUSE_S: Final = 0.2
_TIMEOUT_CODE: Final = 124
_KILLED_CODES: Final = (_TIMEOUT_CODE, 128 + 9, -9)
# The service's own limit is the outer one: what ends a command is to be the inner, which kills it.
_MARGIN_S: Final = 5.0


@final
@attrs.frozen(eq=False)
class Access:
    """The bridge, the user and the error policy of one provider's sandboxes."""

    bridge: Bridge
    user: str
    never_ran: Callable[[Exception], bool]

    def translated(self, error: Exception, what: str) -> Exception:
        """Return the error as ToolError, or as NeverRan if the request certainly had no effect."""
        kind = NeverRan if self.never_ran(error) else ToolError
        return kind(f"sandbox: {what}: {error!r}")


@final
@attrs.define(eq=False, repr=False)
class BridgedSandbox:
    """On Trio's thread: one sandbox, as a ``SandboxBackend`` of ``trio_rollout.tools``."""

    spec: SandboxSpec
    _sandbox: SlimeSandbox
    _access: Access
    _made: trio.Event = attrs.field(factory=trio.Event, init=False)
    _unwanted: trio.Event = attrs.field(factory=trio.Event, init=False)
    _over: trio.Event = attrs.field(factory=trio.Event, init=False)
    _failure: Exception | None = attrs.field(default=None, init=False)
    _leak: Exception | None = attrs.field(default=None, init=False)

    async def live(self) -> None:
        """Make the sandbox, wait until it is unwanted, and destroy it. Runs in the provider's scope."""
        async with self._access.bridge.iterate(lifetime, self._sandbox) as steps:
            self._failure = await anext(steps)
            self._made.set()
            if self._failure is None or not self._access.never_ran(self._failure):
                await self._unwanted.wait()
            self._leak = await self._destroyed(steps)

    async def _destroyed(self, steps: AsyncIterator[Exception | None]) -> Exception | None:
        """Destroy the sandbox, trying again if that fails; return the last failure, or None."""
        error: Exception | None = None
        for attempt in range(1, _TRIES + 1):
            error = await anext(steps, None)
            if error is None:
                return None
            _log.warning("sandbox %s, try %d to destroy it: %r", self.spec.name, attempt, error)
            await wait_s(attempt * _PAUSE_S)
        return error

    def end(self, failure: Exception | None) -> None:
        """Note that ``live`` is over, with this failure if it raised one."""
        self._failure, self._leak = self._failure or failure, self._leak or failure
        self._made.set()
        self._over.set()

    async def made(self) -> None:
        """Wait until the sandbox is there. Cancelled, the creation goes on.

        Raises:
          NeverRan: it could not be made, and certainly is not there.
          ToolError: it could not be made.
        """
        await self._made.wait()
        if self._failure is not None:
            raise self._access.translated(self._failure, "it could not be created") from self._failure

    def unwanted(self) -> None:
        """Let ``live`` destroy the sandbox."""
        self._unwanted.set()

    async def gone(self) -> Exception | None:
        """Wait until the sandbox is destroyed, or cannot be; return the failure, or None."""
        await self._over.wait()
        return self._leak

    async def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None,
        env: Mapping[str, str] | None,
        timeout: float | None,  # noqa: ASYNC109  part of the request
    ) -> Captured:
        """Run a command to its end, as a line for the shell with every word quoted. See ``SandboxBackend.exec``."""
        if timeout is not None and math.isinf(timeout):
            timeout = None
        line = command_line(argv, cwd=cwd, timeout=timeout)
        outer = self.spec.lifetime if timeout is None else timeout + _MARGIN_S
        answer: tuple[int, str, str] | None = None
        began = trio.current_time()
        with trio.move_on_after(outer + _MARGIN_S):
            try:
                # Not idempotent, as far as is known: it must not be tried again where it may have run.
                answer = await self._access.bridge.call(
                    self._sandbox.exec,
                    line,
                    user=self._access.user,
                    env={**self.spec.env, **(env or {})},
                    timeout=math.ceil(outer),
                    check=False,
                    idempotent=False,
                )
            except TimeoutError:
                answer = None
            except Exception as error:
                raise self._access.translated(error, "its command failed") from error
        return _captured(answer, trio.current_time() - began, timeout)

    async def read_file(self, path: str) -> bytes:
        """Return a file's text: slime's protocol has no other files."""
        text = await self._file(self._sandbox.read_file, path)
        return str(text).encode()

    async def write_file(self, path: str, content: bytes) -> None:
        """Write a file."""
        await self._file(self._sandbox.write_file, path, content)

    async def _file(self, call: Callable[..., Awaitable[object]], *arguments: object) -> object:
        try:
            return await self._access.bridge.call(call, *arguments, user=self._access.user)
        except FileNotFoundError:
            raise
        except Exception as error:
            raise self._access.translated(error, f"{arguments[0]}") from error


def _captured(answer: tuple[int, str, str] | None, duration: float, limit: float | None) -> Captured:
    """Return a command's outcome. Without an answer its time was over; the exit code is then 124, or 137 if it was killed."""
    code, out, err = answer if answer is not None else (_TIMEOUT_CODE, "", "")
    late = answer is None or (limit is not None and duration >= limit and code in _KILLED_CODES)
    stdout, stderr = out.encode(), err.encode()
    return Captured(
        exit_code=_TIMEOUT_CODE if late else code,
        stop=StopKind.TIMED_OUT if late else StopKind.EXITED,
        signal=None,
        stdout=stdout,
        stderr=stderr,
        aggregated=stdout + stderr,
        duration=duration,
    )
