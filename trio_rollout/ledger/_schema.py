"""The tables of a ledger, its format, the run that it belongs to, and the settings of a writer's connection."""

import json
from collections.abc import Mapping
from typing import Any

import apsw

from .._core.ledger_events import RunIdentity
from ..errors import LedgerError

FORMAT = 4
"""Increased whenever an older version of the package could misread the files of a newer one."""

_FORMAT_1 = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE groups(
  seq INTEGER PRIMARY KEY,        -- order of the pulls
  epoch INTEGER NOT NULL,
  prompt TEXT NOT NULL,
  state TEXT NOT NULL,            -- waiting, ready, delivered, acked, filtered, quarantined
  place INTEGER NOT NULL,         -- order within a state: counts pulls, requeues and finished groups
  attempt INTEGER NOT NULL DEFAULT 0,
  attempts INTEGER NOT NULL DEFAULT 0,
  free INTEGER NOT NULL DEFAULT 0,
  step INTEGER,
  cause TEXT,
  reason TEXT,
  error BLOB,
  oldest INTEGER,
  newest INTEGER,
  rewards BLOB,
  segment INTEGER,                -- the body (a prompt while waiting, a group once ready), if it is in a segment
  start INTEGER,
  length INTEGER,
  crc INTEGER,
  UNIQUE(epoch, prompt)
);
-- The other bodies. In a table of their own: a change of state must not write the body again.
CREATE TABLE bodies(seq INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE VIEW whole AS SELECT * FROM groups LEFT JOIN bodies USING (seq);
CREATE INDEX groups_by_state ON groups(state, place);
CREATE INDEX groups_by_segment ON groups(segment) WHERE segment IS NOT NULL;
"""
_SAMPLES = """samples(
  id INTEGER PRIMARY KEY,
  seq INTEGER NOT NULL,           -- the group, which waits or is quarantined; a finished group has its samples in its body
  idx INTEGER NOT NULL,
  attempt INTEGER NOT NULL,
  scored INTEGER NOT NULL,        -- 0 if the sample's scorer failed for good
  segment INTEGER,                -- the body (a trajectory without its prompt), if it lies in a segment
  start INTEGER,
  length INTEGER,
  crc INTEGER,
  body BLOB,                      -- the body, if it does not; in this table, because a sample never changes
  UNIQUE(seq, idx)
)"""
_FORMAT_2 = f"""
ALTER TABLE groups ADD COLUMN counts BLOB;  -- the tries of each sample
CREATE TABLE {_SAMPLES};
CREATE INDEX samples_by_segment ON samples(segment) WHERE segment IS NOT NULL;
"""
_TOKENS = "tokens INTEGER NOT NULL DEFAULT 0"
_ENDED = """ended(                    -- the last groups that were acked or filtered and not kept, without their bodies
  id INTEGER PRIMARY KEY,         -- order of their ends
  epoch INTEGER NOT NULL,
  prompt TEXT NOT NULL,
  state TEXT NOT NULL,
  attempt INTEGER NOT NULL,
  attempts INTEGER NOT NULL,
  step INTEGER,
  cause TEXT,
  reason TEXT,
  oldest INTEGER,
  newest INTEGER,
  rewards BLOB,
  tokens INTEGER NOT NULL,
  wasted BLOB
)"""
_FORMAT_3 = f"""
ALTER TABLE groups ADD COLUMN {_TOKENS};  -- sampled for the body of a finished group
ALTER TABLE groups ADD COLUMN wasted BLOB;  -- tokens that were sampled in vain, by cause
ALTER TABLE groups ADD COLUMN rescored INTEGER NOT NULL DEFAULT 0;  -- the last rescoring that is through with the group
ALTER TABLE samples ADD COLUMN {_TOKENS};
CREATE TABLE {_ENDED};
"""
_TURNS = """turns(
  id INTEGER PRIMARY KEY,
  seq INTEGER NOT NULL,           -- the group, which waits
  idx INTEGER NOT NULL,           -- the sample, which is not finished
  number INTEGER NOT NULL,
  tokens INTEGER NOT NULL,
  segment INTEGER,                -- the body (a recorded turn), if it lies in a segment
  start INTEGER,
  length INTEGER,
  crc INTEGER,
  body BLOB,                      -- the body, if it does not
  UNIQUE(seq, idx, number)
)"""
_FORMAT_4 = f"""
CREATE TABLE {_TURNS};
CREATE INDEX turns_by_segment ON turns(segment) WHERE segment IS NOT NULL;
"""
_MIGRATIONS = (_FORMAT_1, _FORMAT_2, _FORMAT_3, _FORMAT_4)
"""The statements that lead from each format to the next. A new ledger goes through all of them."""


def get(db: apsw.Connection, key: str) -> object:
    """Return a value of the meta table; None if it was never set."""
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if row is None else row[0]


def get_int(db: apsw.Connection, key: str) -> int:
    """Return a counter of the meta table; 0 if it was never set."""
    value = get(db, key)
    return value if isinstance(value, int) else 0


def put(db: apsw.Connection, key: str, value: int | str | bytes) -> None:
    """Set a value of the meta table."""
    db.execute("INSERT INTO meta VALUES(?, ?) ON CONFLICT(key) DO UPDATE SET value = excluded.value", (key, value))


def add(db: apsw.Connection, key: str, more: int) -> None:
    """Increase a counter of the meta table."""
    put(db, key, get_int(db, key) + more)


def segments(db: apsw.Connection) -> dict[int, tuple[int, int]]:
    """Return, for each segment that rows name, the end of its last body and its live bytes."""
    query = (
        "SELECT segment, max(start + length), sum(length) FROM ("
        "SELECT segment, start, length FROM groups WHERE segment IS NOT NULL UNION ALL "
        "SELECT segment, start, length FROM samples WHERE segment IS NOT NULL UNION ALL "
        "SELECT segment, start, length FROM turns WHERE segment IS NOT NULL) GROUP BY segment"
    )
    return {number: (end, live) for number, end, live in db.execute(query)}


def free_bytes(db: apsw.Connection) -> int:
    """Return the bytes in unused pages of the database."""
    ((pages,), (size,)) = *db.execute("PRAGMA freelist_count"), *db.execute("PRAGMA page_size")
    return int(pages) * int(size)


def shrink(db: apsw.Connection) -> None:
    """Free some unused pages; the file shrinks when the log is next written into it."""
    db.execute("PRAGMA incremental_vacuum(4096)").fetchall()


def prepare(db: apsw.Connection, where: str) -> None:
    """Set up a writer's connection for durable writes; create the tables, or bring those of an older format up to date."""
    db.set_busy_timeout(10_000)  # after a crash a reader holds the lock while it recovers the log
    db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # in a new database only; unused pages can then be freed
    mode = db.execute("PRAGMA journal_mode = WAL").fetchall()  # all rows: the mode is set when the last one is read
    if mode != [("wal",)]:  # SQLite raises no error if it can't change the mode
        raise LedgerError(f"ledger {where}: its directory can't hold a write-ahead log (SQLite stays in mode {mode})")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA journal_size_limit = 16777216")  # bytes; the space of one large transaction is freed
    found = check_format(db, where, may_be_new=True)
    if found < FORMAT:
        with db:  # one transaction: after a crash the ledger is still of the old format
            for statements in _MIGRATIONS[found:]:
                db.execute(statements)
            put(db, "format", FORMAT)


def prepare_reader(db: apsw.Connection, where: str) -> None:
    """Make a ledger of any format look like one of the newest to a reader's connection: temporary tables hide the old ones.

    A run that brings the ledger up to date meanwhile shows what is new in it to the next reader only.
    """
    found = check_format(db, where)
    if found == FORMAT:
        return
    db.execute(f"PRAGMA temp_store = MEMORY; CREATE TEMP TABLE {_TURNS}")
    if found == 3:  # ruff: ignore[magic-value-comparison]  the format
        return
    db.execute(f"CREATE TEMP TABLE {_ENDED}")
    # Of two columns with one name the first counts: after the ledger was brought up to date, its own.
    db.execute("CREATE TEMP VIEW groups AS SELECT *, 0 AS tokens, NULL AS wasted, 0 AS rescored FROM main.groups")
    if found == 1:
        db.execute(f"CREATE TEMP TABLE {_SAMPLES}; ALTER TABLE temp.samples ADD COLUMN {_TOKENS}")
    else:
        db.execute("CREATE TEMP VIEW samples AS SELECT *, 0 AS tokens FROM main.samples")


def check_format(db: apsw.Connection, where: str, *, may_be_new: bool = False) -> int:
    """Return the ledger's format, 0 for a new database.

    Raises:
      LedgerError: the database is no ledger, or has a newer format; says what to do.
    """
    tables: set[object] = {name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    if not tables and may_be_new:
        return 0
    if not tables:
        raise LedgerError(f"ledger {where} is empty: its run was stopped before it had begun; start that run again")
    if not {"meta", "groups"} <= tables:
        raise LedgerError(f"{where} holds a database that is no ledger (tables: {sorted(map(str, tables))})")
    found = get(db, "format")
    if not isinstance(found, int) or not 1 <= found <= FORMAT:
        raise LedgerError(
            f"ledger {where} has format {found}, this version of trio_rollout reads format {FORMAT} and older: "
            "use the version that wrote it, or another directory"
        )
    return found


def bind(db: apsw.Connection, identity: RunIdentity, where: str) -> None:
    """Bind a new ledger to a run, or check that the ledger belongs to that run.

    Raises:
      LedgerError: the ledger belongs to another run; names the setting that differs. Or a rescoring is not complete.
    """
    known, rescoring = identity_of(db), under_way(db)
    if known is not None and "reward" in known.settings and rescoring.get("open"):
        raise LedgerError(
            f"ledger {where} is being scored again with {rescoring['reward']!r}, and some of its groups still have other "
            f"rewards: finish that first, with 'trio-rollout rescore {where} --reward {rescoring['reward']}'"
        )
    if known is None:
        with db:
            put(db, "source", identity.source)
            put(db, "samples_per_prompt", identity.samples_per_prompt)
            put(db, "settings", json.dumps(dict(identity.settings)))
        return
    theirs, ours = _named(known), _named(identity)
    for name in dict.fromkeys([*ours, *theirs]):
        if theirs.get(name) != ours.get(name):
            raise LedgerError(
                f"ledger {where} belongs to another run: its {name} is {theirs.get(name)!r}, this run's is "
                f"{ours.get(name)!r}. Use another directory, or the settings of that run"
            )


def identity_of(db: apsw.Connection) -> RunIdentity | None:
    """Return the run that the ledger belongs to; None if no run has begun."""
    source, settings = get(db, "source"), get(db, "settings")
    if not isinstance(source, str):
        return None
    found = json.loads(settings) if isinstance(settings, str) else {}
    return RunIdentity(source=source, samples_per_prompt=get_int(db, "samples_per_prompt"), settings=found)


def under_way(db: apsw.Connection) -> dict[str, Any]:
    """Return the last rescoring: its number, reward and states, and if it is open; empty if there was none."""
    found = get(db, "rescoring")
    return dict(json.loads(found)) if isinstance(found, str) else {}


def _named(identity: RunIdentity) -> Mapping[str, object]:
    own = {"source": identity.source, "samples_per_prompt": identity.samples_per_prompt}
    return own | {name: str(value) for name, value in identity.settings.items()}
