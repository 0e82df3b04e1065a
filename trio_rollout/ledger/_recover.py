"""The content of a ledger as the engine wants it on ``begin``."""

from collections.abc import Callable, Iterator

import apsw

from .._core.enums import Cause
from .._core.ledger_events import Recovered, Unfinished
from .._core.values import Group, GroupId, QuarantineReport
from . import _schema
from ._codec import decode_failure, decode_group, decode_prompt, unpacked
from ._location import Location
from ._rows import location_of

Read = Callable[[Location], bytes]


def recovered(db: apsw.Connection, read: Read) -> Recovered:
    """Return everything that the runs before this one left.

    Raises:
      LedgerError: a body is damaged.

    """
    state, version, acked_step = (_schema.get(db, key) for key in ("source_state", "weight_version", "acked_step"))
    return Recovered(
        source_state=unpacked(state) if isinstance(state, bytes) else None,
        unfinished=_unfinished(db, read),
        ready=tuple(decode_group(body) for *_, body in _bodies(db, read, "ready")),
        delivered=_delivered(db, read),
        quarantined=quarantined(db),
        filtered=_schema.get_int(db, "filtered"),
        acked=_schema.get_int(db, "acked"),
        next_step=_schema.get_int(db, "next_step"),
        weight_version=version if isinstance(version, int) else None,
        acked_step=acked_step if isinstance(acked_step, int) else None,
    )


def quarantined(db: apsw.Connection) -> tuple[QuarantineReport, ...]:
    """Return the quarantined groups, in the order in which they were quarantined."""
    rows = db.execute(
        "SELECT epoch, prompt, cause, attempts, error FROM groups WHERE state = 'quarantined' ORDER BY place"
    )
    return tuple(
        QuarantineReport(id=GroupId(epoch, prompt), cause=Cause(cause), attempts=attempts, error=decode_failure(error))
        for epoch, prompt, cause, attempts, error in rows
    )


def _bodies(db: apsw.Connection, read: Read, state: str) -> Iterator[tuple[int, int, int, int | None, bytes]]:
    rows = db.execute(
        "SELECT attempt, attempts, free, step, segment, start, length, crc, body "
        "FROM whole WHERE state = ? ORDER BY place",
        (state,),
    )
    for attempt, attempts, free, step, *columns in rows:
        location = location_of(*columns)
        if location is None:
            raise AssertionError(f"a {state} group without a body")
        yield attempt, attempts, free, step, read(location)


def _unfinished(db: apsw.Connection, read: Read) -> tuple[Unfinished, ...]:
    return tuple(
        Unfinished(prompt=decode_prompt(body), attempt=attempt, attempts=attempts, unpenalized=free)
        for attempt, attempts, free, _, body in _bodies(db, read, "waiting")
    )


def _delivered(db: apsw.Connection, read: Read) -> tuple[tuple[int, tuple[Group, ...]], ...]:
    steps: dict[int, list[Group]] = {}
    for _, _, _, step, body in _bodies(db, read, "delivered"):
        steps.setdefault(step or 0, []).append(decode_group(body))
    return tuple((step, tuple(groups)) for step, groups in sorted(steps.items()))
