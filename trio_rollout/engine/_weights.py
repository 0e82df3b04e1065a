"""The weight-update window: its steps, in order, in one place.

1. Close the gate: nothing new is sent, and the clocks of turns stand still.
2. Pause every server.
3. ABORT: wait for the engine's calls, which the servers abort, and cancel the tries that still sample
   (docs/decisions/0002-abort-window-spares-finished-sampling.md); with ``partial`` only the calls that did not come back. RETRACT and IN_PLACE: running requests stay. An evaluation never
   mixes versions: its tries that still sample restart in every mode.
4. Run the caller's body.
5. Read each server's version.
6. Resume every server that may have been paused, whatever was raised.
7. Open the gate, waking a bounded number of waiters per tick.

Steps 6 and 7 are shielded, and bounded by ``Deadlines.control`` and by the number of waiters.

A version is written down before it is required of a server: what is not on disk has not happened. It is above every version
that was ever named, so no two weights share a number (docs/decisions/0056-versions-only-rise.md).
"""

import logging
from collections.abc import AsyncGenerator, Collection, Generator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import final

import attrs
import trio

from .._core.checks import is_whole
from .._core.enums import Cause, PauseMode
from .._core.events import Event, ServersStayedPaused, VersionNoted, WindowClosed, WindowOpened
from .._core.failures import words_of
from .._core.ledger_events import Recovered, VersionChanged
from ..errors import ServerError
from ._state import EngineState

_LOGGER = logging.getLogger("trio_rollout")
_MOST = 10**18
"""Versions are below this: a server's name with more digits is taken for a hash or a time stamp, and a ledger holds 64 bits."""
_PARKED_S = 1.0
"""Seconds. A server that has paused in mode ABORT has ended all that it ran. A call that has not come back so long after the
last one that did arrived while the pause was on its way: the server has parked it until the resume."""


@final
@attrs.define(eq=False, kw_only=True)
class WeightUpdate:
    """One window, as its body sees it. ``seconds`` is the duration of each step, by name, filled in as the steps end."""

    version: int
    mode: PauseMode
    seconds: dict[str, float] = attrs.field(factory=dict)

    @contextmanager
    def timed(self, step: str) -> Generator[None]:
        """Measure one step."""
        start = trio.current_time()
        try:
            yield
        finally:
            self.seconds[step] = trio.current_time() - start


