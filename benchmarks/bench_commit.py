"""How many groups a second reach the disk: the ledger against SQLite blobs and against one synced file a group.

Every arm gets the same groups and returns when they are durable. ``ledger`` is the whole path (tasks, codec, batching,
a thread, segments, rows), ``store`` the same without tasks and codec, ``sqlite`` plain blobs in WAL mode with
synchronous=FULL, ``files`` one file a group, written, synced and renamed. ``--threshold`` measures instead from which
size on a body is better off in a segment than in its row.
"""

import argparse
import json
import os
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
import numpy as np
import trio
from rich.console import Console
from rich.table import Table

from trio_rollout._core.events import Pulled, Ready, RunIdentity
from trio_rollout._core.values import Group, Prompt, Segment, Trajectory, VersionSpan
from trio_rollout.ledger import BatchLimits, open_ledger
from trio_rollout.ledger._codec import encode_group
from trio_rollout.ledger._disk import RealDisk
from trio_rollout.ledger._records import record_of
from trio_rollout.ledger._store import Store, StoreLimits

IDENTITY = RunIdentity(source="benchmark", samples_per_prompt=8)
BYTES_A_TOKEN = 9  # id, log-prob, mask


def make_group(number: int, size: int) -> Group:
    """A group of eight trajectories that takes about ``size`` bytes."""
    prompt = Prompt(id=str(number), input_ids=[1, 2, 3], label="42")
    response = max(1, size // 8 // BYTES_A_TOKEN)
    rng = np.random.default_rng(number)
    rows = [
        Trajectory(
            prompt=prompt,
            index=index,
            reward=1.0,
            segments=[
                Segment(
                    tokens=rng.integers(0, 150_000, response + 3),
                    response_length=response,
                    loss_mask=np.ones(response, np.uint8),
                    log_probs=rng.standard_normal(response, np.float32),
                    versions=[VersionSpan(0, response, 1)],
                )
            ],
        )
        for index in range(8)
    ]
    return Group(id=prompt.group_id, attempt=1, prompt=prompt, trajectories=rows)


@attrs.frozen(kw_only=True)
class Result:
    """One arm at one size and batch."""

    arm: str
    size: int
    batch: int
    groups_per_s: float
    cpu_ms_per_group: float
    runs: int


@contextmanager
def fresh(directory: Path) -> Generator[Path]:
    """An empty directory, removed afterwards."""
    path = Path(tempfile.mkdtemp(dir=directory))
    try:
        yield path
    finally:
        shutil.rmtree(path)


@attrs.define
class Clock:
    """Wall-clock and CPU seconds of the part that counts."""

    wall: float = 0.0
    cpu: float = 0.0

    @contextmanager
    def running(self) -> Generator[None]:
        """Measure the body."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.wall, self.cpu = time.perf_counter() - wall, time.process_time() - cpu


def batches(groups: Sequence[Group], batch: int) -> Iterator[Sequence[Group]]:
    """The groups in batches."""
    for first in range(0, len(groups), batch):
        yield groups[first : first + batch]


def pulled(groups: Sequence[Group]) -> Pulled:
    """The event that all these were pulled."""
    return Pulled(prompts=tuple(group.prompt for group in groups), source_state={})


def run_ledger(path: Path, groups: Sequence[Group], batch: int, clock: Clock) -> None:
    """One task a group, all at once."""

    async def main() -> None:
        async with open_ledger(path, batch=BatchLimits(items=batch)) as ledger:
            await ledger.begin(IDENTITY)
            await ledger.record([pulled(groups)])
            with clock.running():
                async with trio.open_nursery() as nursery:
                    for group in groups:
                        nursery.start_soon(ledger.record, [Ready(group=group)])

    trio.run(main)


def run_store(
    path: Path, groups: Sequence[Group], batch: int, clock: Clock, *, limits: StoreLimits | None = None
) -> None:
    """Batches one after the other, encoded beforehand."""
    store = Store(where=str(path), disk=RealDisk(path), limits=limits or StoreLimits())
    store.open()
    try:
        store.begin(IDENTITY)
        store.commit([record_of([pulled(groups)])])
        records = [[record_of([Ready(group=group)]) for group in part] for part in batches(groups, batch)]
        with clock.running():
            for part in records:
                store.commit(part)
    finally:
        store.close()


def run_sqlite(path: Path, groups: Sequence[Group], batch: int, clock: Clock) -> None:
    """Blobs in a table."""
    db = sqlite3.connect(path / "blobs.db", isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("CREATE TABLE groups(id TEXT PRIMARY KEY, body BLOB)")
        rows = [[(str(group.id), encode_group(group)) for group in part] for part in batches(groups, batch)]
        with clock.running():
            for part in rows:
                db.execute("BEGIN IMMEDIATE")
                db.executemany("INSERT INTO groups VALUES(?, ?)", part)
                db.execute("COMMIT")
    finally:
        db.close()


def run_files(path: Path, groups: Sequence[Group], batch: int, clock: Clock) -> None:
    """A file a group, each durable when its name is; a batch shares the sync of the names."""
    bodies = [[(str(group.id.prompt), encode_group(group)) for group in part] for part in batches(groups, batch)]
    directory = os.open(path, os.O_RDONLY)
    try:
        with clock.running():
            for part in bodies:
                for name, body in part:
                    with (path / f"{name}.tmp").open("wb", buffering=0) as file:
                        file.write(body)
                        os.fsync(file.fileno())
                    (path / f"{name}.tmp").rename(path / name)
                os.fsync(directory)
    finally:
        os.close(directory)


Arm = Callable[[Path, Sequence[Group], int, Clock], None]
ARMS: dict[str, Arm] = {"ledger": run_ledger, "store": run_store, "sqlite": run_sqlite, "files": run_files}


def measure(name: str, arm: Arm, groups: Sequence[Group], batch: int, *, runs: int, directory: Path) -> Result:
    """The median of some runs, each in an empty directory."""
    clocks = []
    for _ in range(runs):
        with fresh(directory) as path:
            clock = Clock()
            arm(path, groups, batch, clock)
            clocks.append(clock)
    return Result(
        arm=name,
        size=len(encode_group(groups[0])),
        batch=batch,
        groups_per_s=len(groups) / statistics.median(clock.wall for clock in clocks),
        cpu_ms_per_group=1000 * statistics.median(clock.cpu for clock in clocks) / len(groups),
        runs=runs,
    )


def compare(options: argparse.Namespace) -> Iterator[Result]:
    """All arms at both sizes and all batches."""
    counts = {100_000: 64 if options.quick else 512, 2_000_000: 8 if options.quick else 64}
    for size, count in counts.items():
        groups = [make_group(number, size) for number in range(count)]
        for batch in (1, 8, 64):
            for name, arm in ARMS.items():
                yield measure(name, arm, groups, batch, runs=options.runs, directory=options.dir)


def find_threshold(options: argparse.Namespace) -> Iterator[Result]:
    """The store with every body in the database, and with every body in a segment."""

    def limited(limit: int) -> Arm:
        return lambda path, groups, batch, clock: run_store(
            path, groups, batch, clock, limits=StoreLimits(inline=limit, together=0)
        )

    for size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        groups = [make_group(number, size * 1024) for number in range(64 if options.quick else 512)]
        for batch in (1, 8, 64):
            for name, limit in (("in the database", 2**40), ("in a segment", 0)):
                yield measure(name, limited(limit), groups, batch, runs=options.runs, directory=options.dir)


def table_of(results: Sequence[Result]) -> Table:
    """Groups a second, one row a size and batch, one column an arm."""
    arms = list(dict.fromkeys(result.arm for result in results))
    table = Table("size", "batch", *arms, title="groups/s (CPU ms a group)")
    cells = {(result.size, result.batch, result.arm): result for result in results}
    for size, batch in dict.fromkeys((result.size, result.batch) for result in results):
        found = [cells[size, batch, arm] for arm in arms]
        shown = [f"{one.groups_per_s:.0f} ({one.cpu_ms_per_group:.2f})" for one in found]
        table.add_row(f"{size / 1000:.0f} KB", str(batch), *shown)
    return table


def main() -> None:
    """Measure, print a table, and the figures as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few groups: to see that it works")
    parser.add_argument("--threshold", action="store_true", help="measure where bodies should lie instead")
    parser.add_argument("--runs", type=int, default=None, help="runs of each, the median counts (default 3, quick 1)")
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="where to write: a directory on the disk to be measured"
    )
    parser.add_argument(
        "--json", type=argparse.FileType("w"), metavar="FILE", help="write the figures here (- is stdout)"
    )
    options = parser.parse_args()
    options.runs = options.runs or (1 if options.quick else 3)
    results = list(find_threshold(options) if options.threshold else compare(options))
    Console(stderr=options.json is sys.stdout).print(table_of(results))
    if options.json is not None:
        json.dump([attrs.asdict(result) for result in results], options.json, indent=1)
        options.json.write("\n")


if __name__ == "__main__":
    main()
