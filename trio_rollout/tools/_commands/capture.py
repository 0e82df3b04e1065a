"""Captured commands: a command runs to its end, its output is kept, and no process is left behind.

``capture`` owns one process group for the length of one call. Two stops belong to it: the *expiry* of a time limit (SIGKILL at
once) and a *cancel event* (SIGTERM, a grace, SIGKILL). Both are results. Which one was met is a pure decision of ``Expiration``,
so that a race is settled by rule and not by the scheduler. An ambient cancellation kills like a cancel event, and then goes on
as Cancelled.
"""

import enum
import math
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from typing import TypeAlias

import attrs
import trio

from ..._core.arrays import brief
from ..._core.enums import Leftovers
from ..._util.exception_groups import bare_errors
from ...errors import ToolError
from .._limits import DEFAULT_LIMITS, ExecLimits
from .child import Child, ExitStatus, Spawn, spawn_direct
from .command import Argv, Command
from .output import HeadBuffer, aggregate


class StopKind(enum.Enum):
    """The stop that a captured command met."""

    EXITED = "exited"
    """The command exited by itself; a signal that we did not send may have killed it."""
    TIMED_OUT = "timed_out"
    """The command reached its time limit and its group was killed at once. Exit code 124."""
    CANCELLED = "cancelled"
    """A cancel event was set: SIGTERM, a short grace, SIGKILL. Exit code 1."""


def as_seconds(asked: float | None) -> float | None:
    """Return a requested time unchanged. Raises ValueError for NaN, which would be neither over nor not over."""
    if asked is not None and math.isnan(asked):
        raise ValueError(f"seconds: got {asked!r}, allowed: a number, or None where that means no limit")
    return asked


def _as_events(cancel: trio.Event | Sequence[trio.Event]) -> tuple[trio.Event, ...]:
    return (cancel,) if isinstance(cancel, trio.Event) else tuple(cancel)


@attrs.frozen(kw_only=True)
class Expiration:
    """The limits of a captured command: ``timeout`` seconds after its start (None: no limit), the time ``until`` on Trio's
    clock, and ``cancels``, of which any event that is set cancels the command. Raises ValueError if ``timeout`` is NaN.
    """

    timeout: float | None = attrs.field(default=None, converter=as_seconds)
    until: float = math.inf
    cancels: tuple[trio.Event, ...] = attrs.field(default=(), converter=_as_events)

    def classify(self, *, exited: bool) -> StopKind:
        """Return the stop that was met, at a moment when at least one is due.

        An observed exit is kept, whatever else is due. A cancellation wins over a timeout that is due at the same instant.
        A scope's ``cancelled_caught`` must not decide: it can be true although the event is set.
        """
        if exited:
            return StopKind.EXITED
        return StopKind.CANCELLED if any(event.is_set() for event in self.cancels) else StopKind.TIMED_OUT

    def deadline(self, now: float) -> float:
        """Return the deadline on Trio's clock for a command that starts now."""
        return min(self.until, math.inf if self.timeout is None else now + max(0.0, self.timeout))


TIMEOUT_EXIT_CODE = 124
CANCELLED_EXIT_CODE = 1

OnChunk: TypeAlias = Callable[[str, bytes], None]
"""Receives each chunk of output: "stdout" or "stderr", and the bytes."""


@attrs.frozen(kw_only=True)
class Captured:
    """The end of a captured command, and its output.

    ``exit_code`` is 124 after a timeout and 1 after a cancel event. A command may return these codes itself, so read ``stop``
    or ``timed_out``. ``aggregated`` is stdout, then stderr. A stream is not ``complete`` if a process still held it open at the
    end of the drain, or if more was written than is kept (``omitted_bytes``).
    """

    exit_code: int
    stop: StopKind
    signal: int | None
    stdout: bytes = attrs.field(repr=brief)
    stderr: bytes = attrs.field(repr=brief)
    aggregated: bytes = attrs.field(repr=brief)
    duration: float
    stdout_complete: bool = True
    stderr_complete: bool = True
    omitted_bytes: int = 0
    unreaped: bool = False
    """True if it was not confirmed in time that every process is dead."""

    @property
    def timed_out(self) -> bool:
        """True if the command's own time limit ended it: an observation for the model, not a failure of the rollout."""
        return self.stop is StopKind.TIMED_OUT

    @property
    def stdout_text(self) -> str:
        """Stdout as UTF-8; invalid bytes are replaced."""
        return self.stdout.decode(errors="replace")

    @property
    def stderr_text(self) -> str:
        """Stderr as UTF-8; invalid bytes are replaced."""
        return self.stderr.decode(errors="replace")

    def model_text(self) -> str:
        """Return the text for the model: both streams, after a line about the timeout if there was one."""
        text = self.aggregated.decode(errors="replace")
        if not (self.stdout_complete and self.stderr_complete):
            text += f"\n[capture stopped: {self.omitted_bytes} bytes omitted, or a process still held the output open]"
        if self.timed_out:
            text = f"command timed out after {round(self.duration * 1000)} milliseconds\n{text}"
        return text


