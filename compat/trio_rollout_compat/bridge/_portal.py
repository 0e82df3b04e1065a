"""The way back from an asyncio function into Trio, while its bridge call lasts.

Owns a nursery around the call: what the function asks for runs there, is cancelled when the function's task is, and never
outlives the call.
"""

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar, TypeVarTuple, final

import attrs
import trio

from ._backend import Running
from ._call import name_of
from ._errors import apart, portable

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_OVER: Final = "this portal's call is over: nothing of it may go on in Trio"


@attrs.frozen(eq=False)
class _Job:
    """One request. Both futures belong to its loop: ``over`` is set at its end in any case, ``answer`` if there is one."""

    loop: asyncio.AbstractEventLoop
    answer: "asyncio.Future[Any]"
    over: "asyncio.Future[None]"
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)


@final
@attrs.define(eq=False)
class Portal:
    """Given to asyncio code; usable until the call that it was given to is over."""

    _running: Running
    _nursery: trio.Nursery | None
    """None when it is closed: an abandoned function may keep its portal for days, and with it all tasks around its call."""

    async def run(self, fn: Callable[[*Ts], Awaitable[T]], /, *args: *Ts) -> T:
        """From asyncio code: run a Trio function inside the scopes of the rollout, and return what it returns.

        Cancelled, the Trio function is cancelled and its end awaited. It need not be the bridge's loop: one that the function
        runs in a thread of its own will do.

        Raises:
          RuntimeError: the call that this portal was given to is over, this is no asyncio code, or the function raised
            StopIteration.
          AsyncioCancelled: the function raised an asyncio.CancelledError.
          BaseException: whatever else the function raised.

        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError(
                f"portal.run: {name_of(fn)} can be asked for by asyncio code only, and no loop runs in this thread; another "
                "thread of Trio's uses trio.from_thread.run"
            ) from None
        if self._nursery is None:  # the Trio run itself may be over, and then nobody would answer
            raise RuntimeError(_OVER)
        job = _Job(loop, loop.create_future(), loop.create_future())
        self._running.reply(functools.partial(self._start, job, fn, args))
        try:
            result: T = await job.answer
        except asyncio.CancelledError:
            self._running.reply(job.scope.cancel)
            await asyncio.shield(job.over)  # noqa: ASYNC102  asyncio code: the bridge bounds it
            raise
        return result

    def _start(self, job: _Job, fn: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> None:
        if self._nursery is None:
            self._settle(job, error=RuntimeError(_OVER))
        else:
            self._nursery.start_soon(self._serve, job, fn, args)

    async def _serve(  # noqa: ASYNC910  whether there is a checkpoint is the function's affair
        self, job: _Job, fn: Callable[..., Awaitable[Any]], args: tuple[Any, ...]
    ) -> None:
        # Cancelled from outside there is no answer: the function's own cancellation is on its way, and is enough.
        try:
            with job.scope:
                value = await fn(*args)
                self._settle(job, value)
        except KeyboardInterrupt:
            raise  # Trio's own Ctrl-C
        except BaseException as error:  # ruff: ignore[blind-except]  # noqa: ASYNC103  a real cancellation goes on below
            own, cancellation = apart(error)
            if own is not None:
                self._settle(job, error=portable(own, name_of(fn)))
            if cancellation is not None:
                raise cancellation from None  # noqa: ASYNC104  the very same
        finally:
            _post(job, functools.partial(_finish, job.over))

    def _settle(self, job: _Job, value: Any = None, *, error: BaseException | None = None) -> None:
        _post(job, functools.partial(_finish, job.answer, value, error))

    def close(self) -> None:
        """From now on it refuses. On Trio's thread."""
        self._nursery = None


def _post(job: _Job, fn: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits there any more
        job.loop.call_soon_threadsafe(fn)


def _finish(future: "asyncio.Future[Any]", value: Any = None, error: BaseException | None = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


async def call_with_portal(
    call: Callable[..., Awaitable[T]], running: Running, fn: Callable[[Portal], Awaitable[T]]
) -> T:
    """See ``Bridge.call_with_portal``."""
    made: list[T] = []
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        portal = Portal(running, nursery)
        try:
            made.append(await call(fn, portal))
        except Exception as error:  # ruff: ignore[blind-except]  raised again below, outside the nursery, as itself
            failure = error
        finally:
            portal.close()
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return made[0]
