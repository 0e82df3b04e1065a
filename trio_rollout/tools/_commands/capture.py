"""Captured commands: run to the end, keep the output, leave nothing behind.

Owns one process group for the length of one call. Two stops belong to it: *expiry* (a time limit: SIGKILL at once) and a
*cancel event* (SIGTERM, a grace, SIGKILL); both are results. An ambient cancellation does what a cancel event does, and
then goes on as Cancelled.
"""

import enum
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from typing import TypeAlias

import attrs
import trio

from ..._core.enums import Leftovers
from ..._util.exception_groups import bare_errors
from ...errors import ToolError
from .._errors import CommandSignalled, CommandTimeout
from .._limits import DEFAULT_LIMITS, ExecLimits
from .captured import Captured, HeadBuffer, aggregate
from .child import Child, ExitStatus, Spawn, spawn_direct
from .command import Argv, Command
from .expiration import Expiration, StopKind, as_events

TIMEOUT_EXIT_CODE = 124
CANCELLED_EXIT_CODE = 1

OnChunk: TypeAlias = Callable[[str, bytes], None]
"""Told of each piece of output: "stdout" or "stderr", and the bytes."""


class CapturePolicy(enum.Enum):
    """What applies to a captured command."""

    SHELL = "shell"
    """Its limits: time, cancel events, bytes kept."""
    FULL_BUFFER = "full_buffer"
    """Trusted callers only: nothing expires it and all of its output is kept. The drain stays bounded."""


@attrs.frozen(kw_only=True)
class CapturePlan:
    """Everything about one captured command but what to run."""

    expiration: Expiration = attrs.field(factory=Expiration)
    policy: CapturePolicy = CapturePolicy.SHELL
    leftovers: Leftovers = Leftovers.KILL
    limits: ExecLimits = attrs.field(factory=ExecLimits)
    on_chunk: OnChunk | None = None
    on_output: Callable[[], None] = lambda: None
    """Told of each read, without end: that a command goes on talking is progress, also when it is not passed on any more."""

    @property
    def in_force(self) -> Expiration:
        """What expires it."""
        return self.expiration if self.policy is CapturePolicy.SHELL else Expiration()

    @property
    def capture_bytes(self) -> int | None:
        """How much is kept of a stream, and of both."""
        return None if self.policy is CapturePolicy.FULL_BUFFER else self.limits.capture_bytes

    @property
    def drain(self) -> float:
        """How long output is awaited after the exit. What is to be kept may keep it open for ever."""
        return self.limits.io_drain if self.leftovers is Leftovers.KILL else self.limits.post_exit_close


class _Output:
    """Reads one stream to its end, past what is kept, so that the writer never waits for us."""

    def __init__(self, name: str, plan: CapturePlan) -> None:
        self.buffer = HeadBuffer(plan.capture_bytes)
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


