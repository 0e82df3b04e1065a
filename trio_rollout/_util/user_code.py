"""The boundary of user code: which exceptions are a rollout's failure, and which mean the process (decision 0019).

``except Exception`` is too narrow there. A scorer runs what a model wrote, and that may call ``exit()``; an asyncio library
raises ``CancelledError``, a Rust extension a class below BaseException. Each of them would end every other rollout, too.
``except BaseException`` alone is too wide: it would hold up Trio's own cancellation and a user's Ctrl-C. So a boundary catches
every class and raises again what ``ends_the_process`` names:

- a Cancelled, if a scope around this task is cancelled. Without such a scope, user code had kept one and raised it again.
- a KeyboardInterrupt in the main thread, because only there a signal brings one. Functions in threads, processes and asyncio
  loops are wrapped where they run, so that a KeyboardInterrupt of theirs never reaches Trio's main thread as itself.
- a GeneratorExit outside of any Trio run: Python closes an abandoned coroutine with it, and the coroutine must end.
"""

import logging
import threading
from collections.abc import Generator
from contextlib import contextmanager

import trio

from .._core.failures import leaves_of


def ends_the_process(error: BaseException) -> bool:
    """Return True if an exception that was just caught around user code must go on; otherwise it is user code's failure.

    Of a group, one such leaf is enough: the scope that is cancelled takes its Cancelled out, and the rest goes on from there.
    """
    leaves = leaves_of(error)
    if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
        return threading.current_thread() is threading.main_thread()
    if any(isinstance(leaf, GeneratorExit) for leaf in leaves) and not trio.lowlevel.in_trio_run():
        return True
    return any(isinstance(leaf, trio.Cancelled) for leaf in leaves) and _is_cancelled()


def _is_cancelled() -> bool:
    """Return True if a scope around the current task is cancelled."""
    return trio.lowlevel.in_trio_task() and trio.current_effective_deadline() <= trio.current_time()


@contextmanager
def logging_failures(logger: logging.Logger, message: str, *args: object) -> Generator[None]:
    """Log what user code raises in the block, whatever its class, and go on: for callbacks that must not change a result.

    ``message`` and ``args`` are the logger's. Raises only what ends the process.
    """
    try:
        yield
    except BaseException as error:  # noqa: ASYNC103  raised again if it is no failure of user code
        if ends_the_process(error):
            raise
        logger.exception(message, *args)
