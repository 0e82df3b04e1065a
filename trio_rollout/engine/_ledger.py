"""The engine's side of its ledger: one writer, which fails the engine when the ledger breaks, and the record of samples.

A settlement waits until it is on disk. A finished sample does not wait: it is written in the background, together with
others, and a group that settles meanwhile makes its samples' records superfluous.
See docs/decisions/0048-a-finished-sample-is-a-row.md.
"""

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn, TypeAlias, final

import attrs
import trio

from .._core.enums import Cause
from .._core.failures import failure_of, words_of
from .._core.ledger_events import (
    LedgerEvent,
    Pulled,
    Quarantined,
    Recovered,
    RunIdentity,
    SampleKept,
    SamplesDropped,
    SamplesTried,
    TurnRecorded,
    TurnsDropped,
)
from .._core.values import GroupId, Prompt, QuarantineReport
from .._util.condition import Condition
from .._util.time import wait_s
from ..abc import Ledger, Source
from ..errors import DataRefused, LedgerError
from ._wakeups import WakeUps

_LOGGER = logging.getLogger("trio_rollout")

SampleEvent: TypeAlias = SampleKept | SamplesDropped | SamplesTried | TurnRecorded | TurnsDropped
"""An event that is written in the background."""

_LINGER_S = 0.2
"""How long a finished sample waits for others before it is written. A group of fast siblings settles in that time, and then
its samples are not written twice; a process that is killed samples at most what was finished so shortly before again."""


@final
@attrs.define(eq=False, repr=False)
class EngineFailure:
    """The engine's own failure: stored by the task that meets it, raised to a task that waits.

    Engine tasks never raise into the nursery around the user's body. The first failure wins. It is raised once, by the
    call that meets it, or on leaving if no call was told. ``blocked_reason`` is why nothing goes on before its user has
    done something; None if there is no such reason.
    """

    wake: WakeUps
    error: Exception | None = attrs.field(default=None, init=False)
    told: bool = attrs.field(default=False, init=False)
    """``error`` has been raised to a caller."""
    blocked_reason: str | None = attrs.field(default=None, init=False)
    _logged: set[type[Exception]] = attrs.field(factory=set, init=False)

    def fail(self, error: Exception) -> None:
        """Store a failure; of several the first one counts, and another kind is logged once."""
        if self.error is None:
            self.error = error
        elif type(error) not in {type(self.error), *self._logged}:
            self._logged.add(type(error))
            _LOGGER.error("the engine had failed already; after that: %s: %s", type(error).__name__, words_of(error))
        self.wake.consumers.notify()

    def block(self, reason: str | None) -> None:
        """Note why nothing goes on before the user has done something, or that it goes on again (None)."""
        self.blocked_reason = reason
        self.wake.consumers.notify()

    def check(self) -> None:
        """Raise the failure, if there is one that has not been raised yet."""
        if self.error is not None and not self.told:
            self.tell(self.error)

    def log_untold(self) -> None:
        """Log the failure if no call was told of it, beside another exception that leaves the engine's block."""
        if self.error is not None and not self.told:
            self.told = True
            what = f"{type(self.error).__name__}: {words_of(self.error)}"
            _LOGGER.error(
                "the engine had failed when its block was left by an exception: %s", what, exc_info=self.error
            )

    def tell(self, error: Exception) -> NoReturn:
        """Raise the failure to a caller."""
        self.told = True
        raise error