@attrs.frozen(kw_only=True)
class CapturePlan:
    """Everything about one captured command except the command itself."""

    expiration: Expiration = attrs.field(factory=Expiration)
    leftovers: Leftovers = Leftovers.KILL
    limits: ExecLimits = attrs.field(factory=ExecLimits)
    on_chunk: OnChunk | None = None
    on_output: Callable[[], None] = lambda: None
    """Called at each read, without a limit: output is progress, also after ``on_chunk`` has had its last call."""

    @property
    def drain(self) -> float:
        """Seconds to wait for the end of output after the exit. Leftovers that are kept may hold it open forever."""
        return self.limits.io_drain if self.leftovers is Leftovers.KILL else self.limits.post_exit_close


class _Output:
    """Reads one stream to its end, beyond what is kept, so that the writer never waits."""

    def __init__(self, name: str, plan: CapturePlan) -> None:
        self.buffer = HeadBuffer(plan.limits.capture_bytes)
        self.complete = False
        self._name, self._plan = name, plan
        self._deltas = 0

    async def read(self, stream: trio.abc.ReceiveStream) -> None:
        while chunk := await stream.receive_some(self._plan.limits.delta_bytes):
            self.buffer.append(chunk)
            self._plan.on_output()
            if self._plan.on_chunk is not None and self._deltas < self._plan.limits.max_deltas:
                self._deltas += 1
                self._plan.on_chunk(self._name, bytes(chunk))
        self.complete = not self.buffer.dropped


async def _until_due(deadline: float, cancels: tuple[trio.Event, ...], call: Callable[[], Awaitable[object]]) -> None:
    """Run ``call`` to its end, at most until ``deadline``, or until one of ``cancels`` is set."""

    async def cancel_when_set(event: trio.Event) -> None:
        await event.wait()
        race.cancel_scope.cancel("a cancel event of the command was set")

    with bare_errors(), trio.CancelScope(deadline=deadline):
        async with trio.open_nursery() as race:
            for event in cancels:
                race.start_soon(cancel_when_set, event)
            await call()
            race.cancel_scope.cancel("nothing is left to cancel")


async def capture(spawn: Spawn, command: Command, plan: CapturePlan) -> Captured:
    """Run ``command`` through ``spawn`` to its end. See ``run_captured``."""
    child = await _start(spawn, command, plan)
    if child is None:
        stop = plan.expiration.classify(exited=False)
        return _captured(plan, stop, None, (_Output("stdout", plan), _Output("stderr", plan)), 0.0, unreaped=False)
    return await _run(child, plan)  # no checkpoint before: the first act of _run is to own the child


async def _start(spawn: Spawn, command: Command, plan: CapturePlan) -> Child | None:
    """Start the command; return None if a cancel event was set, or the time was over, before the command ran."""
    made: list[Child] = []

    async def start() -> None:
        made.append(await spawn(command))

    try:
        await _until_due(plan.expiration.until, plan.expiration.cancels, start)
    except BaseException:
        for child in made:
            with trio.move_on_after(plan.limits.teardown, shield=True):
                await child.release()
            child.close()
        raise
    return made[0] if made else None


async def _run(child: Child, plan: CapturePlan) -> Captured:
    started = trio.current_time()  # not before: a host that starts processes slowly is not the command's fault
    out, err = _Output("stdout", plan), _Output("stderr", plan)
    stop: StopKind | None = None
    reaped = False
    try:
        with bare_errors():
            async with trio.open_nursery() as readers:
                readers.start_soon(out.read, child.stdout)
                if child.stderr is not None:
                    readers.start_soon(err.read, child.stderr)
                stop = await _wait_for_stop(child, plan, started)
                duration = trio.current_time() - started
                if stop is not StopKind.EXITED:
                    await _kill(child, plan, stop)
                readers.cancel_scope.deadline = trio.current_time() + plan.drain
    finally:
        with trio.move_on_after(plan.limits.term_grace + plan.limits.teardown, shield=True):
            if stop is None:
                with suppress(ToolError):  # the supervisor is gone: the error that ended the run says so
                    await _terminate(child, plan.limits.term_grace)
            keep_running = stop is StopKind.EXITED and plan.leftovers is Leftovers.KEEP
            reaped = await child.release(keep_running=keep_running)
        child.close()
    # pyright takes a scope that unwraps groups for one that swallows errors.
    return _captured(plan, stop, child.exited(), (out, err), duration, unreaped=not reaped)  # pyright: ignore[reportArgumentType]


