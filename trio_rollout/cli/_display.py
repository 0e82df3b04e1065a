"""Where a run's progress goes: a live display on a terminal, plain lines into a pipe or a file, or nowhere.

Owns the terminal while it is open. A ``Display`` blocks on the terminal (a paused one for as long as it is paused); a
``Screen`` makes that awaitable.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol, final

import attrs
import trio
from rich.console import Console
from rich.live import Live
from rich.text import Text

from ._progress import Progress, live_rows, plain_line

LIVE_EVERY_S = 0.25


class Display(Protocol):
    """Shows progress and says lines."""

    @property
    def every_s(self) -> float:
        """How often it wants to be shown the progress."""
        ...

    def show(self, progress: Progress) -> None:
        """Show this moment."""
        ...

    def say(self, line: str) -> None:
        """Print one line that stays."""
        ...


@final
@attrs.frozen(eq=False)
class PlainDisplay:
    """One line each time; also what is said goes out as it is."""

    console: Console
    every_s: float

    def show(self, progress: Progress) -> None:
        """Print the progress as one line."""
        self.say(plain_line(progress))

    def say(self, line: str) -> None:
        """Print the line, whatever its length, without markup."""
        self.console.print(Text(line), soft_wrap=True)


@final
@attrs.frozen(eq=False)
class QuietDisplay:
    """Shows nothing; what is said still comes out, because only what must be known is said."""

    console: Console
    every_s: float = 3600.0

    def show(self, progress: Progress) -> None:
        """Nothing."""

    def say(self, line: str) -> None:
        """Print the line, whatever its length, without markup."""
        self.console.print(Text(line), soft_wrap=True)


@final
@attrs.frozen(eq=False)
class LiveDisplay:
    """A display that is drawn over itself; what is said scrolls past above it."""

    live: Live
    title: str
    every_s: float = LIVE_EVERY_S

    def show(self, progress: Progress) -> None:
        """Redraw."""
        self.live.update(live_rows(progress, self.title), refresh=True)

    def say(self, line: str) -> None:
        """Print the line above the display."""
        self.live.console.print(Text(line), soft_wrap=True)


@final
@attrs.frozen(eq=False)
class Screen:
    """A display that is written to in a thread: a paused terminal must not pause the rollouts."""

    display: Display
    _writers: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(1), init=False)

    @property
    def every_s(self) -> float:
        """How often it wants to be shown the progress."""
        return self.display.every_s

    async def show(self, progress: Progress) -> None:
        """Show this moment. Blocks on the terminal; cancelled, it is waited for."""
        await trio.to_thread.run_sync(self.display.show, progress, limiter=self._writers)

    async def say(self, line: str) -> None:
        """Print one line that stays. Blocks on the terminal; cancelled, it is waited for."""
        await trio.to_thread.run_sync(self.display.say, line, limiter=self._writers)


@contextmanager
def open_display(console: Console, *, title: str, progress: bool, plain_every_s: float) -> Generator[Display]:
    """The display that fits the console and the options; the terminal is as it was on leaving."""
    if not progress:
        yield QuietDisplay(console)
    elif not console.is_terminal:
        yield PlainDisplay(console, plain_every_s)
    else:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            yield LiveDisplay(live, title)