@final
@attrs.define(eq=False, repr=False)
class Weights:
    """Opens windows, one at a time, and knows if the current task is inside one.

    ``top`` is the highest version that was ever named, by this run or an earlier one, or by a server at the start.
    """

    state: EngineState
    top: int = attrs.field(default=0, init=False)
    _open: WeightUpdate | None = attrs.field(default=None, init=False)
    _noting: trio.Lock = attrs.field(factory=trio.Lock, init=False)
    """Held while a version that came without a window is written."""
    _around: ContextVar[WeightUpdate | None] = attrs.field(
        factory=lambda: ContextVar("weight update", default=None), init=False
    )
    """Never reset: a window may be left in another task than the one that entered it, and one that is over counts no more."""

    def is_inside(self) -> bool:
        """Return True if the current task runs in the open window's body, or was started by a task that does."""
        return self._open is not None and self._around.get() is self._open

    async def begin(self, past: Recovered) -> None:
        """Adopt the first version: that of the engines on the same servers, else the ledger's, else the newest that a server names.

        Blocks until the servers have answered, and the ledger has a version that it did not know.
        """
        context = self.state.context
        named = {url: number for url, number in (await context.servers.versions()).items() if number is not None}
        shared: int | None = getattr(context.servers, "required_version", None)
        newest, known = max(named.values(), default=0), past.weight_version
        version = next(number for number in (shared, known, newest) if number is not None)
        self.top = max(version, newest, past.top_version)
        if version != (known or 0):
            namers = tuple(url for url, number in named.items() if number == version)
            await self.state.ledger.write(VersionChanged(version=version, named_by=namers))
        context.gate.adopt(version, awaits_weights=context.settings.wait_for_weights)
        if shared is None:
            more = {"named_by": past.named_by} if past.named_by and version == known else {}
            context.servers.require_version(version, **more)

    @asynccontextmanager
    async def update(self, version: int | None, mode: PauseMode) -> AsyncGenerator[WeightUpdate]:
        """Open a window; see ``RolloutEngine.weight_update``."""
        self.state.require_open("weight_update")
        self.state.failure.check()
        version = self._checked(version, mode)
        gate, window = self.state.context.gate, WeightUpdate(version=version, mode=mode)
        self._open, adopted = window, False
        self._around.set(window)
        try:
            gate.close()
            try:
                await self._pause(window)
                self._emit(WindowOpened(version=version, mode=mode, seconds=dict(window.seconds)))
                try:
                    with window.timed("body"):
                        yield window
                except Exception:
                    if hint := _hint(window):
                        _LOGGER.warning("the body of weight_update(version=%d, mode=%s) failed%s", version, mode, hint)
                    raise
                with window.timed("confirm"):
                    await self._confirm(window)
                adopted = True
            finally:
                with trio.CancelScope(shield=True):
                    await self._reopen(window)
        finally:
            self._open = None
            self._emit(WindowClosed(version=version, mode=mode, adopted=adopted, seconds=dict(window.seconds)))

    def _emit(self, event: Event) -> None:
        self.state.context.instruments.emit(event)

    def _checked(self, version: int | None, mode: PauseMode) -> int:
        """Return the version of a new window: the given one, or by default the next."""
        if self._open is not None or self._noting.locked():
            raise trio.BusyResourceError(f"weight_update(version={version}): another weight update is under way")
        shared: int | None = getattr(self.state.context.servers, "required_version", None)
        current = self.state.context.gate.version
        top = max(self.top, current, current if shared is None else shared)
        version = top + 1 if version is None else version
        if not is_whole(version) or mode not in set(PauseMode):
            raise TypeError(f"weight_update: an int and a PauseMode wanted, got version={version!r}, mode={mode!r}")
        if version <= top:
            why = f"the current version {top}" if top == current else f"{top}, the newest version that was ever named"
            raise ValueError(f"weight_update(version={version}): must be above {why}")
        _require_storable("weight_update", version)
        return version

    async def _pause(self, window: WeightUpdate) -> None:
        why = f"weight update to version {window.version}"
        evaluations = self.state.evaluations
        if len(evaluations) and window.mode is not PauseMode.ABORT:
            tries = evaluations.cancel_sampling(Cause.WEIGHT_UPDATE, why)  # before the pause: their aborts must arrive
            with trio.move_on_after(self.state.context.settings.deadlines.abort):
                await self.state.context.gate.until_calls_end(lambda: not any(this.calls for this in tries))
        with window.timed("pause"):
            await self.state.context.servers.pause(window.mode)
        if window.mode is PauseMode.ABORT:
            with window.timed("quiet"):
                await self._await_calls(why)

    async def _await_calls(self, why: str) -> None:
        gate, settings = self.state.context.gate, self.state.context.settings
        with trio.move_on_after(settings.deadlines.abort):
            await self._until_none_comes_back()
        self.state.evaluations.cancel_sampling(Cause.WEIGHT_UPDATE, why)
        if settings.partial:
            gate.interrupt_calls()
        else:
            self.state.running.cancel_sampling(Cause.WEIGHT_UPDATE, why)
        # A call that was given up closes its connection at once, because its server is paused; its abort is still owed.
        with trio.move_on_after(settings.deadlines.abort):
            await gate.until_fewer_calls(than=1)

    async def _until_none_comes_back(self) -> None:
        gate = self.state.context.gate
        while left := gate.calls:
            with trio.move_on_after(_PARKED_S) as patience:
                await gate.until_fewer_calls(than=left)
            if patience.cancelled_caught:
                return

    async def _confirm(self, window: WeightUpdate) -> None:
        named, version = await self.state.context.servers.versions(), window.version
        wrong = {url: other for url, other in named.items() if other not in {None, version}}
        if wrong:
            raise ServerError(
                f"weight_update(version={version}): after the body, servers report other versions: {wrong}; "
                f"the engine stays at version {self.state.context.gate.version}{_hint(window)}"
            )
        if not named:
            _LOGGER.error("no server answers; weight version %d is trusted without a check", version)
        elif all(other is None for other in named.values()):
            _LOGGER.warning("no server reports a weight version; %d is trusted without a check", version)
        await self._adopt(version, [url for url, other in named.items() if other == version])

    async def note(self, version: int) -> None:
        """Note a version that came without a window; see ``RolloutEngine.note_weight_version``."""
        self.state.failure.check()
        if self._open is not None:
            raise trio.BusyResourceError(f"note_weight_version({version}): a weight update is under way")
        if not is_whole(version):
            raise TypeError(f"note_weight_version: a whole number wanted, got {version!r}")
        _require_storable("note_weight_version", version)
        gate = self.state.context.gate
        async with self._noting:  # of two notes the later one counts, and no window comes between
            if version != gate.version or gate.awaits_weights:
                await self._adopt(version, ())
                self._emit(VersionNoted(version=version))
                await gate.open()

    async def _adopt(self, version: int, named_by: Collection[str]) -> None:
        """Write the version down, then require it. Cancelled or refused before it is on disk, nothing has changed."""
        await self.state.ledger.tell(VersionChanged(version=version, named_by=tuple(named_by)))
        self.top = max(self.top, version)
        staleness = self.state.staleness
        staleness.note_new_version()
        self.state.context.gate.adopt(version)
        for this in self.state.running.tries():
            if staleness.is_too_old_at(this.begun):
                this.cancel(Cause.STALE, f"began under version {this.begun}, the weights are at {version}")
        self.state.context.servers.require_version(version)  # last: the servers may be the user's, and raise

    async def _reopen(self, window: WeightUpdate) -> None:
        try:
            with window.timed("resume"), trio.move_on_after(self.state.context.settings.deadlines.control) as limit:
                await self._resume(window)
            if limit.cancelled_caught:
                self._stayed_paused(window, "servers were not resumed in time")
        finally:
            with window.timed("open"):
                await self.state.context.gate.open()  # noqa: ASYNC102  shielded, and bounded by the number of waiters

    async def _resume(self, window: WeightUpdate) -> None:
        try:
            await self.state.context.servers.resume()
        except trio.BusyResourceError:  # another engine's window, which was why the servers could not be paused
            _LOGGER.warning("the weight update to %d ends inside the window of another engine", window.version)
        except Exception as error:  # noqa: BLE001  the servers may be the user's; the gate must open all the same
            self._stayed_paused(window, words_of(error))

    def _stayed_paused(self, window: WeightUpdate, why: str) -> None:
        _LOGGER.error("after the weight update to %d: %s", window.version, why)
        self._emit(ServersStayedPaused(version=window.version, error=why))


def _require_storable(what: str, version: int) -> None:
    if not 0 <= version < _MOST:
        raise ValueError(
            f"{what}: got version {version}, allowed: 0 to {_MOST - 1}, which every ledger and server can name"
        )


def _hint(window: WeightUpdate) -> str:
    if window.mode is not PauseMode.IN_PLACE:
        return ""
    return (
        ". A server that is paused in place refuses to flush its cache: it answers 400, has the new weights and keeps the old "
        "version's name. Push with flush_cache=false in a window of this mode"
    )
