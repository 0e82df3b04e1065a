"""The content of a ledger as the engine wants it on ``begin``."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import apsw

from .._core.enums import Cause
from .._core.ledger_events import Recovered, Unfinished
from .._core.turn_log import RecordedTurn
from .._core.values import Group, GroupId, QuarantineReport
from . import _schema
from ._codec import (
    decode_counts,
    decode_failure,
    decode_group,
    decode_prompt,
    decode_sample,
    decode_turn,
    decode_wasted,
    unpacked,
)
from ._location import Location, location_of
from ._samples import find_samples, find_turns

Read = Callable[[Location], bytes]


def recovered(db: apsw.Connection, read: Read) -> Recovered:
    """Return everything that the runs before this one left.

    Raises:
      LedgerError: a body is damaged.
    """
    state, version, acked_step = (_schema.get(db, key) for key in ("source_state", "weight_version", "acked_step"))
    named_by = _schema.get(db, "version_named_by")
    return Recovered(
        source_state=unpacked(state) if isinstance(state, bytes) else None,
        unfinished=tuple(_unfinished(db, read)),
        ready=tuple(group for _, group in _finished(db, read, "ready")),
        delivered=_delivered(db, read),
        quarantined=quarantined(db),
        filtered=_schema.get_int(db, "filtered"),
        acked=_schema.get_int(db, "acked"),
        next_step=_schema.get_int(db, "next_step"),
        weight_version=version if isinstance(version, int) else None,
        named_by=tuple(json.loads(named_by)) if isinstance(named_by, str) else (),
        top_version=_schema.get_int(db, "top_version"),
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


def _unfinished(db: apsw.Connection, read: Read) -> Iterator[Unfinished]:
    rows = db.execute(
        "SELECT seq, attempt, attempts, free, counts, wasted, segment, start, length, crc, body "
        "FROM whole WHERE state = 'waiting' ORDER BY place"
    )
    for seq, attempt, attempts, free, counts, wasted, *columns in rows:
        prompt = decode_prompt(read_body(read, columns))
        found = [(scored, decode_sample(read(location), prompt)) for scored, location in find_samples(db, seq)]
        turns: dict[int, list[RecordedTurn]] = {}
        for index, location in find_turns(db, seq):
            turns.setdefault(index, []).append(decode_turn(read(location)))
        yield Unfinished(
            prompt=prompt,
            attempt=attempt,
            attempts=attempts,
            unpenalized=free,
            samples=decode_counts(counts),
            kept=tuple(row for scored, row in found if scored),
            unscored=tuple(row for scored, row in found if not scored),
            wasted=decode_wasted(wasted),
            turns={index: tuple(recorded) for index, recorded in turns.items()},
        )


def _finished(db: apsw.Connection, read: Read, state: str) -> Iterator[tuple[int | None, Group]]:
    """Iterate over the groups in a state, each with its step."""
    rows = db.execute(
        "SELECT step, segment, start, length, crc, body FROM whole WHERE state = ? ORDER BY place", (state,)
    )
    for step, *columns in rows:
        yield step, decode_group(read_body(read, columns))


def read_body(read: Read, columns: Sequence[Any]) -> bytes:
    """Return the body that these columns locate; there must be one."""
    location = location_of(*columns)
    if location is None:
        raise AssertionError("an unfinished or finished group without a body")
    return read(location)


def _delivered(db: apsw.Connection, read: Read) -> tuple[tuple[int, tuple[Group, ...]], ...]:
    steps: dict[int, list[Group]] = {}
    for step, group in _finished(db, read, "delivered"):
        steps.setdefault(step or 0, []).append(group)
    return tuple((step, tuple(groups)) for step, groups in sorted(steps.items()))
