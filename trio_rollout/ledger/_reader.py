"""Read a ledger without disturbing the run that writes it: synchronous, read-only, without locks.

Rows are read in small snapshots, so that a long export never keeps the writer from cleaning up its log. A body that the run
has reclaimed or moved meanwhile is looked up again.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast, final

import apsw
import attrs

from .._core.enums import Cause
from .._core.ledger_events import NO_WASTE, RunIdentity
from .._core.lifecycle import State
from .._core.statistics import TokenCounts
from .._core.values import Failure, Group, GroupId, Prompt, QuarantineReport
from ..errors import LedgerError
from . import _schema
from ._codec import decode_failure, decode_group, decode_prompt, decode_sample, decode_wasted, unpacked
from ._disk import DATABASE, open_own, read_at
from ._location import Inline, Location, location_of
from ._recover import quarantined
from ._samples import GroupSamples, find_samples
from ._segments import name_of

P = ParamSpec("P")
T = TypeVar("T")

_PAGE = 256
_SHARED = [
    "epoch",
    "prompt",
    "state",
    "attempt",
    "attempts",
    "step",
    "cause",
    "reason",
    "oldest",
    "newest",
    "rewards",
    "wasted",
]
_COLUMNS = ("place", *_SHARED, "error", "kept", "unscored", "turns", "tokens", "is_stored")
_SELECT = f"""
SELECT seq, {", ".join(_SHARED)}, error,
(SELECT count(*) FROM samples WHERE samples.seq = groups.seq AND scored),
(SELECT count(*) FROM samples WHERE samples.seq = groups.seq AND NOT scored),
(SELECT count(*) FROM turns WHERE turns.seq = groups.seq),
tokens + (SELECT coalesce(sum(tokens), 0) FROM samples WHERE samples.seq = groups.seq)
+ (SELECT coalesce(sum(tokens), 0) FROM turns WHERE turns.seq = groups.seq), 1 FROM groups WHERE
"""  # ruff: ignore[hardcoded-sql-expression]  ours
_ENDED = f"SELECT id, {', '.join(_SHARED)}, NULL, 0, 0, 0, tokens, 0 FROM ended WHERE"  # ruff: ignore[hardcoded-sql-expression]  ours
_ROWS = f"{_SELECT} seq > ? AND state IN (SELECT value FROM json_each(?)) ORDER BY seq LIMIT ?"  # ruff: ignore[hardcoded-sql-expression]  ours
_ROW = f"{_SELECT} epoch = ? AND prompt = ?"
_ENDED_ROWS = f"{_ENDED} id > ? AND state IN (SELECT value FROM json_each(?)) ORDER BY id LIMIT ?"  # ruff: ignore[hardcoded-sql-expression]  ours
_ENDED_ROW = f"{_ENDED} epoch = ? AND prompt = ? ORDER BY id DESC LIMIT 1"
_BECAME = {State.DELIVERED: "delivered", State.ACKED: "delivered", State.FILTERED: "filtered"}
_WITH_GROUP = (State.READY, State.DELIVERED, State.ACKED)


@attrs.frozen(kw_only=True)
class GroupSummary:
    """One group without its tokens. ``attempts`` counts the attempts that were used up, ``attempt`` is the last one's number.

    ``kept`` counts the finished samples of a group that is waiting or quarantined, ``unscored`` those that only lack a
    reward, ``turns`` the recorded turns of others.
    ``tokens`` were sampled for its body or for these, ``wasted`` in vain, by cause. ``is_stored`` is False for a group that was
    acked or filtered and not kept.
    """

    id: GroupId
    state: State
    attempt: int
    attempts: int
    step: int | None
    cause: Cause | None
    reason: str | None
    oldest_version: int | None
    newest_version: int | None
    rewards: tuple[Any, ...]
    error: Failure | None
    kept: int = 0
    unscored: int = 0
    turns: int = 0
    tokens: int = 0
    wasted: Mapping[Cause, int] = NO_WASTE
    is_stored: bool = True


def _summary(row: tuple[Any, ...]) -> GroupSummary:
    found = dict(zip(_COLUMNS, row, strict=True))
    return GroupSummary(
        id=GroupId(found["epoch"], found["prompt"]),
        state=State(found["state"]),
        attempt=found["attempt"],
        attempts=found["attempts"],
        step=found["step"],
        cause=None if found["cause"] is None else Cause(found["cause"]),
        reason=found["reason"],
        oldest_version=found["oldest"],
        newest_version=found["newest"],
        rewards=() if found["rewards"] is None else tuple(unpacked(found["rewards"])),
        error=None if found["error"] is None else decode_failure(found["error"]),
        kept=found["kept"],
        unscored=found["unscored"],
        turns=found["turns"],
        tokens=found["tokens"],
        wasted=decode_wasted(found["wasted"]),
        is_stored=bool(found["is_stored"]),
    )


@contextmanager
def _damage_told(path: Path) -> Generator[None]:
    """Raise a LedgerError for everything that a damaged ledger may raise."""
    try:
        yield
    except LedgerError:
        raise
    except Exception as error:
        raise LedgerError(f"ledger {path} is damaged, or can't be read: {type(error).__name__}: {error}") from error


def _told(method: Callable[Concatenate["LedgerReader", P], T]) -> Callable[Concatenate["LedgerReader", P], T]:
    """Have a method, also one that yields, raise a LedgerError for everything that a damaged ledger may raise."""

    def each(path: Path, found: Iterator[Any]) -> Iterator[Any]:
        with _damage_told(path):
            yield from found

    @wraps(method)
    def read(self: "LedgerReader", *args: P.args, **options: P.kwargs) -> T:
        with _damage_told(self._path):
            found: Any = method(self, *args, **options)
        return cast(T, each(self._path, found) if isinstance(found, Iterator) else found)

    return cast("Callable[Concatenate[LedgerReader, P], T]", read)


@final
@attrs.define(eq=False, repr=False)
class LedgerReader:
    """A ledger's content. Made by ``read_ledger``."""

    _path: Path
    _db: apsw.Connection

    @_told
    def identity(self) -> RunIdentity | None:
        """Return the run that the ledger belongs to; None if no run has begun."""
        return _schema.identity_of(self._db)

    @_told
    def counts(self) -> dict[State, int]:
        """Return the number of groups in each state; acked and filtered ones count also after their rows were reclaimed."""
        found: dict[str, int] = dict(self._db.execute("SELECT state, count(*) FROM groups GROUP BY 1"))
        ended = {state: _schema.get_int(self._db, state.value) for state in (State.ACKED, State.FILTERED)}
        states = (State.WAITING, State.READY, State.DELIVERED, State.QUARANTINED)
        return {state: found.get(state.value, 0) for state in states} | ended

    @_told
    def next_step(self) -> int:
        """Return the step of the next new batch."""
        return _schema.get_int(self._db, "next_step")

    @_told
    def weight_version(self) -> int | None:
        """Return the version of the last weight update, or of the newest token of a finished group; None without both."""
        ((newest,),) = self._db.execute(
            "SELECT max(newest) FROM (SELECT newest FROM groups UNION ALL SELECT newest FROM ended)"
        )
        known = _schema.get(self._db, "weight_version")
        version = newest if known is None else known
        return version if isinstance(version, int) else None

    @_told
    def tokens(self) -> TokenCounts:
        """Return the sampled tokens by what became of them, as ``statistics().tokens`` does for one run.

        Those of tries under way, and of tries that a killed process had under way, are in no ledger.
        """
        delivered, filtered = (_schema.get_int(self._db, f"{state}_tokens") for state in ("acked", "filtered"))
        counts = {"kept": 0, "delivered": delivered, "filtered": filtered}
        wasted = Counter({cause: _schema.get_int(self._db, f"wasted_{cause.value}") for cause in Cause})
        for summary in chain(self.summaries(), self.ended()):
            wasted.update(summary.wasted)
            if summary.state is State.QUARANTINED:
                wasted[summary.cause or Cause.ERROR] += summary.tokens
            else:
                counts[_BECAME.get(summary.state, "kept")] += summary.tokens
        return TokenCounts(in_flight=0, wasted={cause: lost for cause, lost in wasted.items() if lost}, **counts)

    @_told
    def summaries(self, *states: State) -> Iterator[GroupSummary]:
        """Yield the groups in these states, in any state if none is given, in the order they were pulled."""
        return map(_summary, self._rows(states))

    @_told
    def summary_by_id(self, gid: GroupId) -> GroupSummary | None:
        """Return one group's summary; None if the ledger has no row of it, or none any more."""
        row = self._db.execute(_ROW, tuple(gid)).fetchone() or self._db.execute(_ENDED_ROW, tuple(gid)).fetchone()
        return None if row is None else _summary(row)

    @_told
    def ended(self, *states: State) -> Iterator[GroupSummary]:
        """Yield the last groups that were acked or filtered and not kept, in the order of their ends; older ones are counted."""
        return map(_summary, self._pages(_ENDED_ROWS, states))

    def rescoring(self) -> str | None:
        """Return the name of the reward with which the groups are being scored again; None if they are not."""
        found = _schema.under_way(self._db)
        return str(found["reward"]) if found.get("open") else None

    def forgotten(self) -> int:
        """Return the number of groups that were acked or filtered, and of which nothing is left but their count."""
        counts = self.counts()
        query = (
            "SELECT (SELECT count(*) FROM groups WHERE state IN ('acked', 'filtered')) + (SELECT count(*) FROM ended)"
        )
        ((known,),) = self._db.execute(query)
        return counts[State.ACKED] + counts[State.FILTERED] - int(known)

    def _rows(self, states: tuple[State, ...]) -> Iterator[tuple[Any, ...]]:
        return self._pages(_ROWS, states)

    def _pages(self, query: str, states: tuple[State, ...]) -> Iterator[tuple[Any, ...]]:
        wanted = json.dumps([state.value for state in states or State])
        last: Any = -1
        while page := self._db.execute(query, (last, wanted, _PAGE)).fetchall():
            last = page[-1][0]
            yield from page

    @_told
    def groups(self, *states: State) -> Iterator[tuple[State, Group]]:
        """Yield the finished groups in these states (default: ready, delivered, acked), in the order they were pulled.

        A group that the run reclaims or requeues meanwhile is left out.
        """
        for row in self._rows(states or _WITH_GROUP):
            found = self._body(GroupId(*row[1:3]))
            if found is not None and found[0] in _WITH_GROUP:
                yield found[0], decode_group(found[1])

    @_told
    def group_by_id(self, gid: GroupId) -> Group | Prompt | None:
        """Return the group, or its prompt if it isn't finished; None if the ledger has no body for this id."""
        found = self._body(gid)
        if found is None:
            return None
        return decode_group(found[1]) if found[0] in _WITH_GROUP else decode_prompt(found[1])

    @_told
    def quarantined(self) -> tuple[QuarantineReport, ...]:
        """Return the quarantined groups, in the order in which they were quarantined."""
        return quarantined(self._db)

    @_told
    def samples(self, gid: GroupId) -> GroupSamples:
        """Return the samples that are stored of a group beside its body: of one that is waiting or quarantined."""
        found, row = self._body(gid), self._db.execute(_ROW, tuple(gid)).fetchone()
        if found is None or row is None or found[0] in _WITH_GROUP:
            return GroupSamples()
        prompt = decode_prompt(found[1])
        bodies = self._bodies(f"a sample of group {gid}", lambda: find_samples(self._db, row[0]))
        return GroupSamples(
            kept=tuple(decode_sample(body, prompt) for scored, body in bodies if scored),
            unscored=tuple(decode_sample(body, prompt) for scored, body in bodies if not scored),
        )

    def _body(self, gid: GroupId) -> tuple[State, bytes] | None:
        return next(iter(self._bodies(f"group {gid}", lambda: self._location(gid))), None)

    def _bodies(self, what: str, find: Callable[[], list[tuple[T, Location]]]) -> list[tuple[T, bytes]]:
        """Return the bodies that ``find`` locates; look them up again if the run has reclaimed or moved one meanwhile."""
        found = find()
        while True:
            bodies = [(key, location, self._read(location)) for key, location in found]
            lost = [location for _, location, body in bodies if body is None]
            if not lost:
                return [(key, body) for key, _, body in bodies if body is not None]
            again = find()
            if again == found:
                raise LedgerError(f"ledger {self._path}: the body of {what} is damaged or gone ({lost[0]})")
            found = again

    def _location(self, gid: GroupId) -> list[tuple[State, Location]]:
        rows: Any = self._db.execute(
            "SELECT state, segment, start, length, crc, body FROM whole WHERE epoch = ? AND prompt = ?", tuple(gid)
        )
        return [(State(state), location) for state, *rest in rows if (location := location_of(*rest)) is not None]

    def _read(self, location: Location) -> bytes | None:
        if isinstance(location, Inline):
            return location.data
        try:
            data = read_at(self._path / name_of(location.segment), location.offset, location.length)
        except FileNotFoundError:
            return None
        return data if location.holds(data) else None


