"""The processes below one of ours, as ``/proc`` shows them. Linux only."""

import os
import signal
from contextlib import suppress
from pathlib import Path


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text(encoding="ascii").split())
    return found


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


def kill_descendants(top: int) -> None:
    """Send SIGKILL to every descendant of ``top`` that exists now, and to no other process. ``top`` must be our child.

    A process that is forked meanwhile may be missed: repeat the call until ``top`` has exited.
    """
    parents = [top]
    while parents:
        parent = parents.pop()
        with suppress(OSError):  # it is gone, and its children have moved up
            for child in _children(parent):
                parents.append(child)
                _kill(child, parent)


def _kill(pid: int, parent: int) -> None:
    with suppress(OSError):
        watched = os.pidfd_open(pid)
        try:
            if _parent(pid) == parent:  # else the id passed to another process before the pidfd was opened
                signal.pidfd_send_signal(watched, signal.SIGKILL)
        finally:
            os.close(watched)
