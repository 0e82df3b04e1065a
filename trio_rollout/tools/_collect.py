"""Collecting a session's output for one call, until its yield deadline: which ends the call, never the process."""

import math

import trio

from ._expiration import as_seconds
from ._head_tail import HeadTailBuffer
from ._limits import ExecLimits
from ._pause import PauseState
from ._session import Session


def exec_yield(limits: ExecLimits, asked: float) -> float:
    """How long a start waits for output. ValueError for NaN, as below."""
    as_seconds(asked)
    return min(max(asked, limits.min_yield), limits.max_yield)


def poll_yield(limits: ExecLimits, asked: float) -> float:
    """How long a poll that writes nothing waits."""
    as_seconds(asked)
    return min(max(asked, limits.min_yield, limits.min_poll), max(limits.max_background, limits.min_poll))


def write_yield(limits: ExecLimits, asked: float) -> float:
    """How long a write waits for output."""
    as_seconds(asked)
    return min(max(asked, limits.min_yield), limits.max_yield)


async def collect(session: Session, deadline: float, pause: PauseState) -> HeadTailBuffer:
    """Everything the session writes until ``deadline``, or until it has ended and its output is closed.

    ``deadline`` is on the clock of ``pause``: while that is held, nothing ends the collection, not even an exit. Once the
    process has exited, output that stays open (a grandchild has it) is awaited for ``post_exit_close``. Each byte
    goes to exactly one collection. Never raises for time; cancelled, what it had gathered waits for the next one.
    """
    gathered = HeadTailBuffer(session.limits.session_bytes)
    try:
        await _gather(session, gathered, deadline, pause)
    except trio.Cancelled:
        session.pending.drain_into(gathered)
        session.pending = gathered
        raise
    return gathered


async def _gather(session: Session, gathered: HeadTailBuffer, deadline: float, pause: PauseState) -> None:
    closing = math.inf
    while True:
        await pause.wait_running()
        drained = session.pending.drain_into(gathered)
        now = pause.now()
        if session.ended:
            closing = min(closing, now + session.limits.post_exit_close)
        if (session.ended and session.output_closed) or now >= min(deadline, closing):
            return
        if not drained:
            with pause.until(min(deadline, closing)):
                await session.wait_change()
