"""Sandboxes: where a rollout's commands run apart from everything else. Any provider, one set of rules.

1. A sandbox has its name before it exists, so that it can be destroyed whatever became of its creation.
2. Creating is shielded and bounded: a cancellation comes out once it is known what there is to destroy.
3. Destroying is shielded and bounded and changes no result; what could not be destroyed is counted and logged. Both are
   hurried once what surrounds them is cancelled: whoever leaves an engine waits no longer than its drain.
4. Only what certainly did not run is tried again (``NeverRan``); anything else might run twice.
5. Its lifetime at the provider follows from the rollout's deadlines: a host that dies leaves nothing for ever.
"""

import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TypeVar, final

import attrs
import trio

from ..._util.ports import Ports
from ..._util.time import backoff_s, wait_s
from ...errors import RolloutError, ToolError
from .._commands.captured import Captured
from .._commands.cleanup import WrapUp
from .._commands.command import Argv
from .._commands.expiration import as_seconds
from .._exec.sessions import ExecSessions, open_exec_sessions
from .._exec.values import ExecOutput
from .._limits import DEFAULT_LIMITS, ExecLimits
from .provider import NeverRan, SandboxBackend, SandboxProvider, SandboxSettings, SandboxSpec

_log = logging.getLogger("trio_rollout.tools")

T = TypeVar("T")


def lifetime(settings: SandboxSettings, remaining: float | None) -> float:
    """How long a sandbox may exist by itself: what remains of the rollout, and its making and its end around that."""
    return min(settings.longest_life, math.inf if remaining is None else remaining) + settings.create + settings.destroy


async def retried(call: Callable[[], Awaitable[T]], settings: SandboxSettings, ports: Ports) -> T:
    """Call it again while it certainly had no effect; translate what else goes wrong.

    Raises:
      ToolError: it failed. OSErrors about files and our own errors come out as themselves.

    """
    for attempt in range(1, settings.attempts + 1):
        try:
            return await call()
        except NeverRan as error:
            if attempt == settings.attempts:
                raise
            _log.info("a sandbox call did not run, try %d of %d: %s", attempt, settings.attempts, error)
        except (RolloutError, OSError, ValueError):
            raise
        except Exception as error:
            raise ToolError(f"sandbox: {error!r}; not tried again, since it may have run") from error
        delay = backoff_s(attempt, base=settings.backoff, longest=5.0, jitter=0.5, rng=ports.random)
        await wait_s(delay)
    raise AssertionError("the last attempt returns or raises")


@asynccontextmanager
async def owned_sandbox(
    provider: SandboxProvider, spec: SandboxSpec, settings: SandboxSettings, ports: Ports, wrap_up: WrapUp
) -> AsyncGenerator[SandboxBackend]:
    """Create a sandbox, and destroy it at the end of the block, also if its creation was cancelled or failed.

    Raises:
      ToolError: it could not be created in time, or at all. Infrastructure: the group is requeued.

    """
    exists = True
    try:
        try:
            backend = await _create(provider, spec, settings, ports, wrap_up)
        except NeverRan:
            exists = False
            raise
        yield backend
    finally:
        if exists:
            began = trio.current_time()
            destroy = partial(_destroy, provider, spec.name, settings, ports)
            # A part of the allowance is left for the processes of the rollout itself.
            gone = await wrap_up.shielded(destroy, settings.destroy, share=0.8)  # noqa: ASYNC102  it bounds itself
            if not gone:
                provider.counts.leaked += 1
                _log.warning("sandbox %s was not destroyed within %.1f s", spec.name, trio.current_time() - began)


async def _create(
    provider: SandboxProvider, spec: SandboxSpec, settings: SandboxSettings, ports: Ports, wrap_up: WrapUp
) -> SandboxBackend:
    made: list[SandboxBackend] = []

    async def create() -> None:
        try:
            made.append(await retried(lambda: provider.create(spec), settings, ports))
        except OSError as error:
            raise ToolError(f"sandbox {spec.name}: {error}") from error
        provider.counts.created += 1

    await wrap_up.shielded(create, settings.create, share=0.5)
    await trio.lowlevel.checkpoint()  # a cancellation that had to wait for the creation, or has hurried it
    if not made:
        raise ToolError(f"sandbox {spec.name}: not created within {settings.create} s")
    return made[0]


async def _destroy(provider: SandboxProvider, name: str, settings: SandboxSettings, ports: Ports) -> None:
    """Destroy it, trying again after any failure: destroying twice is harmless. Never raises one."""
    await trio.lowlevel.checkpoint()
    for attempt in range(1, settings.attempts + 1):
        try:
            await provider.destroy(name)
        except Exception as error:  # ruff: ignore[blind-except]  a failed cleanup must not change the result
            _log.warning("sandbox %s, try %d to destroy it: %r", name, attempt, error)
        else:
            provider.counts.destroyed += 1
            return
        await wait_s(backoff_s(attempt, base=settings.backoff, longest=2.0, jitter=0.5, rng=ports.random))
    provider.counts.leaked += 1


