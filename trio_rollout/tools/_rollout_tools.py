"""The tools of one rollout: everything that is started here dies with the block, however far it flees.

Owns the supervisor of the rollout's commands. Times nest: what a tool gets is what ``Deadlines.tool`` allows and what
remains of the rollout's own time, less a margin in which its result still counts.
"""

import math
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from os import PathLike
from typing import final

import attrs
import trio

from .._core.enums import Leftovers
from .._core.settings import Deadlines
from .._util.ports import Ports
from ._commands.capture import CapturePlan, CapturePolicy, OnChunk, capture, checked
from ._commands.captured import Captured
from ._commands.cleanup import WrapUp
from ._commands.command import Argv, Command
from ._commands.expiration import Expiration, as_events, as_seconds
from ._dispatch.dispatch import OnTiming, ToolRuntime
from ._dispatch.tool import Hooks, LifecycleListener, Tool, ToolRegistry, as_registry
from ._exec.pause import PauseState
from ._exec.sessions import ExecSessions, open_exec_sessions
from ._exec.values import SessionListener
from ._limits import DEFAULT_LIMITS, ExecLimits
from ._network.policy import NetworkPolicy
from ._sandboxes.local import LocalSandboxes
from ._sandboxes.provider import SandboxProvider, SandboxSettings
from ._sandboxes.sandbox import Sandbox, open_sandbox
from ._supervisor.supervisor import Supervisor, end_supervisor

# What a tool leaves of the rollout's time, so that its result can still become a turn: a tenth, but no more than this.
_MARGIN_S = 1.0
_DEADLINES = Deadlines()


def tool_limit(asked: float | None, allowed: float | None) -> float | None:
    """Seconds that a tool may take: what its caller asks, else what the settings allow (None or <= 0: any)."""
    if asked is not None:
        return as_seconds(asked)
    return allowed if allowed is not None and allowed > 0 else None


def latest_end(now: float, deadline: float) -> float:
    """When a tool that is started now must have ended: before the rollout's deadline by the margin."""
    return deadline - min(_MARGIN_S, max(0.0, deadline - now) / 10)


