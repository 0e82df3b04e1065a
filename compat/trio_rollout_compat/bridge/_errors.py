"""What asyncio code raises that Trio code must not see as it is, and what the bridge itself raises.

``asyncio.CancelledError``, SystemExit and KeyboardInterrupt are no ``Exception``: in a Trio nursery they would skip every
handler and end the engine. So what user code raised of them crosses as an ordinary exception, with the original as its
cause.
"""

import asyncio
import concurrent.futures
import math

import trio

from trio_rollout.errors import RolloutError


class BridgeError(RolloutError):
    """A call could not be made, or its loop is gone."""


class BridgeClosed(BridgeError):
    """The bridge's block was left, or the host's loop is closed."""


class AsyncioCancelled(RolloutError):
    """Asyncio code ended with a CancelledError that nobody on the Trio side had asked for."""


class AsyncioExit(RolloutError):
    """Asyncio code raised SystemExit, KeyboardInterrupt, or another exception that is meant to end a process."""


class LeakedTasks(RolloutError):
    """An asyncio function returned while tasks that it had started were still running."""


def described(error: object) -> str:
    """Its repr, or its class where that fails: whoever says what went wrong must not fail himself."""
    try:
        return repr(error)
    except Exception:  # ruff: ignore[blind-except]  somebody's own __repr__
        return f"<{type(error).__qualname__}, whose repr fails>"


def as_exception(error: BaseException, where: str) -> Exception:
    """The same as an ``Exception``: itself where it is one; a group keeps its shape, its traceback and its cause."""
    if isinstance(error, Exception):
        return error
    if isinstance(error, BaseExceptionGroup):
        group = error.derive([as_exception(leaf, where) for leaf in error.exceptions])
        group.__cause__, group.__context__ = error.__cause__, error.__context__
        return group.with_traceback(error.__traceback__)
    made: Exception
    if isinstance(error, asyncio.CancelledError):
        made = AsyncioCancelled(f"{where}: asyncio.CancelledError, which nobody on the Trio side asked for")
    else:
        made = AsyncioExit(f"{where}: raised {described(error)}")
    made.__cause__ = error
    return made


def portable(error: BaseException, where: str) -> BaseException:
    """The same as something that a future can carry.

    What ends a task or a generator by its mere class would say to whoever waits that he himself was cancelled, or would
    never arrive: a future refuses it.
    """
    made: Exception
    if isinstance(error, asyncio.CancelledError | concurrent.futures.CancelledError):
        made = AsyncioCancelled(f"{where}: {type(error).__name__}, which nobody on the Trio side asked for")
    elif isinstance(error, StopIteration | GeneratorExit | trio.Cancelled):
        made = RuntimeError(f"{where} raised {described(error)}")
    else:
        return error
    made.__cause__ = error
    return made


def apart(error: BaseException) -> tuple[BaseException | None, BaseException | None]:
    """What a function raised on Trio's side, and the cancellation that reached it from outside.

    A Cancelled where nothing is cancelled is one that somebody has kept and raised again.
    """
    if trio.current_effective_deadline() != -math.inf:
        return error, None
    if isinstance(error, trio.Cancelled):
        return None, error
    if isinstance(error, BaseExceptionGroup):
        cancellation, own = error.split(trio.Cancelled)
        return own, cancellation
    return error, None