@final
@attrs.frozen(eq=False)
class LedgerWriter:
    """Writes events to the ledger, if there is one, and fails the engine when the ledger breaks."""

    _ledger: Ledger | None
    _failure: EngineFailure

    @property
    def keeps_groups(self) -> bool:
        """True if there is a ledger: unfinished groups stay in it, and are not given back to the source."""
        return self._ledger is not None

    async def begin(self, identity: RunIdentity) -> Recovered:
        """Bind the ledger to this run and return what it remembers; nothing without a ledger.

        Raises:
          LedgerError: it belongs to another run, is of a newer format, or is in use.
        """
        return Recovered() if self._ledger is None else await self._ledger.begin(identity)

    @contextmanager
    def claimed(self) -> Generator[None]:
        """Keep other engines away from the ledger for the block, if it can refuse them.

        Raises:
          LedgerError: another engine has claimed it.
        """
        claim, release = (getattr(self._ledger, name, None) for name in ("claim", "release"))
        if claim is None or release is None:
            yield
            return
        claim()
        try:
            yield
        finally:
            release()

    async def write(self, *events: LedgerEvent) -> None:
        """Write these events in one transaction; without a ledger this returns at once.

        Blocks until they are on disk. Cancelled before the write was accepted, nothing is written; later it waits.

        Raises:
          DataRefused: an event holds data that can't be stored; the ledger goes on.
          LedgerError: the write failed; the engine fails with it.
        """
        if self._ledger is None:
            return
        try:
            await self._ledger.record(events)
        except DataRefused:
            raise
        except LedgerError as error:
            self._failure.fail(error)
            raise

    async def tell(self, *events: LedgerEvent) -> None:
        """Write as ``write`` does, for a call of the user's: the failure that it raises is not raised again on leaving."""
        try:
            await self.write(*events)
        except LedgerError:
            self._failure.told |= isinstance(self._failure.error, LedgerError)
            raise

    async def write_pull(self, prompts: Sequence[Prompt], source: Source) -> Mapping[GroupId, QuarantineReport]:
        """Write that these prompts left the source. Return a report for each that can't be stored: it is given up.

        Bad input must not cost a run's work, so the other prompts go on. Blocks until everything is on disk, in one
        transaction; without a ledger this returns at once. Cancelled before the write was accepted, nothing is written.

        Raises:
          DataRefused: it is not a prompt that can't be stored, but the source's state.
          LedgerError: the write failed; the engine fails with it.
        """
        refused: dict[GroupId, QuarantineReport] = {}
        if self._ledger is None:
            return refused
        state = source.state()
        while True:  # noqa: ASYNC913  each round refuses one prompt more, so it ends; writing is a cancel point
            stored = tuple(_without_data(prompt) if prompt.group_id in refused else prompt for prompt in prompts)
            ends = (Quarantined(report=report) for report in refused.values())
            try:
                await self.write(Pulled(prompts=stored, source_state=state), *ends)
            except DataRefused as error:
                if error.group is None or error.group in refused:
                    raise
                failure = failure_of(error, group=error.group)
                refused[error.group] = QuarantineReport(id=error.group, cause=Cause.ERROR, attempts=0, error=failure)
            else:
                return refused


def _without_data(prompt: Prompt) -> Prompt:
    """Return a stand-in for a prompt that the ledger can't store."""
    return Prompt(id=prompt.id, epoch=prompt.epoch, text="(it could not be stored)")


@final
@attrs.define(eq=False, repr=False)
class SampleRecorder:
    """Writes finished samples, and turns of unfinished ones, to the ledger in the background; without a ledger there is none.

    ``note`` never waits. What is pending is bounded by the samples of groups that have not settled.
    """

    _ledger: LedgerWriter
    _pending: dict[GroupId, list[SampleEvent]] = attrs.field(factory=dict, init=False)
    _changed: Condition = attrs.field(factory=Condition, init=False)
    _writing: trio.Lock = attrs.field(factory=trio.Lock, init=False)
    """Held while samples are written: a flush returns only when what was taken before it is on disk, too."""

    def note(self, event: SampleEvent) -> None:
        """Have this written soon. Turns of a sample that is finished by now are not written."""
        pending = self._pending.setdefault(event.id, [])
        if isinstance(event, SampleKept):
            index = event.trajectory.index
            pending[:] = [one for one in pending if not (isinstance(one, TurnRecorded) and one.index == index)]
        pending.append(event)
        self._changed.notify()

    def forget_tries(self, group: GroupId) -> None:
        """Write no tries of this group that were noted before: a newer count is about to be written."""
        if group in self._pending:
            self._pending[group] = [event for event in self._pending[group] if not isinstance(event, SamplesTried)]

    def forget(self, group: GroupId) -> None:
        """Write nothing more of this group: it is about to settle."""
        self._pending.pop(group, None)

    async def serve(self) -> None:
        """Write what is noted, until cancelled; what is pending then is for ``flush``."""
        while True:
            await self._changed.wait_until(lambda: self._pending)
            await wait_s(_LINGER_S)
            await self.flush()

    async def flush(self) -> None:
        """Write what is pending. Blocks until it is on disk. Cancelled, it may be written or not.

        A failure of the ledger is the engine's, and is not raised here. A sample that can't be stored is left out: its
        group's settlement says so.
        """
        async with self._writing:
            pending, self._pending = self._pending, {}
            with suppress(LedgerError):
                await self._write([event for events in pending.values() for event in events])

    async def _write(self, events: Sequence[LedgerEvent]) -> None:
        if not events:
            return
        try:
            await self._ledger.write(*events)
        except DataRefused:
            for event in events if len(events) > 1 else ():
                await self._write([event])
