"""Fixtures about processes. A zombie counts as dead, although ``kill(pid, 0)`` succeeds on it."""

import os
import select
import signal
from pathlib import Path

import pytest
import trio

from trio_rollout._core.enums import Leftovers
from trio_rollout.tools import ExecLimits, open_rollout_tools, run_captured


def state_of(pid):
    """Return the process's state letter, "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="latin-1").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def marked(host=None):
    """Return the living processes that carry a host's marker (by default this process's), also outside of their group."""
    marker = f"TRIO_ROLLOUT={host or os.getpid()}\0".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (process / "environ").read_bytes() and state_of(process.name) not in {"Z", ""}:
                found.append(int(process.name))
        except OSError:
            continue
    return found


def dies_soon(pid):
    """Return True if the process dies within 5 s: outside a rollout, a killed process may take a moment."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], 5)[0])
    finally:
        os.close(pidfd)


def _children():
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split())


class Processes:
    """Questions of tests about processes."""

    marked = marked_by = staticmethod(marked)

    @staticmethod
    def alive(pid):
        return state_of(pid) not in {"Z", "X", ""}

    @staticmethod
    def descriptors():
        return len(list(Path("/proc/self/fd").iterdir()))

    def __init__(self):
        self._before = _children()

    def children(self):
        """Return the number of direct children, zombies included, without those of the session's fixtures."""
        return len(_children() - self._before)

    @staticmethod
    async def wait_gone(pid):
        """Wait until the process is dead (it may be a zombie)."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            with trio.fail_after(120):
                await trio.lowlevel.wait_readable(pidfd)
        finally:
            os.close(pidfd)


@pytest.fixture
def processes():
    return Processes()


@pytest.fixture(autouse=True)  # ruff: ignore[pytest-fixture-autouse]  a leak in any test must fail that test
def nothing_survives():
    """Fail a test that leaves a process, also one that left its group."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        pytest.fail("SIGINT is ignored here: interrupts can't be tested")
    yield
    left = [pid for pid in marked() if not dies_soon(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


@pytest.fixture(params=["unbound", "in_rollout"])
def run(request):
    """``run_captured``, once outside a rollout and once bound to one."""
    if request.param == "unbound":
        return run_captured

    async def in_rollout(argv, *, limits=None, **options):
        async with open_rollout_tools(limits=limits or ExecLimits()) as tools:
            return await tools.run_captured(argv, **options)

    return in_rollout


class Said:
    """An ``on_chunk`` that collects a command's output, so that a test can wait for it."""

    def __init__(self):
        self.text = b""
        self._more = trio.Event()

    def __call__(self, _stream, chunk):
        self.text += chunk
        self._more.set()
        self._more = trio.Event()

    async def wait(self, what):
        with trio.fail_after(120):
            while what not in self.text:
                await self._more.wait()

    async def words(self, count):
        """Return the first ``count`` words as numbers, once they are complete."""
        with trio.fail_after(120):
            while len(self.text.split(b"\n")) <= count:
                await self._more.wait()
        return [int(word) for word in self.text.split()[:count]]


@pytest.fixture
def said():
    return Said()


@pytest.fixture
def keep():
    return Leftovers.KEEP