async def _wait_for_stop(child: Child, plan: CapturePlan, started: float) -> StopKind:
    await _until_due(plan.expiration.deadline(started), plan.expiration.cancels, child.wait_exited)
    return plan.expiration.classify(exited=child.exited() is not None)


async def _kill(child: Child, plan: CapturePlan, stop: StopKind) -> None:
    """Kill the command as its kind of stop asks.

    The kill comes before the drain: where escaped descendants are contained, no process is left then that holds the output open.
    """
    if stop is StopKind.CANCELLED:
        await _terminate(child, plan.limits.term_grace)
    with trio.move_on_after(plan.limits.teardown):
        await child.release()
    await trio.lowlevel.checkpoint()


async def _terminate(child: Child, grace: float) -> None:
    """Send SIGTERM to the group, and wait up to ``grace`` seconds for its leader. The release that follows kills the rest.

    The grace is the leader's: once the leader has exited, its descendants get no further time.
    """
    with trio.move_on_after(grace if child.signal_group(signal.SIGTERM) else 0):
        await child.wait_exited()
    await trio.lowlevel.checkpoint()


def _captured(
    plan: CapturePlan,
    stop: StopKind,
    status: ExitStatus | None,
    outputs: tuple[_Output, _Output],
    duration: float,
    *,
    unreaped: bool,
) -> Captured:
    out, err = outputs
    codes = {StopKind.TIMED_OUT: TIMEOUT_EXIT_CODE, StopKind.CANCELLED: CANCELLED_EXIT_CODE}
    natural = status or ExitStatus(None)
    return Captured(
        exit_code=codes.get(stop, natural.exit_code),
        stop=stop,
        signal=natural.signal if stop is StopKind.EXITED else None,
        stdout=out.buffer.kept,
        stderr=err.buffer.kept,
        aggregated=aggregate(out.buffer.kept, err.buffer.kept, plan.limits.capture_bytes),
        duration=duration,
        stdout_complete=out.complete,
        stderr_complete=err.complete,
        omitted_bytes=out.buffer.dropped + err.buffer.dropped,
        unreaped=unreaped,
    )


async def run_captured(
    argv: Argv,
    *,
    cwd: str | PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,  # noqa: ASYNC109  expiry is a result here, unlike a cancelled scope
    cancel: trio.Event | Sequence[trio.Event] = (),
    leftovers: Leftovers = Leftovers.KILL,
    limits: ExecLimits | None = None,
    on_chunk: OnChunk | None = None,
) -> Captured:
    """Run a command to its end and keep its output.

    No shell reads ``argv``; stdin is the null device; ``env`` replaces the environment (None: a minimal one, without the
    host's variables). The command runs in a new process group. Blocks until the command has exited, its output is drained (at
    most ``limits.io_drain``, if a process still holds it open), the group is killed and the leader is reaped. After
    ``timeout`` seconds the group is killed: a result with exit code 124. When an event of ``cancel`` is set, the group gets
    SIGTERM, ``limits.term_grace`` and SIGKILL: a result with exit code 1. Cancelled from outside, the same happens, within
    ``limits.teardown``, before Cancelled goes on. Only the group is reached: a descendant that called ``setsid`` **lives
    on**, unless the command is run by a rollout's tools.

    Raises:
      SpawnError: the command could not be started.
      ValueError: argv is empty, or leftovers are to be kept although there is no rollout that could own them.
    """
    if leftovers is Leftovers.KEEP:
        raise ValueError("leftovers=KEEP needs a rollout: without one, the processes left running would never be ended")
    plan = CapturePlan(
        expiration=Expiration(timeout=timeout, cancels=cancel),
        leftovers=leftovers,
        limits=limits or DEFAULT_LIMITS,
        on_chunk=on_chunk,
    )
    return await capture(spawn_direct, Command(argv=argv, cwd=cwd, env=env), plan)
