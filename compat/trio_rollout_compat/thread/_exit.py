"""What is to happen at the end of the interpreter, before it waits for threads."""

import atexit
import threading
import weakref
from collections.abc import Callable
from typing import Any


def call_at_exit(method: Callable[[], None]) -> None:
    """Have a bound method called at the end of the interpreter, unless its object is gone by then.

    The interpreter joins the program's threads before it runs ``atexit``, and one that waits for the engine would wait for
    ever. So it is done where ``concurrent.futures`` ends its workers, by the same private hook (checked with Python 3.11 to 3.13).
    Nothing can be taken out of it again, hence the weak reference.
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
