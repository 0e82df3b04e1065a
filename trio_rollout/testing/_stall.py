"""A thread that ends a run which Trio itself can no longer end: a step that does not return.

It looks every ``stuck_after`` wall-clock seconds whether steps have been taken since; so a stall is found after one to two
such times. The stuck thread gets an exception that no ``except Exception`` stops. Only a call into C that never returns
escapes: then the stack is printed, so that one sees at least which one.
"""

import ctypes
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

import trio

from ..observe._tree import task_tree
from ._overseer import Overseer
from ._sim_errors import SimStalled, SimTimeout


class _Stalled(BaseException):
    """Raised inside the step that does not end."""


@contextmanager
def stall_watch(overseer: Overseer, *, stuck_after: float) -> Generator[None]:
    """Watch the run of this thread meanwhile; where its limit is one of real time, also stop it after that."""
    over = threading.Event()
    engine = threading.get_ident()

    def watch() -> None:
        limit, steps = overseer.wall_limit, -1
        left = limit
        while not over.wait(stuck_after if left is None else min(stuck_after, left)):
            if left is not None and (left := max(left - stuck_after, 0.0)) <= 0.0:
                _soon(lambda: overseer.stop(SimTimeout(f"not over after {limit:g} s\n{task_tree()}")), overseer)
                left = min(stuck_after, 1.0)
            if overseer.trace.steps == steps and not _waits(engine):
                _interrupt(engine, overseer, stuck_after)
            steps = overseer.trace.steps

    thread = threading.Thread(target=watch, name="trio_rollout.testing stall watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        _absorb()


def _absorb() -> None:
    """Take an interrupt that came when the step had just ended.

    Not by PyThreadState_SetAsyncExc(None): in CPython 3.11 that leaves the thread looking for an exception for ever, which
    makes all that follows slower, and hangs under cProfile.
    """
    with suppress(_Stalled):
        for _ in range(100):  # a pending exception is raised at the next jump back
            continue


def _soon(act: Callable[[], None], overseer: Overseer) -> None:
    if overseer.token is not None:
        try:
            overseer.token.run_sync_soon(act)
        except trio.RunFinishedError:
            return


def _waits(engine: int) -> bool:
    """Whether the thread is in Trio's own wait for the network, where real time may pass."""
    frame = sys._current_frames().get(engine)
    return frame is None or frame.f_code.co_name == "get_events"


def _interrupt(engine: int, overseer: Overseer, stuck_after: float) -> None:
    frame = sys._current_frames().get(engine)
    stack = "".join(traceback.format_stack(frame)[-12:])
    verdict = SimStalled(
        f"no task step ended for more than {stuck_after:g} s of wall-clock time, the thread is at\n{stack}"
    )
    if overseer.verdict is None:
        overseer.verdict = verdict
    else:
        print(verdict, file=sys.stderr)  # ruff: ignore[print]  the first exception did not help: it may be inside C
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(engine), ctypes.py_object(_Stalled))
