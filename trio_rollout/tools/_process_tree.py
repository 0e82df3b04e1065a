"""What is below a process, as /proc tells it: for the host, where those who should end a tree have been stopped."""

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


def kill_below(top: int) -> None:
    """SIGKILL to every descendant of ``top`` that is there now, and never to anybody else. ``top`` must be our child.

    What forks meanwhile may be missed: whoever needs to be sure asks again until ``top`` has nobody left to wait for.
    """
    parents = [top]
    while parents:
        parent = parents.pop()
        with suppress(OSError):  # it is gone, and what it had is above by now
            for child in _children(parent):
                parents.append(child)
                _kill(child, parent)


def _kill(pid: int, parent: int) -> None:
    with suppress(OSError):
        watched = os.pidfd_open(pid)
        try:
            if _parent(pid) == parent:  # else the id has passed to somebody else before it was watched
                signal.pidfd_send_signal(watched, signal.SIGKILL)
        finally:
            os.close(watched)
