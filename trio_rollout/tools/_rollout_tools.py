"""The tools of one rollout: every process that is started here dies with the block, also one that left its group.

``RolloutTools`` owns the supervisor of the rollout's commands. Times nest: a tool gets the time that ``Deadlines.tool`` allows,
and at most the rollout's remaining time, less a margin in which its result still counts.
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
from .._util.arguments import require_trio
from .._util.ports import Ports
from ._cleanup import CleanupBudget
from ._commands.capture import Captured, CapturePlan, Expiration, OnChunk, capture
from ._commands.command import Argv, Command
from ._dispatch.dispatch import OnTiming, ToolRuntime
from ._dispatch.tool import Hooks, LifecycleListener, Tool
from ._exec.sessions import ExecSessions, open_exec_sessions
from ._exec.values import ExecSessionEnd
from ._limits import DEFAULT_LIMITS, ExecLimits
from ._network import NetworkPolicy
from ._sandboxes.local import LocalSandboxes
from ._sandboxes.provider import SandboxProvider, SandboxSettings
from ._sandboxes.sandbox import Sandbox, open_sandbox
from ._supervisor.supervisor import Supervisor

# A tool leaves a tenth of the rollout's time, but no more than this, so that its result can still become a turn.
_MARGIN_S = 1.0
_DEADLINES = Deadlines()


@final
@attrs.define(eq=False, repr=False)
class RolloutTools:
    """The tools of one rollout: ``rollout.tools``. Made by ``open_rollout_tools`` outside an engine."""

    _deadline: float = attrs.field(default=math.inf, kw_only=True, alias="deadline")
    _deadlines: Deadlines | None = attrs.field(default=None, kw_only=True, alias="deadlines")
    _given: ExecLimits = attrs.field(default=DEFAULT_LIMITS, kw_only=True, alias="limits")
    _on_output: Callable[[], None] = attrs.field(default=lambda: None, kw_only=True, alias="on_output")
    _ports: Ports = attrs.field(factory=Ports, kw_only=True, alias="ports")
    _cleanup: CleanupBudget = attrs.field(init=False)
    _teardown: float = attrs.field(init=False)
    _supervisor: Supervisor = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._cleanup = CleanupBudget() if self._deadlines is None else CleanupBudget(self._deadlines.abort)
        self._teardown = min(self._given.teardown, self._cleanup.seconds)
        self._supervisor = Supervisor(self._given, self._teardown)

    async def aclose(self) -> None:
        """Kill and reap every process that was started here, as leaving ``open_rollout_tools`` does.

        Blocks until that is done, shielded. No command can be started afterwards.
        """
        await self._supervisor.end(self._cleanup)

    @property
    def _limits(self) -> ExecLimits:
        """The given limits, with the teardown that the rollout has time for. Made when a tool is used, not before."""
        return attrs.evolve(self._given, teardown=self._teardown)

    def _expiration(self, asked: float | None, cancel: trio.Event | Sequence[trio.Event] = ()) -> Expiration:
        """Return the limits of a tool that is started now; without a time of its caller (None) those of the settings."""
        allowed = (self._deadlines or _DEADLINES).tool
        limit = (allowed if allowed and allowed > 0 else None) if asked is None else asked
        margin = min(_MARGIN_S, max(0.0, self._deadline - trio.current_time()) / 10)
        return Expiration(timeout=limit, until=self._deadline - margin, cancels=cancel)

    def budget(self, asked: float | None = None) -> float | None:
        """Return the seconds that a tool started now may take; None without a limit."""
        limits = self._expiration(asked)
        left = max(0.0, limits.until - trio.current_time())
        least = left if limits.timeout is None else min(limits.timeout, left)
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
        on_chunk: OnChunk | None = None,
    ) -> Captured:
        """Run a command to its end: ``trio_rollout.tools.run_captured``, bound to this rollout.

        ``timeout`` None is ``Deadlines.tool``; either is cut to the rollout's remaining time. No process that comes from the
        command survives it, also after ``setsid``; with ``Leftovers.KEEP`` such processes survive until the rollout ends.

        Raises:
          SpawnError: the command could not be started. ``command_is_wrong`` is True for a wrong command, else the host failed.
          SupervisorLost: the supervisor of the rollout's commands has died.
          ValueError: argv is empty.
        """
        plan = CapturePlan(
            expiration=self._expiration(timeout, cancel),
            leftovers=leftovers,
            limits=self._limits,
            on_chunk=on_chunk,
            on_output=self._on_output,
        )
        result = await capture(self._supervisor.spawn, Command(argv=argv, cwd=cwd, env=env), plan)
        self._on_output()  # the end of a silent command is progress, too
        return result

    def open_sessions(
        self,
        *,
        network: NetworkPolicy | None = None,
        on_end: Callable[[ExecSessionEnd], None] = lambda _end: None,
        drain_timeout: float = 5.0,
    ) -> AbstractAsyncContextManager[ExecSessions]:
        """Own exec sessions inside this rollout: ``async with rollout.tools.open_sessions() as sessions``.

        A session dies with a call that is cancelled, unless the limits say otherwise, and with the block in any case. Each
        session gets what ``network`` grants. ``on_end`` is called at each session's end; it must not block. Leaving blocks:
        calls under way in other tasks get ``drain_timeout`` seconds, then every process is killed and reaped.
        """
        return open_exec_sessions(
            self._supervisor.spawn,
            limits=self._limits,
            network=network,
            on_output=self._on_output,
            on_end=on_end,
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
        """Have a sandbox for this rollout for the length of a block: a local one, unless ``provider`` makes others.

        Times nest as for commands: the sandbox's lifetime and each command's limit follow from the rollout's remaining time.
        ``label`` is the run's, for ``provider.sweep``. Entering blocks for the creation, at most ``settings.create``; cancelled
        meanwhile, it waits until it is known if there is a sandbox to destroy. Leaving kills the running processes and destroys
        the sandbox, shielded, within ``settings.destroy``; once the rollout is cancelled, within ``Deadlines.abort``.

        Raises:
          ToolError: the sandbox could not be created. Infrastructure: the sample runs again.
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
            cleanup=self._cleanup,
        )

    def runtime(
        self,
        tools: Iterable[Tool],
        *,
        listeners: Sequence[LifecycleListener] = (),
        hooks: Hooks | None = None,
        on_timing: OnTiming | None = None,
    ) -> ToolRuntime:
        """Return the dispatch of one sampling step's calls of these tools. See ``ToolRuntime``."""
        return ToolRuntime(
            tools,
            listeners=listeners,
            hooks=hooks,
            teardown_timeout=self._limits.teardown,
            on_timing=on_timing,
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

    ``deadline`` is the rollout's, on Trio's clock. ``on_output`` is called at each piece of output and at the end of each
    command: both count as progress. Entering costs nothing: the process that contains the commands starts with the first
    command. Leaving blocks until every process is dead and reaped, shielded, within ``limits.teardown`` and, cancelled, within
    ``deadlines.abort``, the time that an engine leaves to a cancelled rollout. The supervisor kills what takes longer.
    """
    require_trio("open_rollout_tools")
    tools = RolloutTools(
        deadline=deadline,
        deadlines=deadlines,
        limits=limits or DEFAULT_LIMITS,
        on_output=on_output,
        ports=ports or Ports(),
    )
    try:
        yield tools
    finally:
        await tools.aclose()  # noqa: ASYNC102  it shields and bounds itself
