"""A coroutine under guard: what ends a process becomes an exception, and a step that keeps the loop is noted.

A SystemExit in a task goes straight through ``run_forever``: it ends the loop's thread, and everybody who waits for it hangs.
It is a class and not an ``async def`` around the coroutine because a task that is cancelled before its first step must
reach the coroutine itself, or Python warns that it was never awaited.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Final, final

from ._errors import AsyncioExit, described

_CODES: Final = frozenset({"cr_await", "cr_code", "cr_frame", "cr_origin", "cr_running", "cr_suspended"})


@final
class Guarded(Coroutine[Any, Any, Any]):
    """Behaves like ``coro``; ``owner`` is whose it is.

    ``exited(error)`` is told of a SystemExit or KeyboardInterrupt and says whether it is to go on as it is; ``stepped(seconds)``
    of every step, ``cancelled(error)`` of every CancelledError that goes in. None of them may raise.
    """

    def __init__(
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        owner: object,
        exited: Callable[[BaseException], bool],
        stepped: Callable[[float], None],
        cancelled: Callable[[BaseException], None],
    ) -> None:
        self._coro = coro
        self.owner = owner
        self._exited = exited
        self._stepped = stepped
        self._cancelled = cancelled
        self.__name__ = getattr(coro, "__name__", type(coro).__name__)
        self.__qualname__ = getattr(coro, "__qualname__", self.__name__)

    def __getattr__(self, name: str) -> Any:
        if name in _CODES:  # what asyncio's own reprs and stack dumps read
            return getattr(self._coro, name)
        raise AttributeError(name)

    def __await__(self) -> "Guarded":
        return self

    def __iter__(self) -> "Guarded":
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        """One step."""
        return self._step(self._coro.send, value)

    def throw(self, kind: Any, value: BaseException | object = None, traceback: TracebackType | None = None) -> Any:
        """One step that begins with an exception."""
        error = kind if isinstance(kind, BaseException) else value if isinstance(value, BaseException) else kind()
        if isinstance(error, asyncio.CancelledError):
            self._cancelled(error)
        return self._step(self._coro.throw, error if traceback is None else error.with_traceback(traceback))

    def close(self) -> None:
        """Close it."""
        self._coro.close()

    def _step(self, step: Callable[[Any], Any], value: Any) -> Any:
        begun = time.perf_counter()
        try:
            return step(value)
        except (SystemExit, KeyboardInterrupt) as error:
            if self._exited(error):
                raise
            raise AsyncioExit(f"{self.__qualname__}: raised {described(error)}") from error
        finally:
            self._stepped(time.perf_counter() - begun)
