"""Sandboxes: separate places for a rollout's commands and files. One set of rules for all providers.

1. A sandbox has its name before it exists, so that it can be destroyed also if its creation fails or is cancelled.
2. The creation is shielded and bounded: a cancellation goes on once it is known if there is a sandbox to destroy.
3. The destruction is shielded and bounded and changes no result; a failure is counted and logged. Both use the rollout's
   cleanup budget once the rollout is cancelled, so that leaving an engine takes no longer than its drain.
4. Only a request that certainly had no effect (``NeverRan``) is tried again; any other might run twice.
5. The lifetime at the provider follows from the rollout's deadlines: a host that dies leaves no sandbox forever.
"""

import itertools
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TypeVar, final

import attrs
import trio

from ..._util.ports import Ports
from ..._util.time import backoff_s, retried
from ..._util.user_code import ends_the_process
from ...errors import RolloutError, ToolError
from .._cleanup import CleanupBudget
from .._commands.capture import Captured, as_seconds
from .._commands.command import Argv
from .._exec.sessions import ExecSessions, open_exec_sessions
from .._exec.values import ExecOutput
from .._limits import DEFAULT_LIMITS, ExecLimits
from .provider import NeverRan, SandboxBackend, SandboxProvider, SandboxSettings, SandboxSpec, SessionBackend

_log = logging.getLogger("trio_rollout.tools")

T = TypeVar("T")


def lifetime(settings: SandboxSettings, remaining: float | None) -> float:
    """Return the seconds that a sandbox may exist: the rollout's remaining time, and its creation and destruction around."""
    return min(settings.longest_life, math.inf if remaining is None else remaining) + settings.create + settings.destroy


async def repeated(call: Callable[[], Awaitable[T]], settings: SandboxSettings, ports: Ports) -> T:
    """Repeat a call while it certainly had no effect; translate other failures.

    Raises:
      ToolError: the call failed. OSErrors about files and this package's errors come out unchanged.
    """
    tries = itertools.count(1)

    def wait_after(error: BaseException) -> float | None:
        if not isinstance(error, NeverRan) or (attempt := next(tries)) == settings.attempts:
            return None
        _log.info("a sandbox call did not run, try %d of %d: %s", attempt, settings.attempts, error)
        return backoff_s(attempt, base=settings.backoff, longest=5.0, jitter=0.5, rng=ports.random)

    try:
        return await retried(call, wait_after)
    except (RolloutError, OSError, ValueError):
        raise
    except Exception as error:
        raise ToolError(f"sandbox: {error!r}; not tried again, since it may have run") from error


@asynccontextmanager
async def owned_sandbox(
    provider: SandboxProvider, spec: SandboxSpec, settings: SandboxSettings, ports: Ports, cleanup: CleanupBudget
) -> AsyncGenerator[SandboxBackend]:
    """Create a sandbox, and destroy it at the end of the block, also if its creation was cancelled or failed."""
    exists = True
    try:
        try:
            backend = await _create(provider, spec, settings, ports, cleanup)
        except NeverRan:
            exists = False
            raise
        yield backend
    finally:
        if exists:
            began = trio.current_time()
            destroy = partial(_destroy, provider, spec.name, settings, ports)
            # A part of the budget is left for the processes of the rollout itself.
            destroyed = await cleanup.shielded(destroy, settings.destroy, share=0.8)  # noqa: ASYNC102  it bounds itself
            if not destroyed:
                provider.counts.leaked += 1
                _log.warning("sandbox %s was not destroyed within %.1f s", spec.name, trio.current_time() - began)


async def _create(
    provider: SandboxProvider, spec: SandboxSpec, settings: SandboxSettings, ports: Ports, cleanup: CleanupBudget
) -> SandboxBackend:
    made: list[SandboxBackend] = []

    async def create() -> None:
        try:
            made.append(await repeated(lambda: provider.create(spec), settings, ports))
        except OSError as error:
            raise ToolError(f"sandbox {spec.name}: {error}") from error
        provider.counts.created += 1

    await cleanup.shielded(create, settings.create, share=0.5)
    await trio.lowlevel.checkpoint()  # raises a cancellation that waited for the creation
    if not made:
        raise ToolError(f"sandbox {spec.name}: not created within {settings.create} s")
    return made[0]


