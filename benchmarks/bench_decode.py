"""The cost of decoding one answer: with the C extension, without it, and with json.loads alone, which makes no arrays.

All in one process, one after the other in each round, over and over, as CPU time of the process.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

import click
from harness.answer import answer_of, asked_for
from harness.report import Report, header, lines, options
from harness.rounds import Median, median_of

from trio_rollout.sglang._wire import decode_turn, decoding

LENGTHS = (16, 512, 8192, 32_768)
TOKENS_A_ROUND = 65_536


def cpu_us(decode: Callable[[], object], times: int) -> float:
    """CPU us of one call."""
    begun = time.process_time_ns()
    for _ in range(times):
        decode()
    return (time.process_time_ns() - begun) / times / 1e3


def measure(tokens: int, rounds: int) -> dict[str, list[float]]:
    """CPU us an answer, round by round."""
    body, asked, cut = answer_of(tokens), asked_for(tokens), decoding.cut

    def by(decoder: object) -> Callable[[], object]:
        def decode() -> object:
            decoding.cut = decoder  # type: ignore[assignment]  # put back below
            return decode_turn(body, asked)

        return decode

    ways = {"pure": by(None), "json.loads": lambda: json.loads(body)} | ({"native": by(cut)} if cut else {})
    found: dict[str, list[float]] = {name: [] for name in ways}
    times = min(200, max(2, TOKENS_A_ROUND // tokens))
    try:
        for _ in range(rounds):
            for name, way in ways.items():
                found[name].append(cpu_us(way, times))
    finally:
        decoding.cut = cut
    return found


def ratio(found: dict[str, list[float]], one: str, other: str) -> Median | None:
    """Median of the rounds' ratios."""
    return median_of([a / b for a, b in zip(found.get(one, ()), found[other], strict=False)])


@click.command(help=__doc__)
@options
def main(*, quick: bool, rounds: int | None, out: Path, quiet: bool) -> None:
    """Measure and show."""
    del quiet
    report = Report("decode", "quick" if quick else "full", [], header())
    all_found = {tokens: measure(tokens, rounds or (5 if quick else 21)) for tokens in LENGTHS}
    rows = [
        (
            tokens,
            *(median_of(found.get(name, [])) for name in ("native", "pure", "json.loads")),
            ratio(found, "native", "pure"),
        )
        for tokens, found in all_found.items()
    ]
    report.table("CPU us an answer", ("tokens", "native", "pure", "json.loads", "native / pure"), rows)
    series = {
        name: [
            (tokens, figure.value) for tokens, found in all_found.items() if (figure := median_of(found.get(name, [])))
        ]
        for name in ("native", "pure", "json.loads")
    }
    report.finish(out, lines(series, x="tokens of the answer", y="CPU us"))


if __name__ == "__main__":
    main()
