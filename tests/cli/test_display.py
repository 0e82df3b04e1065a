"""The progress on a terminal, in a pipe, or nowhere."""

import io

import pytest
import trio
from rich.console import Console

from trio_rollout.cli._display import Progress, Screen, open_display, plain_line


@pytest.fixture
def progress(statistics_of):
    """A progress of two of four groups."""
    return Progress(statistics=statistics_of(acked=2), total=4, elapsed_s=1.0, tokens_per_s=0.0, rewards={}, left_s=1.0)


def shown(progress, *, terminal, wanted=True):
    """Return the output for one progress and one printed line."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=60, color_system=None, legacy_windows=False)
    with open_display(console, title="runs/demo", progress=wanted, plain_every_s=10.0) as display:
        display.show(progress)
        display.say("draining " + "x" * 80)
    return out.getvalue()


def test_a_pipe_gets_whole_lines_without_control_characters(progress):
    assert shown(progress, terminal=False) == f"{plain_line(progress)}\ndraining {'x' * 80}\n"


def test_a_terminal_gets_a_bar_that_is_gone_at_the_end_and_lines_that_stay(progress):
    text = shown(progress, terminal=True)

    assert "runs/demo ━" in text
    assert f"draining {'x' * 80}" in text
    assert "\x1b[2K" in text.rpartition("━")[2]  # the line of the bar is erased after it was last drawn


@pytest.mark.parametrize("terminal", [True, False])
def test_without_progress_only_lines_are_printed(progress, terminal):
    assert shown(progress, terminal=terminal, wanted=False) == f"draining {'x' * 80}\n"


async def test_a_screen_writes_in_a_thread_so_that_a_paused_terminal_pauses_nothing_else(progress):
    class PausedTerminal:
        every_s = 1.0

        def __init__(self):
            self.lines = []

        def show(self, _):
            trio.from_thread.run(paused.wait)

        def say(self, line):
            self.lines.append(line)

    paused = trio.Event()
    terminal = PausedTerminal()
    screen = Screen(terminal)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(screen.show, progress)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(screen.say, "later")
        await trio.testing.wait_all_tasks_blocked()
        assert terminal.lines == []
        paused.set()

    assert terminal.lines == ["later"]
