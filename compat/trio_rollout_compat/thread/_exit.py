"""The end of the process: a hook that comes before Python waits for its threads, and SIGTERM as an orderly exit."""

import atexit
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any


def call_at_exit(method: Callable[[], None]) -> None:
    """On any thread: have a bound method called at the end of the interpreter, unless its object is gone by then.

    The interpreter joins the program's threads before it runs ``atexit``, and a thread that waits for the engine would wait for
    ever. So the method is called where ``concurrent.futures`` ends its workers, by the same private hook (checked with Python
    3.11 to 3.13). Nothing can be taken out of it again, hence the weak reference. Decision:
    docs/decisions/0019-whose-fault-an-exception-is.md.
    """
    weak: weakref.WeakMethod[Callable[[], None]] = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := weak()) is not None:
            alive()

    register: Callable[[Callable[[], None]], Any] = getattr(threading, "_register_atexit", atexit.register)
    try:
        register(call)
    except RuntimeError:  # the main thread is over already, and threads are being joined
        atexit.register(call)


@contextmanager
def exit_on_sigterm() -> Generator[None]:
    """On the main thread: let SIGTERM raise SystemExit(143) inside the block, so that blocks are left and atexit runs.

    The default action ends the process at once, with nothing cleaned up; container runtimes and ``ray stop`` send SIGTERM
    first. Only the main thread can set signal handlers. Leaving puts the previous handler back; a handler that C code had
    installed cannot be put back by Python, and the default action takes its place.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        del frame
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
