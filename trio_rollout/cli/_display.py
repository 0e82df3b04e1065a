"""The progress of a run: a value, its text, and the display that it goes to.

``Meter`` turns the engine's statistics into a ``Progress``, without a clock. ``plain_line`` and ``live_rows`` are its text.
``open_display`` chooses where it goes: a live display on a terminal, plain lines in a pipe, a file or a terminal that can
only print, or nowhere. A ``Display`` blocks on the terminal, a paused one for as long as it is paused; ``Screen`` makes that
awaitable.

The display is the least of a run: an output that is closed or full ends the display and not the run.
"""

import errno
import io
import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import IO, final

import attrs
import click
import trio
from rich.console import Console, RenderableType
from rich.console import Group as Rows
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .._core.enums import Cause
from .._core.statistics import EngineStatistics, ServerCounts

RATE_WINDOW_S = 15.0
"""Tokens per second are an average over this time, because answers of long rollouts arrive in bursts."""
LIVE_EVERY_S = 0.25


@attrs.frozen(kw_only=True)
class Progress:
    """The state of a run at one moment. ``total`` counts groups. ``total`` and ``left_s`` are None while they are unknown.

    ``unusable``: the URLs of servers that get no work now, of ``servers`` in all.
    """

    statistics: EngineStatistics
    total: int | None
    elapsed_s: float
    tokens_per_s: float
    rewards: Mapping[str, float]
    left_s: float | None
    unusable: tuple[str, ...] = ()
    servers: int = 0


def scored(statistics: EngineStatistics) -> int:
    """Return the number of groups that are finished and scored, delivered or not."""
    return statistics.ready + statistics.delivered + statistics.acked


def settled(statistics: EngineStatistics) -> int:
    """Return the number of groups that need no more work: scored, filtered or quarantined."""
    return scored(statistics) + statistics.filtered + statistics.quarantined


@final
@attrs.define(eq=False)
class Meter:
    """Turns a sequence of statistics into rates. The times are passed in."""

    total: int | None
    _samples: deque[tuple[float, int]] = attrs.field(factory=deque)
    _begun: tuple[float, int] | None = None

    def progress(
        self,
        statistics: EngineStatistics,
        *,
        now: float,
        rewards: Mapping[str, float],
        servers: Sequence[ServerCounts] = (),
    ) -> Progress:
        """Return the progress at time ``now``; later calls must have later times."""
        if self._begun is None:
            self._begun = (now, settled(statistics))
        self._samples.append((now, statistics.generated_tokens))
        while len(self._samples) > 1 and self._samples[1][0] <= now - RATE_WINDOW_S:
            self._samples.popleft()
        return Progress(
            statistics=statistics,
            total=self.total,
            elapsed_s=now - self._begun[0],
            tokens_per_s=self._tokens_per_s(),
            rewards=rewards,
            left_s=self._left_s(statistics, now),
            unusable=tuple(server.url for server in servers if not server.usable),
            servers=len(servers),
        )

    def _tokens_per_s(self) -> float:
        (start, before), (end, after) = self._samples[0], self._samples[-1]
        return (after - before) / (end - start) if end > start else 0.0

    def _left_s(self, statistics: EngineStatistics, now: float) -> float | None:
        if self.total is None or self._begun is None:
            return None
        done = settled(statistics)
        begun_s, done_before = self._begun
        if done >= self.total:
            return 0.0
        if done == done_before:  # no group has finished yet, so the time left is unknown
            return None
        return (self.total - done) * (now - begun_s) / (done - done_before)


