"""One sandbox of slime's protocol, as ``trio_rollout.tools`` sees it."""

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Final, final

import attrs
import trio

from trio_rollout._backoff import wait_s
from trio_rollout.errors import ToolError
from trio_rollout.tools import Captured, Command, NeverRan, SandboxSpec, StopKind

from ..bridge import Bridge
from ._protocol import SlimeSandbox, command_line, life

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
    """How all sandboxes of one provider are reached."""

    bridge: Bridge
    user: str
    never_ran: Callable[[Exception], bool]

    def translated(self, error: Exception, what: str) -> Exception:
        """As the rules of sandboxes need it: ``NeverRan`` if it certainly had no effect."""
        kind = NeverRan if self.never_ran(error) else ToolError
        return kind(f"sandbox: {what}: {error!r}")


@final
@attrs.define(eq=False, repr=False)
class BridgedSandbox:
    """One sandbox, as ``trio_rollout.tools`` sees it (``SandboxBackend``)."""

    spec: SandboxSpec
    _sandbox: SlimeSandbox
    _access: Access
    spawn: None = attrs.field(default=None, init=False)
    _made: trio.Event = attrs.field(factory=trio.Event, init=False)
    _unwanted: trio.Event = attrs.field(factory=trio.Event, init=False)
    _over: trio.Event = attrs.field(factory=trio.Event, init=False)
    _failure: Exception | None = attrs.field(default=None, init=False)
    _leak: Exception | None = attrs.field(default=None, init=False)

    async def live(self) -> None:
        """Its whole life, in the provider's scope: made, wanted for a while, destroyed."""
        async with self._access.bridge.iterate(life, self._sandbox) as steps:
            self._failure = await anext(steps)
            self._made.set()
            if self._failure is None or not self._access.never_ran(self._failure):
                await self._unwanted.wait()
            self._leak = await self._destroyed(steps)

    async def _destroyed(self, steps: AsyncIterator[Exception | None]) -> Exception | None:
        """Destroy it, again where that fails; the last failure, None once it is gone."""
        error: Exception | None = None
        for attempt in range(1, _TRIES + 1):
            error = await anext(steps, None)
            if error is None:
                return None
            _log.warning("sandbox %s, try %d to destroy it: %r", self.spec.name, attempt, error)
            await wait_s(attempt * _PAUSE_S)
        return error

    def end(self, failure: Exception | None) -> None:
        """Nothing will become of it any more."""
        self._failure, self._leak = self._failure or failure, self._leak or failure
        self._made.set()
        self._over.set()

    async def made(self) -> None:
        """Wait until it is there.

        Raises:
          NeverRan: it could not be made, and certainly is not there.
          ToolError: it could not be made.

        """
        await self._made.wait()
        if self._failure is not None:
            raise self._access.translated(self._failure, "it could not be created") from self._failure

    def unwanted(self) -> None:
        """From now on it is to be destroyed."""
        self._unwanted.set()

    async def gone(self) -> Exception | None:
        """Wait for its end; what went wrong with it."""
        await self._over.wait()
        return self._leak

    def command(self, argv: Sequence[str], **_where: object) -> Command:
        """Nothing can be kept running in it between calls."""
        raise ToolError(f"sandbox {self.spec.name}: slime's protocol can't start {argv!r} and let it go on")

    async def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None,
        env: Mapping[str, str] | None,
        timeout: float | None,  # noqa: ASYNC109  part of the request
    ) -> Captured:
        """Run a command to its end, on a shell's line but quoted word for word. See ``SandboxBackend.exec``."""
        if timeout is not None and math.isinf(timeout):
            timeout = None
        line = command_line(argv, cwd=cwd, timeout=timeout)
        outer = self.spec.lifetime if timeout is None else timeout + _MARGIN_S
        answer: tuple[int, str, str] | None = None
        began = trio.current_time()
        with trio.move_on_after(outer + _MARGIN_S):
            try:
                # Not idempotent, as far as anybody knows: it must not be tried again where it may have run.
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
        """A file's text: slime's protocol knows no other files."""
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
    """What a command ended as. Without an answer its time was over; ``timeout`` says so with 124, killed with 137."""
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
