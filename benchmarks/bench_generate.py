"""CPU per rollout, throughput and excess latency: the whole engine against the same job on asyncio.

Every cell is a number of rollouts in flight and a number of output tokens with log-probs. Each arm runs its whole engine in a
process against a fake server in another one; CPU seconds are that process's, user and system. The bare client and the
bare transport are measured in the cells where a target wants them. Excess latency is what a call took beyond what the server
says that it took itself.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs
import click
from harness.arms import AIOHTTP, AIOHTTP_UVLOOP, ARMS, CONTROL, HTTPX, OURS
from harness.fake import Latency, fake_server
from harness.report import Report, header, lines, options, say_to_stderr
from harness.rounds import Arm, Cell, Run, figures_of, median_of, ratio, run_cells
from harness.spec import Spec

from trio_rollout.sglang._wire import decoding

SLOTS = (1, 64, 256, 1024, 2048)
TOKENS = (16, 512, 8192)
MOST = {8192: 256}
HTTPX_MOST = 64
CLIENT = "trio_rollout, bare client"
PURE = "trio_rollout, pure decoding"
TRANSPORT = "trio_rollout, bytes"
AIOHTTP_BYTES = "aiohttp, bytes"
CLIENT_CELLS = ((64, 8192), (2048, 512))
TRANSPORT_CELL = (2048, 16)
WINDOW_S = 2.0
# At 2,048 in flight the garbage collector stops a client for 40 ms once in a second or two, and for longer once in ten: windows of
# two seconds have none of it or several, which decides over the tail and moves CPU by a tenth.
WIDE_WINDOW_S = 5.0


def name_of(slots: int, tokens: int) -> str:
    """A cell's name."""
    return f"{slots} in flight, {tokens} tokens"


def latency_of(slots: int, tokens: int) -> Latency:
    """Such that the offered load leaves the machine some room: some hundred answers a second, 8192 tokens twenty a second."""
    if slots == 1:
        return Latency()
    if tokens == 8192:
        return (
            Latency(median=slots / 20 * 1000, sigma=0.3, cap=30_000) if slots > 64 else Latency(median=2000, sigma=0.5)
        )
    return Latency(median=max(200.0, slots / 700 * 1000), sigma=0.5, cap=10_000)


def arms_of(slots: int, tokens: int) -> Iterable[Arm]:
    """Everybody who takes part in a cell."""
    for arm in ARMS:
        with_target = (slots, tokens) in {*CLIENT_CELLS, TRANSPORT_CELL}
        if slots <= HTTPX_MOST if arm == HTTPX else with_target if arm == AIOHTTP_UVLOOP else True:
            yield Arm(name=arm, world=arm, job="steady")
    if (slots, tokens) in CLIENT_CELLS:
        yield Arm(name=CLIENT, world=OURS, job="bare")
        yield Arm(name=PURE, world=OURS, job="steady", changes={"native": False})
    if (slots, tokens) == TRANSPORT_CELL:
        yield Arm(name=TRANSPORT, world=OURS, job="bytes")
        yield Arm(name=AIOHTTP_BYTES, world=AIOHTTP, job="bytes")


def cell_of(slots: int, tokens: int, *, window: float, rounds: int) -> Cell:
    """One cell."""
    per_group = 1 if slots == 1 else 8
    spec = Spec(
        url="",
        slots=slots,
        tokens=tokens,
        per_group=per_group,
        batch=1 if slots == 1 else 8,
        warm=max(20, slots),  # the first wave, which starts all at once, is over
        answers=100 if tokens == 8192 else min(1000, max(200, slots)),
        window=window,
        limit=90,
    )
    return Cell(
        name=name_of(slots, tokens),
        spec=spec,
        arms=tuple(arms_of(slots, tokens)),
        latency=latency_of(slots, tokens),
        rounds=rounds,
    )


def cells_of(*, quick: bool, rounds: int | None) -> list[Cell]:
    """The grid; the cells that have a target get more rounds."""
    if quick:
        cells = [cell_of(64, 16, window=1.0, rounds=1), cell_of(256, 512, window=1.0, rounds=1)]
        return [attrs.evolve(cell, arms=[arm for arm in cell.arms if arm.world != HTTPX]) for cell in cells]
    found = []
    for tokens in TOKENS:
        for slots in SLOTS:
            if slots <= MOST.get(tokens, slots):
                target = (slots, tokens) in CLIENT_CELLS or (slots, tokens) == TRANSPORT_CELL
                window = WIDE_WINDOW_S if target and slots == max(SLOTS) else WINDOW_S
                found.append(cell_of(slots, tokens, window=window, rounds=rounds or (3 if target else 1)))
    return sorted(found, key=lambda cell: -cell.rounds)  # interrupted, it has the targets