@final
@attrs.define(eq=False, repr=False)
class Sandbox:
    """A place for commands and files that is gone after the block that opened it. Made by ``open_sandbox``."""

    name: str
    _backend: SandboxBackend
    _sessions: ExecSessions | None
    _budget: Callable[[float | None], float | None]
    _retried: Callable[[Callable[[], Awaitable[Captured]]], Awaitable[Captured]]
    _on_output: Callable[[], None]

    @property
    def sessions(self) -> ExecSessions:
        """The sandbox's exec sessions.

        Raises:
          ToolError: its provider has none.

        """
        if self._sessions is None:
            raise ToolError(f"sandbox {self.name}: its provider can't keep processes between calls")
        return self._sessions

    async def exec(
        self,
        argv: Argv,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  expiry is a result here, unlike a cancelled scope
    ) -> Captured:
        """Run a command to its end, in at most ``timeout`` seconds and what remains of the rollout.

        Cancelled, it is killed. A command over its limit is a result.

        Raises:
          ToolError: the sandbox failed; the command may have run, unless it is a NeverRan.

        """
        limit = self._budget(as_seconds(timeout))
        result = await self._retried(lambda: self._backend.exec(argv, cwd=cwd, env=env, timeout=limit))
        self._on_output()
        return result

    async def start(
        self,
        argv: Argv,
        *,
        call_id: str = "",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        tty: bool = False,
        yield_time: float = 0.25,
    ) -> ExecOutput:
        """Start a process that outlives the call: an exec session, to be polled through ``sessions``.

        Raises:
          CreateProcessError, ToolError: it could not be started.

        """
        return await self.sessions.exec_command(argv, call_id=call_id, cwd=cwd, env=env, tty=tty, yield_time=yield_time)

    async def read_file(self, path: str) -> bytes:
        """A file's content.

        Raises:
          OSError: there is no such file in the sandbox: the policy's doing.
          ToolError: the sandbox failed.

        """
        return await self._backend.read_file(path)

    async def write_file(self, path: str, content: str | bytes) -> None:
        """Write a file at once: nobody in the sandbox sees a half of it.

        Raises:
          OSError, ToolError: as ``read_file``.

        """
        await self._backend.write_file(path, content.encode() if isinstance(content, str) else content)


def _sessions_of(
    backend: SandboxBackend, limits: ExecLimits, ports: Ports, on_output: Callable[[], None]
) -> AbstractAsyncContextManager[ExecSessions] | None:
    if backend.spawn is None:
        return None
    return open_exec_sessions(backend.spawn, command=backend.command, limits=limits, ports=ports, on_output=on_output)


@asynccontextmanager
async def open_sandbox(
    provider: SandboxProvider,
    *,
    label: str = "rollout",
    budget: Callable[[float | None], float | None] = lambda asked: asked,
    settings: SandboxSettings | None = None,
    limits: ExecLimits | None = None,
    ports: Ports | None = None,
    env: Mapping[str, str] | None = None,
    on_output: Callable[[], None] = lambda: None,
    wrap_up: WrapUp | None = None,
) -> AsyncGenerator[Sandbox]:
    """Have a sandbox for the length of a block.

    ``label`` is the run's, for ``provider.sweep``. ``budget`` cuts times to what remains of the rollout, ``on_output`` is
    told of progress, and ``wrap_up`` hurries a cancelled creation and its end (``rollout.tools.open_sandbox`` passes all
    three). Entering blocks for the creation, at most ``settings.create``; cancelled meanwhile, it waits until it is known
    what there is to destroy. Leaving kills what runs and destroys it, shielded, within ``settings.destroy``.

    Raises:
      ToolError: it could not be created. Infrastructure: the group is requeued.

    """
    settings, limits, ports = settings or SandboxSettings(), limits or DEFAULT_LIMITS, ports or Ports()
    name = f"{label}-{ports.new_rid()}"
    spec = SandboxSpec(
        name=name, label=label, lifetime=lifetime(settings, budget(None)), env=dict(env or {}), on_output=on_output
    )

    async def retry(call: Callable[[], Awaitable[Captured]]) -> Captured:
        return await retried(call, settings, ports)

    async with AsyncExitStack() as stack:
        owned = owned_sandbox(provider, spec, settings, ports, wrap_up or WrapUp())
        backend = await stack.enter_async_context(owned)
        opened = _sessions_of(backend, limits, ports, on_output)
        sessions = None if opened is None else await stack.enter_async_context(opened)
        yield Sandbox(name, backend, sessions, budget, retry, on_output)
