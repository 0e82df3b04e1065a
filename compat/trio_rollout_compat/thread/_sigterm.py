"""SIGTERM as an orderly exit, for hosts that want one."""

import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def exit_on_sigterm() -> Generator[None]:
    """Inside the block SIGTERM raises SystemExit(143) in the main thread, so that blocks are left and atexit runs.

    The default action ends the process at once, with nothing cleaned up; that is what container runtimes and ``ray stop`` send
    first. For the main thread only, like every signal handler. Leaving puts the handler back that was there before; one that C
    code had installed can't be put back by Python, and the default action takes its place.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        del frame
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
