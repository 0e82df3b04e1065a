"""How many groups a second reach the disk: the ledger against SQLite blobs and against one synced file a group.

Every arm gets the same groups and returns when they are durable. ``ledger`` is the whole path (tasks, codec, batching,
a thread, segments, rows), ``store`` the same without tasks and codec, ``sqlite`` plain blobs in WAL mode with
synchronous=FULL, ``files`` one file a group, written, synced and renamed. Then groups go through the ledger's whole life,
acked and reclaimed, and the resident memory must stay flat. ``--threshold`` measures instead from which size on a body is
better off in a segment than in its row.
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
from typing import Any

import attrs
import numpy as np
import trio
from harness.report import RESULTS, header
from rich.console import Console
from rich.table import Table

from trio_rollout._core.events import Acked, Delivered, Pulled, Ready, RunIdentity
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


@attrs.frozen(kw_only=True)
class Memory:
    """Resident megabytes while groups were committed, delivered, acked and reclaimed."""

    size: int
    groups: int
    after_a_fifth_mb: float
    at_the_end_mb: float

    @property
    def flat(self) -> bool:
        """Whether it grew by no more than 20 MB or a twentieth."""
        return self.at_the_end_mb <= self.after_a_fifth_mb + max(20.0, self.after_a_fifth_mb / 20)


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


def resident_mb() -> float:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def run_lives(path: Path, size: int, lots: int, lot: int) -> Memory:
    """So many lots of groups, each pulled, committed by a task a group, delivered and acked before the next."""
    seen: list[float] = []

    async def main() -> None:
        async with open_ledger(path) as ledger:
            await ledger.begin(IDENTITY)
            for step in range(lots):
                groups = [make_group(step * lot + number, size) for number in range(lot)]
                ids = tuple(group.id for group in groups)
                await ledger.record([pulled(groups)])
                async with trio.open_nursery() as nursery:
                    for group in groups:
                        nursery.start_soon(ledger.record, [Ready(group=group)])
                await ledger.record([Delivered(step=step, ids=ids)])
                await ledger.record([Acked(step=step, ids=ids)])
                seen.append(resident_mb())

    trio.run(main)
    return Memory(size=size, groups=lots * lot, after_a_fifth_mb=max(seen[: lots // 5]), at_the_end_mb=seen[-1])


def memory(options: argparse.Namespace) -> Iterator[Memory]:
    """At both sizes."""
    lots = 10 if options.quick else 60
    for size, lot in ((100_000, 64), (2_000_000, 8)):
        with fresh(options.dir) as path:
            yield run_lives(path, size, lots, lot)


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
    parser.add_argument("--save", action="store_true", help="keep figures and table in benchmarks/results")
    options = parser.parse_args()
    options.runs = options.runs or (1 if options.quick else 3)
    console = Console(stderr=options.json is sys.stdout, width=100, record=True)
    found = report(options, console)
    if options.json is not None:
        json.dump(found, options.json, indent=1)
        options.json.write("\n")
    if options.save:
        name = "commit_threshold" if options.threshold else "commit"
        (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (RESULTS / f"{name}.txt").write_text(console.export_text(), encoding="utf-8")


def report(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure and print; what was found, as JSON has it."""
    began = header()
    console.print(" ".join(f"{name}: {value}" for name, value in began.items() if isinstance(value, str | int | float)))
    lives = [] if options.threshold else list(memory(options))  # first: what other arms freed would hide a growth
    results = list(find_threshold(options) if options.threshold else compare(options))
    console.print(table_of(results))
    for one in lives:
        console.print(
            f"memory, {one.groups} groups of {one.size / 1000:.0f} KB: {one.after_a_fifth_mb:.0f} MB after a fifth, "
            f"{one.at_the_end_mb:.0f} MB at the end: {'flat' if one.flat else 'NOT FLAT'}"
        )
    return {
        "header": began,
        "results": [attrs.asdict(result) for result in results],
        "memory": [{**attrs.asdict(one), "flat": one.flat} for one in lives],
    }


if __name__ == "__main__":
    main()
