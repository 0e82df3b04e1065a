"""Groups a second that reach the disk: the ledger against SQLite blobs and against one synced file a group.

Every arm gets the same groups and returns when they are durable. ``ledger`` is the whole path (tasks, codec, batching,
a thread, segments, rows), ``store`` the same without tasks and codec, ``sqlite`` plain blobs in WAL mode with
synchronous=FULL, ``files`` one file a group, written, synced and renamed. Then groups go through the ledger's whole life,
acked and reclaimed, and the resident memory must stay flat. ``--threshold`` measures instead from which size on a body is
better off in a segment than in its row.
"""

import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
import click
import numpy as np
import trio
from harness.report import Report, header, lines, options, say_to_stderr
from harness.rounds import Run, figures_of, median_of

from trio_rollout._core.ledger_events import Acked, Delivered, Pulled, Ready, RunIdentity
from trio_rollout._core.values import Group, Prompt, Segment, Trajectory, VersionSpan
from trio_rollout.ledger import BatchLimits, open_ledger
from trio_rollout.ledger._codec import encode_group
from trio_rollout.ledger._disk import RealDisk
from trio_rollout.ledger._store import Store, StoreLimits
from trio_rollout.ledger._transaction import encode_transaction

IDENTITY = RunIdentity(source="benchmark", samples_per_prompt=8)
BYTES_A_TOKEN = 9  # id, log-prob, mask
BATCHES = (1, 8, 64)


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
class Memory:
    """Resident megabytes while groups were committed, delivered, acked and reclaimed."""

    size: int
    groups: int
    after_a_fifth_mb: float
    at_the_end_mb: float

    @property
    def flat(self) -> bool:
        """True if it grew by no more than 20 MB or a twentieth."""
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
        store.commit([encode_transaction([pulled(groups)])])
        records = [[encode_transaction([Ready(group=group)]) for group in part] for part in batches(groups, batch)]
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


def memory(directory: Path, *, quick: bool) -> Iterator[Memory]:
    """At both sizes."""
    for size, lot in ((100_000, 64), (2_000_000, 8)):
        with fresh(directory) as path:
            yield run_lives(path, size, 10 if quick else 60, lot)


Arm = Callable[[Path, Sequence[Group], int, Clock], None]
ARMS: dict[str, Arm] = {"ledger": run_ledger, "store": run_store, "sqlite": run_sqlite, "files": run_files}


@attrs.frozen(kw_only=True)
class Job:
    """The same groups in the same batches for each of some arms."""

    size: int
    count: int
    batch: int
    arms: dict[str, Arm]

    @property
    def cell(self) -> str:
        """Its name."""
        return f"{self.size // 1000} KB, batches of {self.batch}"


def measure(name: str, job: Job, groups: Sequence[Group], number: int, directory: Path) -> Run:
    """One arm in an empty directory."""
    clock = Clock()
    with fresh(directory) as path:
        job.arms[name](path, groups, job.batch, clock)
    figures = {"groups_per_s": len(groups) / clock.wall, "cpu_ms": 1000 * clock.cpu / len(groups)}
    return Run(cell=job.cell, arm=name, round=number, load=os.getloadavg()[0], figures=figures)


def compared(*, quick: bool) -> list[Job]:
    """All arms at both sizes and all batches."""
    counts = {100_000: 64 if quick else 512, 2_000_000: 8 if quick else 64}
    return [Job(size=size, count=count, batch=batch, arms=ARMS) for size, count in counts.items() for batch in BATCHES]


def around_the_threshold(*, quick: bool) -> list[Job]:
    """The store with every body in the database, and with every body in a segment."""

    def limited(limit: int) -> Arm:
        return lambda path, groups, batch, clock: run_store(
            path, groups, batch, clock, limits=StoreLimits(inline=limit, together=0)
        )

    arms = {"in the database": limited(2**40), "in a segment": limited(0)}
    sizes = [1000 * 2**power for power in range(9)]
    return [Job(size=size, count=64 if quick else 512, batch=batch, arms=arms) for size in sizes for batch in BATCHES]


def run_jobs(jobs: Sequence[Job], rounds: int, directory: Path, say: Callable[[str], None]) -> Iterator[Run]:
    """Every job, its arms interleaved."""
    for job in jobs:
        groups = [make_group(number, job.size) for number in range(job.count)]
        for number in range(rounds):
            for name in job.arms:
                run = measure(name, job, groups, number, directory)
                say(f"{job.cell}, {name}: {run.figures['groups_per_s']:.0f} groups/s")
                yield run


def shown(report: Report, jobs: Sequence[Job], figure: str, title: str) -> None:
    """One row a job, one column an arm."""
    arms = list(jobs[0].arms)
    rows = [(job.cell, *(median_of(figures_of(report.runs, job.cell, arm, figure)) for arm in arms)) for job in jobs]
    report.table(title, ("groups", *arms), rows)


@click.command(help=__doc__)
@options
@click.option("--threshold", is_flag=True, help="Measure where bodies should lie instead.")
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, exists=True),
    default=Path(),
    help="Where to write: a directory on the disk to be measured (default: here).",
)
def main(*, quick: bool, rounds: int | None, out: Path, quiet: bool, threshold: bool, directory: Path) -> None:
    """Measure and show."""
    began, say = header(), say_to_stderr(quiet=quiet)
    lives = [] if threshold else list(memory(directory, quick=quick))  # first: what arms freed would hide a growth
    jobs = around_the_threshold(quick=quick) if threshold else compared(quick=quick)
    runs = list(run_jobs(jobs, rounds or (1 if quick else 3), directory, say))
    report = Report("commit_threshold" if threshold else "commit", "quick" if quick else "full", runs, began)
    shown(report, jobs, "groups_per_s", "groups/s, medians (smallest to largest)")
    shown(report, jobs, "cpu_ms", "CPU ms a group, medians (smallest to largest)")
    rows = [
        (f"{one.groups} of {one.size // 1000} KB", f"{one.after_a_fifth_mb:.0f}", f"{one.at_the_end_mb:.0f}", one.flat)
        for one in lives
    ]
    if rows:
        report.table("resident memory", ("groups", "MB after a fifth", "MB at the end", "flat"), rows)
    series = {
        arm: [
            (job.size / 1000, found.value)
            for job in jobs
            if job.batch == BATCHES[-1] and (found := median_of(figures_of(runs, job.cell, arm, "groups_per_s")))
        ]
        for arm in jobs[0].arms
    }
    report.finish(out, lines(series, x="KB a group", y=f"groups/s, batches of {BATCHES[-1]}"))


if __name__ == "__main__":
    main()
