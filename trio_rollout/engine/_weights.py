"""The weight-update window: its steps, in order, in one place.

1. close the gate: nothing new is sent, and the clocks of turns stand still
2. pause every server
3. ABORT: await our own calls, which the servers abort; cancel the attempts that still sample (with ``partial``: only calls
   that did not come back). RETRACT, IN_PLACE: running requests stay. Evaluation never mixes versions: it restarts always
4. the caller's body
5. read each server's version
6. resume every server that may have been paused, whatever was raised
7. open the gate, waking a bounded number per tick

Steps 6 and 7 are shielded, and bounded by ``Deadlines.control`` and by the number of waiters.
"""

import logging
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import final

import attrs
import trio

from .._core.checks import is_whole
from .._core.enums import Cause, PauseMode
from .._core.events import VersionChanged
from .._util.condition import Condition
from ..errors import ServerError
from ._context import RolloutContext
from ._instruments import Instruments
from ._running import RunningAttempts
from ._staleness import StalenessPolicy
from ._state import EngineFailure, LedgerWriter

_LOGGER = logging.getLogger("trio_rollout")
_PARKED_S = 1.0
"""A server that says that it has paused in mode ABORT has ended all that it ran. A call that has not come back so long after the
last one that did is parked there until the resume: it came while the pause was on its way."""


@final
@attrs.define(eq=False, kw_only=True)
class WeightUpdate:
    """One window, as its body sees it. ``seconds``: how long each step took, by name, filled in as they end."""

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
@attrs.define(eq=False, repr=False, kw_only=True)
class Weights:
    """Opens windows, one at a time, and knows whether the current task is inside one."""

    context: RolloutContext
    live: RunningAttempts
    evaluations: RunningAttempts
    record: LedgerWriter
    fate: EngineFailure
    changed: Condition
    freshness: StalenessPolicy
    instruments: Instruments
    may_repeat: bool = False
    _open: WeightUpdate | None = attrs.field(default=None, init=False)
    _around: ContextVar[WeightUpdate | None] = attrs.field(
        factory=lambda: ContextVar("weight update", default=None), init=False
    )

    def is_inside(self) -> bool:
        """Whether the current task runs in the open window's body: it is the body, or was started by it there."""
        return self._open is not None and self._around.get() is self._open

    @asynccontextmanager
    async def update(self, version: int, mode: PauseMode) -> AsyncGenerator[WeightUpdate]:
        """The window; see ``RolloutEngine.weight_update``."""
        self.fate.check()
        self._check(version, mode)
        gate, window = self.context.gate, WeightUpdate(version=version, mode=mode)
        self._open = window
        outside = self._around.set(window)
        try:
            gate.close()
            try:
                await self._pause(window)
                with window.timed("body"):
                    yield window
                with window.timed("confirm"):
                    await self._confirm(version)
            finally:
                with trio.CancelScope(shield=True):
                    await self._reopen(window)
        finally:
            self._around.reset(outside)
            self._open = None
        self.instruments.emit("weights.updated", version=version, mode=mode, seconds=dict(window.seconds))

    def _check(self, version: int, mode: PauseMode) -> None:
        current = self.context.gate.version
        if self._open is not None:
            raise trio.BusyResourceError(f"weight_update(version={version}): another weight update is under way")
        if not is_whole(version) or mode not in set(PauseMode):
            raise TypeError(f"weight_update: an int and a PauseMode wanted, got version={version!r}, mode={mode!r}")
        if version <= current and not self.may_repeat:
            raise ValueError(f"weight_update(version={version}): must be above the current version {current}")

    async def _pause(self, window: WeightUpdate) -> None:
        why = f"weight update to version {window.version}"
        if len(self.evaluations) and window.mode is not PauseMode.ABORT:
            self.evaluations.cancel_sampling(Cause.WEIGHT_UPDATE, why)  # before the pause: their aborts must arrive
            with trio.move_on_after(self.context.settings.deadlines.abort):
                await self.evaluations.changed.wait_until(lambda: not len(self.evaluations))
        with window.timed("pause"):
            await self.context.servers.pause(window.mode)
        if window.mode is PauseMode.ABORT:
            with window.timed("quiet"):
                await self._await_calls(why)

    async def _await_calls(self, why: str) -> None:
        gate, settings = self.context.gate, self.context.settings
        with trio.move_on_after(settings.deadlines.abort):
            await self._until_none_comes_back()
        self.evaluations.cancel_sampling(Cause.WEIGHT_UPDATE, why)
        if settings.partial:
            gate.interrupt_calls()
        else:
            self.live.cancel_sampling(Cause.WEIGHT_UPDATE, why)
        # What was given up closes its connection at once, because its server is paused; its abort is a debt.
        with trio.move_on_after(settings.deadlines.abort):
            await gate.changed.wait_until(lambda: not gate.calls)

    async def _until_none_comes_back(self) -> None:
        gate = self.context.gate
        while left := gate.calls:
            with trio.move_on_after(_PARKED_S) as patience:
                await gate.changed.wait_until(partial(gate.has_fewer_calls, left))
            if patience.cancelled_caught:
                return

    async def _confirm(self, version: int) -> None:
        named = await self.context.servers.versions()
        wrong = {url: other for url, other in named.items() if other not in {None, version}}
        if wrong:
            raise ServerError(
                f"weight_update(version={version}): after the body, servers name other versions: {wrong}; "
                f"the engine stays at version {self.context.gate.version}"
            )
        if not named:
            _LOGGER.error("no server answers; weight version %d is taken at the trainer's word", version)
        elif all(other is None for other in named.values()):
            _LOGGER.warning("no server names a weight version; %d is taken at the trainer's word", version)
        self.context.servers.require_version(version)
        await self._adopt(version)
        self.may_repeat = False

    async def note(self, version: int) -> None:
        """The version changed without a window; see ``RolloutEngine.note_weight_version``."""
        self.fate.check()
        if self._open is not None:
            raise trio.BusyResourceError(f"note_weight_version({version}): a weight update is under way")
        if not is_whole(version):
            raise TypeError(f"note_weight_version: a whole number wanted, got {version!r}")
        if version != self.context.gate.version:
            self.context.servers.require_version(version)
            await self._adopt(version)
            self.changed.notify()
            self.instruments.emit("weights.noted", version=version)

    async def _adopt(self, version: int) -> None:
        await self.record.write(VersionChanged(version=version))
        self.context.gate.version = version
        self.freshness.note_new_version()
        for attempt in self.live.all():
            if self.freshness.is_too_old_at(attempt.begun):
                attempt.cancel(Cause.STALE, f"began under version {attempt.begun}, the weights are at {version}")

    async def _reopen(self, window: WeightUpdate) -> None:
        with window.timed("resume"), trio.move_on_after(self.context.settings.deadlines.control) as limit:
            try:
                await self.context.servers.resume()
            except ServerError as error:
                _LOGGER.error("after the weight update to %d: %s", window.version, error)  # noqa: TRY400  says it all
                self.instruments.emit("servers.stayed_paused", error=str(error))
        if limit.cancelled_caught:
            _LOGGER.error("after the weight update to %d: servers were not resumed in time", window.version)
        with window.timed("open"):
            await self.context.gate.open()
        self.changed.notify()