def duration(seconds: float) -> str:
    """Return a duration as ``1h02m``, ``3m05s`` or ``12s``."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{left:02d}s" if minutes else f"{left}s"


def _of_total(progress: Progress) -> str:
    done = scored(progress.statistics)
    return str(done) if progress.total is None else f"{done}/{progress.total}"


def by_cause(counts: Mapping[Cause, int]) -> str:
    """Return counts by cause, as ``deadline 3, server_lost 1``; empty if there are none."""
    return ", ".join(f"{cause.value} {count}" for cause, count in counts.items() if count)


def _exceptions(progress: Progress) -> Iterator[str]:
    """Yield the facts that are shown only once they have happened."""
    statistics = progress.statistics
    if progress.unusable:
        yield f"{len(progress.unusable)} of {progress.servers} servers unusable: {', '.join(progress.unusable)}"
    for name, counts in (("retries", statistics.retries), ("requeues", statistics.requeues)):
        if causes := by_cause(counts):
            yield f"{name}: {causes}"
    if wasted := statistics.tokens.wasted_total:
        yield f"{wasted:,} tokens wasted"
    for name in ("quarantined", "filtered", "orphans"):
        if count := getattr(statistics, name):
            yield f"{name} {count}"


def _measures(progress: Progress) -> Iterator[str]:
    yield f"{progress.statistics.running_rollouts} rollouts running"
    yield f"{progress.tokens_per_s:,.0f} tokens/s"
    for name, mean in progress.rewards.items():
        yield f"mean {name} {mean:.3f}"


def _left(progress: Progress) -> str:
    return f"{duration(progress.left_s)} left" if progress.left_s is not None else "time left unknown"


def plain_line(progress: Progress) -> str:
    """Return the progress as one line, for logs and pipes."""
    return ", ".join([f"{_of_total(progress)} groups", *_measures(progress), *_exceptions(progress), _left(progress)])


def live_rows(progress: Progress, title: str) -> RenderableType:
    """Return the progress for a terminal: a bar, and two or three lines."""
    head = Table.grid(expand=True, padding=(0, 1))
    head.add_column(no_wrap=True)
    head.add_column(ratio=1)
    head.add_column(no_wrap=True)
    bar = ProgressBar(total=progress.total, completed=settled(progress.statistics), pulse=progress.total is None)
    head.add_row(Text(title, "bold"), bar, f"{_of_total(progress)} groups, {_left(progress)}")
    rows: list[RenderableType] = [head, Text("  ".join(_measures(progress)))]
    if events := "  ".join(_exceptions(progress)):
        rows.append(Text(events, "yellow"))
    return Rows(*rows)


class Output(Console):
    """A console that raises if its reader has gone; rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError that is being handled."""
        raise  # ruff: ignore[misplaced-bare-raise]  rich calls this in its handler


def open_output() -> Output:
    """Return the console for stdout. Characters that its encoding lacks are escaped."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    tty = sys.stdout is not None and sys.stdout.isatty()
    return Output(force_interactive=None if tty else False)  # FORCE_COLOR must not draw a live display into a file


def silence(file: IO[str]) -> None:
    """Point a stream that can't be written at /dev/null: its buffer would fail again when the process exits."""
    with suppress(OSError, ValueError):
        descriptor, nothing = file.fileno(), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, descriptor)
        os.close(nothing)


@contextmanager
def printing() -> Generator[None]:
    """Report an output that is full as an error of the command; click sees to one whose reader has gone.

    Raises:
      click.ClickException: the output can't be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        silence(sys.stdout)
        raise click.ClickException(f"the output can't be written: {error.strerror or error}") from error


@final
@attrs.define(eq=False)
class Display:
    """Shows progress in one of three ways, and prints lines that stay, as they are and of any length.

    If the output fails, it says so once on stderr, where the lines that stay go from then on.
    """

    console: Console
    every_s: float
    """Seconds between two calls of ``show``."""
    _show: Callable[[Progress], None]
    _lost: bool = False

    def show(self, progress: Progress) -> None:
        """Show the progress."""
        if not self._lost:
            self.attempt(partial(self._show, progress))

    def say(self, line: str) -> None:
        """Print one line that stays."""
        self.print(Text(line))

    def print(self, what: RenderableType) -> None:
        """Print something that stays."""
        if not self.attempt(lambda: self.console.print(what, soft_wrap=isinstance(what, Text))):
            self.attempt(lambda: self.console.print(what, soft_wrap=isinstance(what, Text)))

    def attempt(self, write: Callable[[], None]) -> bool:
        """Write something; return False if the output can't be written."""
        try:
            write()
        except (OSError, ValueError) as error:  # ValueError: the file is closed
            self._lose(error)
            return False
        return True

    def _lose(self, error: Exception) -> None:
        silence(self.console.file)
        if not self._lost:
            self._lost, self.console = True, Output(stderr=True)
            self.say(f"the output can't be written any more ({error}); the run goes on without a display")


@final
@attrs.frozen(eq=False)
class Screen:
    """A display that is written to in a thread, so that a paused terminal does not pause the rollouts."""

    display: Display
    _writers: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(1), init=False)

    async def show(self, progress: Progress) -> None:
        """Show the progress. Blocks on the terminal, also when cancelled."""
        await trio.to_thread.run_sync(self.display.show, progress, limiter=self._writers)

    async def say(self, line: str) -> None:
        """Print one line that stays. Blocks on the terminal, also when cancelled."""
        await trio.to_thread.run_sync(self.display.say, line, limiter=self._writers)


@contextmanager
def open_display(console: Console, *, title: str, progress: bool, plain_every_s: float) -> Generator[Display]:
    """Open the display for the console and the options; leaving restores the terminal."""
    if not progress:
        yield Display(console, 3600.0, lambda _: None)
    elif not console.is_interactive:
        yield Display(console, plain_every_s, lambda now: console.print(Text(plain_line(now)), soft_wrap=True))
    else:
        live = Live(console=console, auto_refresh=False, transient=True)
        display = Display(console, LIVE_EVERY_S, lambda now: live.update(live_rows(now, title), refresh=True))
        display.attempt(live.start)
        try:
            yield display
        finally:
            display.attempt(live.stop)


def printable(text: str) -> str:
    """Return the text with control characters and lone surrogates escaped: a model's answer must not control the terminal."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode() for char in text
    )
