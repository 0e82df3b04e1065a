"""The bridge's errors, and exceptions of asyncio code made fit for Trio, for futures and for the host.

``asyncio.CancelledError``, SystemExit and KeyboardInterrupt are no ``Exception``: in a Trio nursery they would skip every
handler and end the engine. So they cross as ordinary exceptions, with the original as the cause. All functions here may be
called on any thread, except ``apart``. Decision: docs/decisions/0019-whose-fault-an-exception-is.md.
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


class AsyncioRaised(RolloutError):
    """Asyncio code raised an exception that can't go on as itself, because it is no ``Exception``. It is the cause."""

    def __init__(self, message: str, *, raised: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.raised = raised
        """The classes of the cause, as "module.Class", its own class first."""


class AsyncioCancelled(AsyncioRaised):
    """Asyncio code ended with a CancelledError that the Trio side had not asked for."""


class AsyncioExit(AsyncioRaised):
    """Asyncio code raised SystemExit, KeyboardInterrupt, or another exception that is meant to end a process."""


class LeakedTasks(RolloutError):
    """An asyncio function returned while tasks that it had started were still running."""


def described(error: object) -> str:
    """Return the error's repr, or its class if the repr fails: a report must not fail itself."""
    try:
        return repr(error)
    except Exception:  # ruff: ignore[blind-except]  the __repr__ is user code
        return f"<{type(error).__qualname__}, whose repr fails>"


def as_exception(error: BaseException, where: str) -> Exception:
    """Return the error as an ``Exception``: itself if it is one; a group keeps its shape, its traceback and its cause."""
    if isinstance(error, Exception):
        return error
    if isinstance(error, BaseExceptionGroup):
        group = error.derive([as_exception(leaf, where) for leaf in error.exceptions])
        group.__cause__, group.__context__ = error.__cause__, error.__context__
        return group.with_traceback(error.__traceback__)
    if isinstance(error, asyncio.CancelledError):
        message = f"{where}: asyncio.CancelledError, which the Trio side did not ask for"
        made: Exception = AsyncioCancelled(message, raised=classes_of(error))
        made.__cause__ = error
        return made
    return exit_of(error, where)


def exit_of(error: BaseException, where: str) -> AsyncioExit:
    """Return the error that stands for an exception which is meant to end a process."""
    made = AsyncioExit(f"{where}: raised {described(error)}", raised=classes_of(error))
    made.__cause__ = error
    return made


def classes_of(error: BaseException) -> tuple[str, ...]:
    """Return the classes of an exception as "module.Class", its own first: the engine keeps a failure's type."""
    return tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__)


def portable(error: BaseException, where: str) -> BaseException:
    """Return the error as an exception that a future can carry.

    A future refuses StopIteration. CancelledError, Cancelled and GeneratorExit would tell the code that waits that it was
    cancelled itself.
    """
    made: Exception
    if isinstance(error, asyncio.CancelledError | concurrent.futures.CancelledError):
        made = AsyncioCancelled(f"{where}: {type(error).__name__}, which the Trio side did not ask for")
    elif isinstance(error, StopIteration | GeneratorExit | trio.Cancelled):
        made = RuntimeError(f"{where} raised {described(error)}")
    else:
        return error
    made.__cause__ = error
    return made


def apart(error: BaseException) -> tuple[BaseException | None, BaseException | None]:
    """On Trio's thread: split an exception into the function's own, and the cancellation that reached it from outside.

    A Cancelled where no scope is cancelled was kept by the function and raised again: it is the function's own.
    """
    if trio.current_effective_deadline() != -math.inf:
        return error, None
    if isinstance(error, trio.Cancelled):
        return None, error
    if isinstance(error, BaseExceptionGroup):
        cancellation, own = error.split(trio.Cancelled)
        return own, cancellation
    return error, None
