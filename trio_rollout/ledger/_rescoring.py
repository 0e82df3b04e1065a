"""Rescoring as the ledger remembers it: which one is under way, and which groups it has not been through yet.

A rescoring has a number, and each group the number of the last one that was through with it. So one that is interrupted
goes on where it was (docs/decisions/0053-rescoring-is-a-pass-over-what-is-stored.md).
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import apsw

from .._core.enums import Cause
from .._core.ledger_events import Rescoring, Stored
from .._core.lifecycle import State
from .._core.values import QuarantineReport
from ..errors import LedgerError
from . import _schema
from ._codec import decode_failure, decode_group, decode_prompt, decode_sample, decode_wasted
from ._recover import Read, read_body
from ._samples import find_samples

STATES = (State.WAITING, State.QUARANTINED, State.READY, State.DELIVERED, State.ACKED)
"""The states whose groups have trajectories in a ledger."""

_WITH_SAMPLES = "(state NOT IN ('waiting', 'quarantined') OR EXISTS(SELECT 1 FROM samples WHERE samples.seq = {0}.seq))"
_CHOSEN = "state IN (SELECT value FROM json_each(?)) AND rescored < ? AND "
_COUNT = f"SELECT count(*) FROM groups WHERE {_CHOSEN}{_WITH_SAMPLES.format('groups')}"  # ruff: ignore[hardcoded-sql-expression]  ours
_NEXT = f"""
SELECT seq, state, attempt, attempts, cause, error, wasted, tokens, segment, start, length, crc, body FROM whole
WHERE seq > ? AND {_CHOSEN}{_WITH_SAMPLES.format("whole")} ORDER BY seq LIMIT ?
"""  # ruff: ignore[hardcoded-sql-expression]  ours


def begin(db: apsw.Connection, where: str, reward: str, states: Sequence[State], *, again: bool) -> Rescoring:
    """Begin a rescoring, or go on with the one that is under way if it has the same reward and states.

    Raises:
      LedgerError: no run has begun, or only some groups would get another reward than the one that the ledger names.
    """
    identity = _schema.identity_of(db)
    if identity is None:
        raise LedgerError(f"ledger {where} is empty: no run has begun, so there is nothing to score")
    named = identity.settings.get("reward")
    if named not in {None, reward} and set(states) != set(STATES):
        chosen = ", ".join(state.value for state in states)
        raise LedgerError(
            f"ledger {where} has rewards of {named!r}: with those of {reward!r} for the groups that are {chosen} it would "
            "hold two kinds. Score all states again, or use that reward"
        )
    before = _schema.under_way(db)
    names = [state.value for state in STATES if state in states]
    goes_on = not again and before.get("open", False) and (before["reward"], before["states"]) == (reward, names)
    number = int(before.get("number", 0)) + (0 if goes_on else 1)
    with db:
        _schema.put(db, "rescoring", json.dumps({"number": number, "reward": reward, "states": names, "open": True}))
    ((left,),) = db.execute(_COUNT, (json.dumps(names), number))
    return Rescoring(
        number=number,
        goes_on=goes_on,
        samples_per_prompt=identity.samples_per_prompt,
        left=int(left),
        skipped=dict(_skipped(db, names, number)),
    )


def _skipped(db: apsw.Connection, states: Sequence[str], number: int) -> Iterator[tuple[str, int]]:
    chosen = json.dumps(states)
    query = "SELECT count(*) FROM groups WHERE state IN (SELECT value FROM json_each(?)) AND "
    ((done,),) = db.execute(query + "rescored = ?", (chosen, number))
    yield "scored before the interruption", int(done)
    without = f"rescored < ? AND NOT {_WITH_SAMPLES.format('groups')}"
    ((empty,),) = db.execute(query + without, (chosen, number))
    yield "without a finished sample", int(empty)
    if State.ACKED.value in states:
        ((stored,),) = db.execute("SELECT count(*) FROM groups WHERE state = 'acked'")
        yield "acked and not kept", _schema.get_int(db, "acked") - int(stored)
    yield "filtered", _schema.get_int(db, "filtered")


def stored_after(
    db: apsw.Connection, read: Read, place: int, number: int, states: Sequence[State], limit: int
) -> list[Stored]:
    """Return the next groups in these states that the rescoring has not been through, in the order of their pulls.

    Raises:
      LedgerError: a body is damaged.
    """
    names = json.dumps([state.value for state in states])
    return [_stored(db, read, row) for row in db.execute(_NEXT, (place, names, number, limit)).fetchall()]


def _stored(db: apsw.Connection, read: Read, row: tuple[Any, ...]) -> Stored:
    seq, state, attempt, attempts, cause, error, wasted, tokens, *columns = row
    body = read_body(read, columns)
    if State(state) not in {State.WAITING, State.QUARANTINED}:
        group = decode_group(body)
        return Stored(
            place=seq,
            state=State(state),
            attempt=attempt,
            prompt=group.prompt,
            trajectories=group.trajectories,
            tokens=tokens,
            group=group,
        )
    prompt = decode_prompt(body)
    report = None
    if State(state) is State.QUARANTINED:
        report = QuarantineReport(
            id=prompt.group_id, cause=Cause(cause), attempts=attempts, error=decode_failure(error)
        )
    ((sampled,),) = db.execute("SELECT coalesce(sum(tokens), 0) FROM samples WHERE seq = ?", (seq,))
    return Stored(
        place=seq,
        state=State(state),
        attempt=attempt,
        prompt=prompt,
        trajectories=tuple(decode_sample(read(found), prompt) for _, found in find_samples(db, seq)),
        tokens=int(sampled),
        wasted=decode_wasted(wasted),
        report=report,
    )


def finish(db: apsw.Connection, number: int) -> None:
    """Note that a rescoring is through with every group. Where the ledger names its reward, that is now this one.

    Raises:
      LedgerError: another rescoring is under way.
    """
    found, identity = _schema.under_way(db), _schema.identity_of(db)
    if identity is None or found.get("number") != number:
        raise LedgerError(f"the end of rescoring {number} refused: under way is {found.get('number', 'none')}")
    with db:
        _schema.put(db, "rescoring", json.dumps({**found, "open": False}))
        if "reward" in identity.settings:
            _schema.put(db, "settings", json.dumps({**identity.settings, "reward": found["reward"]}))