@final
@attrs.define(eq=False, repr=False)
class RolloutTools:
    """What ``rollout.tools`` is. Made by ``open_rollout_tools``."""

    _supervisor: Supervisor
    _deadlines: Deadlines
    _deadline: float
    _given: ExecLimits
    _teardown: float
    _on_output: Callable[[], None]
    _ports: Ports
    _wrap_up: WrapUp

    async def aclose(self) -> None:
        """Kill and reap everything that was started here: what leaving the scope of these tools does.

        Blocks until that is done, shielded, as ``open_rollout_tools`` says. No command can be started afterwards.
        """
        await end_supervisor(self._supervisor, self._teardown, self._wrap_up)

    @property
    def _limits(self) -> ExecLimits:
        """The limits that were given, with the teardown that the rollout has time for: made when a tool is used, not before."""
        return attrs.evolve(self._given, teardown=self._teardown)

    def budget(self, asked: float | None = None) -> float | None:
        """Seconds that a tool started now may take; None without any limit."""
        now = trio.current_time()
        limit = tool_limit(asked, self._deadlines.tool)
        least = min(math.inf if limit is None else limit, max(0.0, latest_end(now, self._deadline) - now))
        return None if math.isinf(least) else least

    async def run_captured(
        self,
        argv: Argv,
        *,
        cwd: str | PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  expiry is a result here, unlike a cancelled scope
        cancel: trio.Event | Sequence[trio.Event] = (),
        leftovers: Leftovers = Leftovers.KILL,
        policy: CapturePolicy = CapturePolicy.SHELL,
        on_chunk: OnChunk | None = None,
        check: bool = False,
    ) -> Captured:
        """Run a command to its end: ``trio_rollout.tools.run_captured``, bound to this rollout.

        ``timeout`` None is ``Deadlines.tool``; either is cut to what remains of the rollout. Nothing that comes from the
        command survives it, ``setsid`` or not; with ``Leftovers.KEEP`` it survives until the rollout ends.

        Raises:
          SpawnError: it could not be started. ``command_is_wrong`` tells a bad command from a host in trouble.
          SupervisorLost: what contains the rollout's commands has died.
          ValueError: argv is empty.
          CommandTimeout, CommandSignalled: with ``check``.
        """
        plan = CapturePlan(
            expiration=self._expiration(timeout, as_events(cancel)),
            policy=policy,
            leftovers=leftovers,
            limits=self._limits,
            on_chunk=on_chunk,
            on_output=self._on_output,
        )
        command = Command(argv=argv, cwd=cwd, env=env)
        result = await capture(self._supervisor.spawn, command, plan)
        self._on_output()  # a command that says nothing has got somewhere all the same
        return checked(result, command) if check else result

    def _expiration(self, asked: float | None, cancels: tuple[trio.Event, ...]) -> Expiration:
        until = latest_end(trio.current_time(), self._deadline)
        return Expiration(timeout=tool_limit(asked, self._deadlines.tool), until=until, cancels=cancels)

    def open_sessions(
        self,
        *,
        network: NetworkPolicy | None = None,
        pause: PauseState | None = None,
        listeners: Sequence[SessionListener] = (),
        drain_timeout: float = 5.0,
    ) -> AbstractAsyncContextManager[ExecSessions]:
        """Exec sessions inside this rollout: ``async with rollout.tools.open_sessions() as sessions``.

        A session dies with the call that is cancelled, unless the limits say otherwise, and with the block in any case.
        """
        return open_exec_sessions(
            self._supervisor.spawn,
            limits=self._limits,
            network=network,
            pause=pause,
            listeners=tuple(listeners),
            on_output=self._on_output,
            ports=self._ports,
            drain_timeout=drain_timeout,
        )

    def open_sandbox(
        self,
        provider: SandboxProvider | None = None,
        *,
        label: str = "rollout",
        env: Mapping[str, str] | None = None,
        settings: SandboxSettings | None = None,
    ) -> AbstractAsyncContextManager[Sandbox]:
        """A sandbox for this rollout: a local one, unless there is a provider of others.

        Times nest as for commands: its lifetime and each command's limit follow from what remains of the rollout.
        """
        return open_sandbox(
            provider if provider is not None else LocalSandboxes(limits=self._limits),
            label=label,
            budget=self.budget,
            settings=settings,
            limits=self._limits,
            ports=self._ports,
            env=env,
            on_output=self._on_output,
            wrap_up=self._wrap_up,
        )

    def runtime(
        self,
        tools: ToolRegistry | Iterable[Tool],
        *,
        listeners: Sequence[LifecycleListener] = (),
        hooks: Hooks | None = None,
        on_timing: OnTiming | None = None,
    ) -> ToolRuntime:
        """Dispatch for one sampling step's calls of these tools."""
        return ToolRuntime(
            as_registry(tools),
            listeners=listeners,
            hooks=hooks,
            teardown_timeout=self._limits.teardown,
            on_timing=on_timing,
        )


def new_rollout_tools(
    *,
    deadline: float = math.inf,
    deadlines: Deadlines | None = None,
    limits: ExecLimits | None = None,
    on_output: Callable[[], None] = lambda: None,
    ports: Ports | None = None,
) -> RolloutTools:
    """Make one rollout's tools, as ``open_rollout_tools`` does, for a caller who closes them."""
    limits = limits or DEFAULT_LIMITS
    wrap_up = WrapUp() if deadlines is None else WrapUp(deadlines.abort)
    teardown = min(limits.teardown, wrap_up.seconds)
    return RolloutTools(
        Supervisor(limits, teardown),
        deadlines or _DEADLINES,
        deadline,
        limits,
        teardown,
        on_output,
        ports or Ports(),
        wrap_up,
    )


@asynccontextmanager
async def open_rollout_tools(
    *,
    deadline: float = math.inf,
    deadlines: Deadlines | None = None,
    limits: ExecLimits | None = None,
    on_output: Callable[[], None] = lambda: None,
    ports: Ports | None = None,
) -> AsyncGenerator[RolloutTools]:
    """Give one rollout its tools for the length of a block. Inside an engine ``rollout.tools`` has them already.

    ``deadline`` is when the rollout must be over, on Trio's clock. ``on_output`` is called with each piece of output and at
    the end of each command: both count as progress. Entering costs nothing: the process that contains the commands is
    started with the first one. Leaving blocks until everything that was started is dead and reaped, shielded, within
    ``limits.teardown`` and, cancelled, ``deadlines.abort``, the time that an engine leaves to a cancelled rollout; what takes
    longer is killed without us.
    """
    tools = new_rollout_tools(deadline=deadline, deadlines=deadlines, limits=limits, on_output=on_output, ports=ports)
    try:
        yield tools
    finally:
        await tools.aclose()  # noqa: ASYNC102  it shields and bounds itself
