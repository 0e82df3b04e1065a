"""Input of a session: text for its terminal, and the interrupt, which every session takes."""

import signal

import trio

from ._pause import PauseState
from ._session import Session
from ._session_values import StdinClosed, WriteToStdinError

INTERRUPT = "\x03"


async def send_interrupt(session: Session) -> None:
    """What Ctrl-C means: SIGINT for the group, or for whatever is in the terminal's foreground."""
    await trio.lowlevel.checkpoint()
    child = session.child
    if child is None or session.ended:
        return
    if child.stdin is None:
        child.signal_group(signal.SIGINT)
        return
    try:
        await child.stdin.send_all(INTERRUPT.encode())  # the line discipline makes it a signal
    except (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError) as error:
        raise WriteToStdinError("failed to write to stdin") from error


async def write_input(session: Session, data: str, deadline: float, pause: PauseState) -> None:
    """Write, and give the program a moment to react. A terminal that takes nothing is given up at ``deadline``.

    Raises:
      StdinClosed: the session has no terminal, and this is no interrupt.
      WriteToStdinError: the terminal did not take it, and the process has not ended.

    """
    if session.command.tty is None:
        if data != INTERRUPT:
            raise StdinClosed("stdin is closed for this session; rerun exec_command with tty=true to keep stdin open")
        await send_interrupt(session)
        return
    sent = False
    if session.child is not None and session.child.stdin is not None:
        try:
            with pause.until(deadline):
                await session.child.stdin.send_all(data.encode())
                sent = True
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # it is ending, or has: looked at below
    with trio.move_on_after(session.limits.post_write):
        await session.until(lambda: session.ended)
    if not sent and not session.ended:
        raise WriteToStdinError("failed to write to stdin")
