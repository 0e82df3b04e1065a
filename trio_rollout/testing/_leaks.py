"""Leak checks: files, sockets, children, threads, tasks, generators and coroutines that a piece of code left behind.

Owns nothing: the resources of the process are compared before and after. Files and children are read from ``/proc``, so they
are seen on Linux only. Only this process is looked at; a thread of a C library is invisible.
"""

import gc
import os
import sys
import threading
import time
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import attrs
import trio
from trio._core import _run  # ruff: ignore[import-private-name]  the only way to the system nursery and the generators
from trio._core._thread_cache import THREAD_CACHE  # ruff: ignore[import-private-name]  the only list of idle workers

_PROCESS = Path("/proc/self")

# Seconds that a thread may take to end after it was told to. Waited for only if one is left.
_THREAD_GRACE_S = 0.5


@final
class LeakError(AssertionError):
    """Something was left behind; the message names each thing on a separate line."""


def _entries(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []


def _open_files() -> dict[str, str]:
    """Return each descriptor's target, such as ``socket:[123]``, so that a reused number counts as a new file."""
    found = {}
    for entry in _entries(_PROCESS / "fd"):
        try:
            found[entry.name] = str(entry.readlink())
        except OSError:  # the descriptor of this very listing
            continue
    return found


def _children() -> dict[int, str]:
    """Return every direct child by process id, zombies included; the children of children are not looked at."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return {}  # the usual case, and 50 times cheaper than looking
    found = {}
    for thread in _entries(_PROCESS / "task"):
        try:
            for pid in map(int, (thread / "children").read_text().split()):
                name, state = (_PROCESS.parent / str(pid) / "stat").read_text().partition("(")[2].rpartition(")")[::2]
                found[pid] = f"{name} (zombie)" if state.split()[0] == "Z" else name
        except OSError:  # ended while we looked
            continue
    return found


def _busy_threads() -> dict[threading.Thread, str]:
    """Return all threads except Trio's idle workers, which stay for ten seconds to be used again."""
    idle = {worker._thread for worker in list(THREAD_CACHE._idle_workers)}
    return {thread: thread.name for thread in threading.enumerate() if thread not in idle}


def _new(before: Mapping[Any, str], after: Mapping[Any, str], what: str) -> list[str]:
    return [f"{what} {key}: {text}" for key, text in after.items() if before.get(key) != text]


def _new_threads(before: Mapping[threading.Thread, str]) -> list[str]:
    """Return the threads that are left, after those about to end have had time to."""
    give_up = time.monotonic() + _THREAD_GRACE_S
    while True:
        left = [f"thread: {name}" for thread, name in _busy_threads().items() if thread not in before]
        if not left or time.monotonic() > give_up:
            return left
        time.sleep(0.005)


@final
@attrs.define(eq=False)
class LeakInstrument(trio.abc.Instrument):
    """Finds what a Trio run still has at its end: system tasks, and async generators that were not closed.

    Pass it to ``trio.run(..., instruments=[...])``; ``found`` then names them. Trio cancels and closes these silently.
    """

    found: list[str] = attrs.field(factory=list)

    def task_exited(self, task: trio.lowlevel.Task) -> None:
        """Look when the main task ends: the last moment at which they exist."""
        runner = _run.GLOBAL_RUN_CONTEXT.runner
        if task is not runner.main_task:
            return
        system = runner.system_nursery
        self.found += [f"system task: {left.name}" for left in (system.child_tasks if system is not None else ())]
        alive = runner.asyncgens.alive
        self.found += [f"async generator: {left.__qualname__}" for left in list(alive) if left.ag_frame is not None]


@contextmanager
def no_leaks(instrument: LeakInstrument | None = None) -> Generator[None]:
    """Raise LeakError if the body leaves something behind. Use it around ``trio.run``, never inside.

    While the body runs, a ResourceWarning and a coroutine that was never awaited are errors, so that they are seen here
    wherever they are raised. A body that raises is not checked: its traceback still holds what it was using.

    Raises:
      LeakError: names each thing left.
    """
    lost: list[str] = []

    def note(unraisable: "sys.UnraisableHookArgs") -> None:
        lost.append(f"unraisable: {unraisable.exc_value!r} in {unraisable.object!r}")

    files, children, threads = _open_files(), _children(), _busy_threads()
    previous, sys.unraisablehook = sys.unraisablehook, note
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", category=ResourceWarning)
            warnings.filterwarnings("error", message="coroutine .* was never awaited", category=RuntimeWarning)
            yield
            gc.collect()
    finally:
        sys.unraisablehook = previous
    lost += _new_threads(threads)
    # A child from before that has died belongs to a fixture, which reaps it.
    lost += _new(children, {pid: name for pid, name in _children().items() if pid not in children}, "child process")
    lost += _new(files, _open_files(), "file")
    lost += instrument.found if instrument is not None else []
    if lost:
        raise LeakError("left behind:\n  " + "\n  ".join(lost))