async def _cancel_when_set(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel("a cancel event of the command was set")


async def _wait_for_stop(child: Child, plan: CapturePlan, started: float) -> StopKind:
    with trio.CancelScope(deadline=plan.in_force.deadline(started)):
        async with trio.open_nursery() as race:
            for event in plan.in_force.cancels:
                race.start_soon(_cancel_when_set, event, race.cancel_scope)
            await child.wait_exited()
            race.cancel_scope.cancel("the command exited")
    return plan.in_force.classify(exited=child.exited() is not None)


async def _ask_to_end(child: Child, grace: float) -> None:
    """SIGTERM to the group, and up to ``grace`` seconds for its leader. The release that follows kills what is left.

    The grace is the leader's: once it has gone, its descendants get no further time.
    """
    with trio.move_on_after(grace if child.signal_group(signal.SIGTERM) else 0):
        await child.wait_exited()
    await trio.lowlevel.checkpoint()


async def _start(spawn: Spawn, command: Command, plan: CapturePlan) -> Child | None:
    """Start it; None if a cancel event was set, or the time of whoever asks was over, before it ran."""
    made: list[Child] = []
    try:
        with bare_errors(), trio.CancelScope(deadline=plan.in_force.until):
            async with trio.open_nursery() as race:
                for event in plan.in_force.cancels:
                    race.start_soon(_cancel_when_set, event, race.cancel_scope)
                made.append(await spawn(command))
                race.cancel_scope.cancel("it runs")
    except BaseException:
        for child in made:
            with trio.move_on_after(plan.limits.teardown, shield=True):
                await child.release()
            child.close()
        raise
    return made[0] if made else None


async def capture(spawn: Spawn, command: Command, plan: CapturePlan) -> Captured:
    """Run ``command`` through ``spawn`` to its end. See ``run_captured``."""
    child = await _start(spawn, command, plan)
    if child is None:
        stop = plan.in_force.classify(exited=False)
        return _captured(plan, stop, None, (_Output("stdout", plan), _Output("stderr", plan)), 0.0, unreaped=False)
    return await _run(child, plan)  # no checkpoint before: its first act is to own the child


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
                    await _end(child, plan, stop)
                readers.cancel_scope.deadline = trio.current_time() + plan.drain
    finally:
        with trio.move_on_after(plan.limits.term_grace + plan.limits.teardown, shield=True):
            if stop is None:
                with suppress(ToolError):  # who could tell of its exit is gone: whatever ended the run says that
                    await _ask_to_end(child, plan.limits.term_grace)
            spare = stop is StopKind.EXITED and plan.leftovers is Leftovers.KEEP
            reaped = await child.release(spare=spare)
        child.close()
    # pyright takes a scope that unwraps groups for one that swallows errors.
    return _captured(plan, stop, child.exited(), (out, err), duration, unreaped=not reaped)  # pyright: ignore[reportArgumentType]


async def _end(child: Child, plan: CapturePlan, stop: StopKind) -> None:
    """Kill the command as its kind of stop asks.

    Before the drain: where escapees are contained, nobody is left then who could hold the output open.
    """
    if stop is StopKind.CANCELLED:
        await _ask_to_end(child, plan.limits.term_grace)
    with trio.move_on_after(plan.limits.teardown):
        await child.release()
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
        aggregated=aggregate(out.buffer.kept, err.buffer.kept, plan.capture_bytes),
        duration=duration,
        stdout_complete=out.complete,
        stderr_complete=err.complete,
        omitted_bytes=out.buffer.dropped + err.buffer.dropped,
        unreaped=unreaped,
    )


def checked(result: Captured, command: Command) -> Captured:
    """The result, unless it timed out or died of a signal."""
    if result.timed_out:
        raise CommandTimeout(f"{command.argv[0]}: timed out after {result.duration:.3f} s", result=result)
    if result.signal is not None:
        raise CommandSignalled(f"{command.argv[0]}: killed by signal {result.signal}", result=result)
    return result


async def run_captured(
    argv: Argv,
    *,
    cwd: str | PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,  # noqa: ASYNC109  expiry is a result here, unlike a cancelled scope
    cancel: trio.Event | Sequence[trio.Event] = (),
    leftovers: Leftovers = Leftovers.KILL,
    policy: CapturePolicy = CapturePolicy.SHELL,
    limits: ExecLimits | None = None,
    on_chunk: OnChunk | None = None,
    check: bool = False,
) -> Captured:
    """Run a command to its end and keep what it wrote.

    ``argv`` is never read by a shell; stdin is the null device; ``env`` replaces the environment (None: a minimal one,
    nothing of the host's). It runs in a process group of its own. Blocks until it has exited, its output is drained (at
    most ``limits.io_drain``, if something still holds it open), the group is killed and its leader reaped. After
    ``timeout`` seconds the group is killed: a result with exit code 124. When an event of ``cancel`` is set it gets
    SIGTERM, ``limits.term_grace`` and SIGKILL: a result with exit code 1. Cancelled from outside, the same happens, within
    ``limits.teardown``, before Cancelled goes on. Only the group is reached: a descendant that called ``setsid`` **lives
    on**, unless the command is run by a rollout's tools.

    Raises:
      SpawnError: it could not be started.
      ValueError: argv is empty, or leftovers are to be kept although there is no rollout that could own them.
      CommandTimeout, CommandSignalled: with ``check``.
    """
    if leftovers is Leftovers.KEEP:
        raise ValueError("leftovers=KEEP needs a rollout: without one, nobody would ever end what is left running")
    plan = CapturePlan(
        expiration=Expiration(timeout=timeout, cancels=as_events(cancel)),
        policy=policy,
        leftovers=leftovers,
        limits=limits or DEFAULT_LIMITS,
        on_chunk=on_chunk,
    )
    command = Command(argv=argv, cwd=cwd, env=env)
    result = await capture(spawn_direct, command, plan)
    return checked(result, command) if check else result
