"""What each event does to the rows. One record is one transaction; an event that contradicts its row is refused.

Only the current attempt may settle: a result must carry a higher attempt number than the last one written, a stale group
the very number it finished under, and an ack the step it was delivered under.
"""

from collections.abc import Callable, Iterable
from typing import assert_never, final

import attrs

from .._core.enums import Cause
from .._core.events import Acked, Delivered, Filtered, Pulled, Quarantined, Ready, Requeued, Restored, VersionChanged
from .._core.values import GroupId
from ..errors import LedgerError
from . import _schema
from ._codec import prompt_of_group
from ._place import Inline, Place
from ._records import Encoded
from ._rows import Row, Rows


@final
@attrs.define(eq=False, repr=False)
class Apply:
    """Applies events to the rows, inside a transaction that the caller opened."""

    rows: Rows
    read: Callable[[Place], bytes]
    keep: bool
    """Whether groups that are through (acked, filtered) keep their rows and bodies."""

    def __call__(self, item: Encoded, places: Iterable[Place]) -> None:
        """Apply one event; ``places`` are where its bodies lie.

        Raises:
          LedgerError: it contradicts what the ledger knows.

        """
        event = item.event
        match event:
            case Pulled():
                self._pulled(event, places, item.note)
            case Requeued():
                self._requeued(event, item.note)
            case Ready():
                self._ready(event, next(iter(places)), item.note)
            case Filtered():
                row = self._current(event.id, event.attempt, "filtering")
                self._through(row, "filtered", reason=event.reason, attempt=event.attempt)
                self._count("filtered", 1)
            case Quarantined():
                self._quarantined(event, item.note)
            case Delivered():
                self._delivered(event)
            case Acked():
                self._acked(event)
            case Restored():
                self._restored(event)
            case VersionChanged():
                _schema.put(self.rows.db, "weight_version", event.version)
            case _:
                assert_never(event)

    def _pulled(self, event: Pulled, places: Iterable[Place], state: bytes | None) -> None:
        for prompt, place in zip(event.prompts, places, strict=True):
            gid = prompt.group_id
            if (row := self.rows.find(gid)) is not None:
                raise LedgerError(f"pull of group {gid} refused: it was pulled before and is {row.state}")
            self.rows.insert(gid, place)
        _schema.put(self.rows.db, "source_state", state or b"")

    def _current(self, gid: GroupId, attempt: int, what: str) -> Row:
        row = self.rows.need(gid, what, "waiting")
        if attempt <= row.attempt:
            raise LedgerError(f"{what} of group {gid} refused: attempt {attempt} is over, the last was {row.attempt}")
        return row

    def _requeued(self, event: Requeued, error: bytes | None) -> None:
        what = f"requeue ({event.cause.value})"
        if event.cause is Cause.STALE and (found := self.rows.find(event.id)) and found.state != "waiting":
            row = self._recycle(event, what)
        else:
            row = self._current(event.id, event.attempt, what)
        self.rows.update(
            row,
            state="waiting",
            place=self.rows.next_place(),
            attempt=event.attempt,
            attempts=event.attempts,
            free=event.free,
            step=None,
            cause=event.cause.value,
            error=error,
            oldest=None,
            newest=None,
            rewards=None,
        )

    def _recycle(self, event: Requeued, what: str) -> Row:
        """A finished group is too old: its prompt takes its place again."""
        row = self.rows.need(event.id, what, "ready", "delivered")
        if event.attempt != row.attempt:
            raise LedgerError(f"{what} of group {event.id} refused: it has attempt {row.attempt}, not {event.attempt}")
        self.rows.set_body(row, Inline(prompt_of_group(self.read(self.rows.body(row)))))
        return row

    def _ready(self, event: Ready, place: Place, rewards: bytes | None) -> None:
        group = event.group
        row = self._current(group.id, group.attempt, "commit")
        self.rows.set_body(
            row,
            place,
            state="ready",
            place=self.rows.next_place(),
            attempt=group.attempt,
            free=0,
            oldest=group.oldest_version,
            newest=group.newest_version,
            rewards=rewards,
        )

    def _quarantined(self, event: Quarantined, error: bytes | None) -> None:
        report = event.report
        row = self.rows.need(report.id, "quarantine", "waiting")
        self.rows.update(
            row,
            state="quarantined",
            place=self.rows.next_place(),
            attempts=report.attempts,
            cause=report.cause.value,
            error=error,
        )

    def _delivered(self, event: Delivered) -> None:
        for gid in event.ids:
            row = self.rows.need(gid, f"delivery as step {event.step}", "ready", "delivered")
            self.rows.update(row, state="delivered", step=event.step)
        if event.step >= _schema.get_int(self.rows.db, "next_step"):
            _schema.put(self.rows.db, "next_step", event.step + 1)

    def _restored(self, event: Restored) -> None:
        """Ready again, in the places they had: before what finished later."""
        for gid in event.ids:
            row = self.rows.need(gid, f"restore of step {event.step}", "delivered")
            self.rows.update(row, state="ready", step=None)
        _schema.put(self.rows.db, "next_step", event.step + 1)

    def _acked(self, event: Acked) -> None:
        for gid in event.ids:
            row = self.rows.need(gid, f"ack of step {event.step}", "delivered")
            if row.step != event.step:
                raise LedgerError(f"ack of step {event.step} refused: group {gid} was delivered as step {row.step}")
            self._through(row, "acked")
        self._count("acked", len(event.ids))
        if event.step >= _schema.get_int(self.rows.db, "acked_step"):
            _schema.put(self.rows.db, "acked_step", event.step)

    def _through(self, row: Row, state: str, **columns: int | str) -> None:
        """The group ended well: keep of it what the policy says."""
        if not self.keep:
            self.rows.delete(row)
        elif state == "filtered":
            self.rows.set_body(row, None, state=state, place=self.rows.next_place(), **columns)
        else:
            self.rows.update(row, state=state, place=self.rows.next_place(), **columns)

    def _count(self, state: str, more: int) -> None:
        """Counts go on after the rows are gone."""
        _schema.put(self.rows.db, state, _schema.get_int(self.rows.db, state) + more)
