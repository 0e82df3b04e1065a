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
"""

import logging
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import final

import attrs
import trio

from .._core.checks import is_whole
from .._core.enums import Cause, PauseMode
from .._core.events import Event, ServersStayedPaused, VersionNoted, WindowClosed, WindowOpened
from .._core.failures import words_of
from .._core.ledger_events import VersionChanged
from ..errors import ServerError
from ._state import EngineState

_LOGGER = logging.getLogger("trio_rollout")
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

    ``may_repeat``: the next version may be one that is not above the current one, because the trainer went back.
    """

    state: EngineState
    may_repeat: bool = attrs.field(default=False, init=False)
    _open: WeightUpdate | None = attrs.field(default=None, init=False)
    _around: ContextVar[WeightUpdate | None] = attrs.field(
        factory=lambda: ContextVar("weight update", default=None), init=False
    )

    def is_inside(self) -> bool:
        """Return True if the current task runs in the open window's body, or was started by a task that does."""
        return self._open is not None and self._around.get() is self._open

    @asynccontextmanager
    async def update(self, version: int, mode: PauseMode) -> AsyncGenerator[WeightUpdate]:
        """Open a window; see ``RolloutEngine.weight_update``."""
        self.state.failure.check()
        self._check(version, mode)
        gate, window = self.state.context.gate, WeightUpdate(version=version, mode=mode)
        self._open, adopted = window, False
        outside = self._around.set(window)
        try:
            gate.close()
            try:
                await self._pause(window)
                self._emit(WindowOpened(version=version, mode=mode, seconds=dict(window.seconds)))
                with window.timed("body"):
                    yield window
                with window.timed("confirm"):
                    await self._confirm(version)
                adopted = True
            finally:
                with trio.CancelScope(shield=True):
                    await self._reopen(window)
        finally:
            self._around.reset(outside)
            self._open = None
            self._emit(WindowClosed(version=version, mode=mode, adopted=adopted, seconds=dict(window.seconds)))

    def _emit(self, event: Event) -> None:
        self.state.context.instruments.emit(event)

    def _check(self, version: int, mode: PauseMode) -> None:
        current = self.state.context.gate.version
        if self._open is not None:
            raise trio.BusyResourceError(f"weight_update(version={version}): another weight update is under way")
        if not is_whole(version) or mode not in set(PauseMode):
            raise TypeError(f"weight_update: an int and a PauseMode wanted, got version={version!r}, mode={mode!r}")
        if version <= current and not self.may_repeat:
            raise ValueError(f"weight_update(version={version}): must be above the current version {current}")

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

    async def _confirm(self, version: int) -> None:
        named = await self.state.context.servers.versions()
        wrong = {url: other for url, other in named.items() if other not in {None, version}}
        if wrong:
            raise ServerError(
                f"weight_update(version={version}): after the body, servers report other versions: {wrong}; "
                f"the engine stays at version {self.state.context.gate.version}"
            )
        if not named:
            _LOGGER.error("no server answers; weight version %d is trusted without a check", version)
        elif all(other is None for other in named.values()):
            _LOGGER.warning("no server reports a weight version; %d is trusted without a check", version)
        self.state.context.servers.require_version(version)
        await self._adopt(version)
        self.may_repeat = False

    async def note(self, version: int) -> None:
        """Note a version that came without a window; see ``RolloutEngine.note_weight_version``."""
        self.state.failure.check()
        if self._open is not None:
            raise trio.BusyResourceError(f"note_weight_version({version}): a weight update is under way")
        if not is_whole(version):
            raise TypeError(f"note_weight_version: a whole number wanted, got {version!r}")
        if version != self.state.context.gate.version:
            self.state.context.servers.require_version(version)
            await self._adopt(version)
            self._emit(VersionNoted(version=version))

    async def _adopt(self, version: int) -> None:
        await self.state.ledger.write(VersionChanged(version=version))
        staleness = self.state.staleness
        staleness.note_new_version()
        self.state.context.gate.adopt(version)
        for this in self.state.running.tries():
            if staleness.is_too_old_at(this.begun):
                this.cancel(Cause.STALE, f"began under version {this.begun}, the weights are at {version}")

    async def _reopen(self, window: WeightUpdate) -> None:
        with window.timed("resume"), trio.move_on_after(self.state.context.settings.deadlines.control) as limit:
            try:
                await self.state.context.servers.resume()
            except Exception as error:  # noqa: BLE001  the servers may be the user's; the gate must open all the same
                self._stayed_paused(window, words_of(error))
        if limit.cancelled_caught:
            self._stayed_paused(window, "servers were not resumed in time")
        with window.timed("open"):
            await self.state.context.gate.open()

    def _stayed_paused(self, window: WeightUpdate, why: str) -> None:
        _LOGGER.error("after the weight update to %d: %s", window.version, why)
        self._emit(ServersStayedPaused(version=window.version, error=why))