async def _destroy(provider: SandboxProvider, name: str, settings: SandboxSettings, ports: Ports) -> None:
    """Destroy a sandbox, and try again after any failure: to destroy it twice is harmless. Never raises a failure."""
    await trio.lowlevel.checkpoint()
    tries = itertools.count(1)

    def wait_after(error: BaseException) -> float | None:
        attempt = next(tries)
        _log.warning("sandbox %s, try %d to destroy it: %r", name, attempt, error)
        if attempt == settings.attempts:
            return None
        return backoff_s(attempt, base=settings.backoff, longest=2.0, jitter=0.5, rng=ports.random)

    try:
        await retried(lambda: provider.destroy(name), wait_after)
    except BaseException as error:  # noqa: ASYNC103  a failed cleanup must not change the result
        if ends_the_process(error):
            raise
        provider.counts.leaked += 1
    else:
        provider.counts.destroyed += 1


@final
@attrs.define(eq=False, repr=False)
class Sandbox:
    """A place for commands and files that exists until its block is left. Made by ``rollout.tools.open_sandbox``."""

    name: str
    _backend: SandboxBackend
    _sessions: ExecSessions | None
    _settings: SandboxSettings
    _ports: Ports
    _budget: Callable[[float | None], float | None]
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
        """Run a command to its end, in at most ``timeout`` seconds and the rollout's remaining time.

        Cancelled, the command is killed. A command over its limit is a result.

        Raises:
          ToolError: the sandbox failed; the command may have run, unless the error is a NeverRan.
        """
        limit = self._budget(as_seconds(timeout))
        run = partial(self._backend.exec, argv, cwd=cwd, env=env, timeout=limit)
        result = await repeated(run, self._settings, self._ports)
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
          SpawnError, ToolError: the process could not be started.
        """
        return await self.sessions.exec_command(argv, call_id=call_id, cwd=cwd, env=env, tty=tty, yield_time=yield_time)

    async def read_file(self, path: str) -> bytes:
        """Return a file's content.

        Raises:
          OSError: there is no such file in the sandbox: the policy is at fault.
          ToolError: the sandbox failed.
        """
        return await self._backend.read_file(path)

    async def write_file(self, path: str, content: str | bytes) -> None:
        """Write a file in one step: no command in the sandbox sees a part of it.

        Raises:
          OSError, ToolError: as ``read_file``.
        """
        await self._backend.write_file(path, content.encode() if isinstance(content, str) else content)


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
    cleanup: CleanupBudget | None = None,
) -> AsyncGenerator[Sandbox]:
    """Have a sandbox for the length of a block, as ``RolloutTools.open_sandbox`` says, which calls this for a rollout.

    ``budget`` cuts times to the rollout's remaining time, ``on_output`` is called at each progress, and ``cleanup`` bounds
    creation and destruction once the rollout is cancelled.
    """
    settings, limits, ports = settings or SandboxSettings(), limits or DEFAULT_LIMITS, ports or Ports()
    name = f"{label}-{ports.new_rid()}"
    spec = SandboxSpec(
        name=name, label=label, lifetime=lifetime(settings, budget(None)), env=dict(env or {}), on_output=on_output
    )
    async with AsyncExitStack() as stack:
        owned = owned_sandbox(provider, spec, settings, ports, cleanup or CleanupBudget())
        backend = await stack.enter_async_context(owned)
        sessions: ExecSessions | None = None
        if isinstance(backend, SessionBackend):
            opened = open_exec_sessions(
                backend.spawn, command=backend.command, limits=limits, ports=ports, on_output=on_output
            )
            sessions = await stack.enter_async_context(opened)
        yield Sandbox(name, backend, sessions, settings, ports, budget, on_output)
