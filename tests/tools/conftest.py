"""Processes as the tests of the tools see them. Liveness treats zombies as dead: ``kill(pid, 0)`` succeeds on them."""

import os
import select
import signal
from pathlib import Path

import pytest
import trio

from trio_rollout._core.enums import Leftovers
from trio_rollout.tools import ExecLimits, open_rollout_tools, run_captured


def state_of(pid):
    """The process's state letter, "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="latin-1").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def marked(host=None):
    """Living processes that carry a host's marker (by default this test process's), wherever they have fled."""
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
    """Whether it is gone within 5 s: outside a rollout, what was killed may take its time to die."""
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
    """What tests ask about processes."""

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
        """Direct children of this process, zombies included; those of the session's fixtures do not count."""
        return len(_children() - self._before)

    @staticmethod
    async def wait_gone(pid):
        """Until the process is dead (perhaps a zombie)."""
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
    """Every test: no process that it started is left, not even one that fled its group."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        pytest.fail("SIGINT is ignored here: interrupts can't be tested")
    yield
    left = [pid for pid in marked() if not dies_soon(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


@pytest.fixture(params=["unbound", "in_rollout"])
def run(request):
    """``run_captured``, once as a function of its own and once bound to a rollout."""
    if request.param == "unbound":
        return run_captured

    async def in_rollout(argv, *, limits=None, **options):
        async with open_rollout_tools(limits=limits or ExecLimits()) as tools:
            return await tools.run_captured(argv, **options)

    return in_rollout


class Said:
    """An ``on_chunk`` to wait on: what a command has written so far."""

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
        """The first ``count`` words, complete ones only."""
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