def left_out() -> list[str]:
    """Cells that are not measured, and why."""
    missing = [
        f"{name_of(slots, tokens)}: more bytes than a loopback of two cores carries"
        for tokens, most in MOST.items()
        for slots in SLOTS
        if slots > most
    ]
    return [
        *missing,
        f"{AIOHTTP_UVLOOP} (with json) where there is no target",
        f"{HTTPX} above {HTTPX_MOST} in flight: its pool's bookkeeping is quadratic in connections, and it collapses",
    ]


def targets(report: Report, runs: Sequence[Run]) -> None:
    """The issue's table, as far as it is measured here."""
    large, wide, small = name_of(64, 8192), name_of(2048, 512), name_of(2048, 16)

    def compare(what: str, cell: str, ours: str, theirs: str, figure: str, limit: float) -> None:
        report.verdict(what, ratio(runs, (cell, ours), (cell, theirs), figure), at_most=limit)

    if decoding.cut is not None:
        compare(
            "CPU vs asyncio + httpx, 8192 tokens, 64 in flight, native decoding", large, OURS, HTTPX, "cpu_us", 0.20
        )
    compare("the same, without native decoding", large, PURE, HTTPX, "cpu_us", 0.40)
    compare("CPU vs aiohttp + json, 512 tokens, 2048 in flight", wide, OURS, AIOHTTP, "cpu_us", 0.35)
    compare("CPU vs aiohttp + uvloop with our decoder, 512 tokens, 2048 in flight", wide, OURS, CONTROL, "cpu_us", 0.65)
    compare(
        "CPU of the transport alone vs aiohttp's, 16 tokens, 2048 in flight",
        small,
        TRANSPORT,
        AIOHTTP_BYTES,
        "cpu_us",
        0.40,
    )
    compare("p99 excess latency vs that control, 2048 in flight", wide, OURS, CONTROL, "excess_p99_ms", 0.5)
    whole = ratio(runs, (wide, OURS), (wide, CLIENT), "cpu_us")
    own = None if whole is None else attrs.evolve(whole, value=whole.value - 1, low=whole.low - 1, high=whole.high - 1)
    report.verdict("the engine's own CPU on top of the bare client's", own, at_most=0.5)


def tables(report: Report, cells: Sequence[Cell], runs: Sequence[Run]) -> None:
    """One row an arm and cell."""
    rows = []
    for cell in cells:
        for arm in cell.arms:
            found = [
                median_of(figures_of(runs, cell.name, arm.name, figure))
                for figure in ("cpu_us", "rps", "excess_p50_ms", "excess_p99_ms", "cpu_share", "server_cpu")
            ]
            rows.append((cell.name, arm.name, *found))
    columns = (
        "cell",
        "arm",
        "CPU us a rollout",
        "rollouts/s",
        "excess p50 ms",
        "excess p99 ms",
        "client CPU share",
        "server CPU s",
    )
    report.table("medians (smallest to largest)", columns, rows)


@click.command(help=__doc__)
@options
def main(*, quick: bool, rounds: int | None, out: Path, quiet: bool) -> None:
    """Measure and show."""
    cells, began = cells_of(quick=quick, rounds=rounds), header()
    with fake_server() as server:
        runs = run_cells(server, cells, say=say_to_stderr(quiet=quiet))
    report = Report("generate", "quick" if quick else "full", runs, began)
    tables(report, cells, runs)
    if not quick:
        targets(report, runs)
        report.left_out = left_out()
    shown = 512
    series = {
        arm: [
            (cell.spec.slots, found.value)
            for cell in cells
            if cell.spec.tokens == shown and (found := median_of(figures_of(runs, cell.name, arm, "cpu_us")))
        ]
        for arm in ARMS
    }
    report.finish(
        out,
        lines(
            {arm: points for arm, points in series.items() if points},
            x="rollouts in flight",
            y=f"CPU us a rollout, {shown} tokens",
        ),
    )


if __name__ == "__main__":
    main()