def _open(path: Path, options: str) -> apsw.Connection:
    flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
    db = apsw.Connection(f"{(path / DATABASE).absolute().as_uri()}?mode=ro{options}", flags=flags)
    db.set_busy_timeout(10_000)
    _schema.prepare_reader(db, str(path))
    return db


def _connect(path: Path) -> apsw.Connection:
    if not os.path.lexists(path / DATABASE):
        raise LedgerError(f"{path} is no ledger: it has no {DATABASE}")
    opened = open_own(path / DATABASE, os.O_RDONLY)
    size = os.fstat(opened).st_size
    os.close(opened)
    if not size:
        raise LedgerError(f"ledger {path}: {DATABASE} has 0 bytes, so its content was lost")
    try:
        return _open(path, "")
    except (apsw.ReadOnlyError, apsw.CantOpenError) as error:
        # In a read-only directory SQLite can't make the files that readers share with a writer. If there is no log, or
        # an empty one as readers leave it, there is no writer and nothing to share.
        log = path / f"{DATABASE}-wal"
        if log.exists() and log.stat().st_size:
            raise LedgerError(
                f"ledger {path} can't be read without write permission in its directory: {error}"
            ) from error
    except apsw.Error as error:
        raise LedgerError(f"ledger {path} can't be read: {error}") from error
    return _open(path, "&immutable=1")


@contextmanager
def read_ledger(path: str | PathLike[str]) -> Generator[LedgerReader]:
    """Open a ledger for reading, also while a run writes it.

    Raises:
      LedgerError: there is no ledger, or it has a newer format.
    """
    where = Path(path)
    with _damage_told(where):
        db = _connect(where)
    try:
        yield LedgerReader(where, db)
    finally:
        db.close()
