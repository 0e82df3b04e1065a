"""The way back from an asyncio function into Trio, while its bridge call lasts.

A portal owns a nursery around the call. A function that asyncio code asks for runs there: it is cancelled when the asking
asyncio task is, and never outlives the call.
"""

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar, TypeVarTuple, final

import attrs
import trio

from ._backends import RunningLoop
from ._call import name_of
from ._errors import apart, portable

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_OVER: Final = "this portal's call is over: nothing of it may go on in Trio"


@attrs.frozen(eq=False)
class _Request:
    """On both threads: one function that asyncio code asks for.

    The futures belong to the asking loop and are set on its thread: ``over`` at the end of the function in any case,
    ``answer`` if there is one. The scope is Trio's.
    """

    loop: asyncio.AbstractEventLoop
    answer: "asyncio.Future[Any]"
    over: "asyncio.Future[None]"
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)


@final
@attrs.define(eq=False)
class Portal:
    """On the thread of the asking loop: asyncio code's access to Trio, until the call that it was given to is over."""

    _running: RunningLoop
    _nursery: trio.Nursery | None
    """None when it is closed: an abandoned function may keep its portal for days, and with it all tasks around its call."""

    async def run(self, fn: Callable[[*Ts], Awaitable[T]], /, *args: *Ts) -> T:
        """From asyncio code: run a Trio function inside the scopes of the rollout, and return its result.

        Blocks the asyncio task until the function has ended. Cancelled, the Trio function is cancelled and its end awaited.
        The asking loop need not be the bridge's: a loop that the function runs in another thread will do.

        Raises:
          RuntimeError: the call that this portal was given to is over, this is no asyncio code, or the function raised
            StopIteration.
          AsyncioCancelled: the function raised an asyncio.CancelledError.
          BaseException: any other exception of the function.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError(
                f"portal.run: {name_of(fn)} can be asked for by asyncio code only, and no loop runs in this thread; another "
                "thread of Trio's uses trio.from_thread.run"
            ) from None
        if self._nursery is None:  # the Trio run itself may be over, and then there would be no answer
            raise RuntimeError(_OVER)
        request = _Request(loop, loop.create_future(), loop.create_future())
        self._running.reply(functools.partial(self._start, request, fn, args))
        try:
            result: T = await request.answer
        except asyncio.CancelledError:
            self._running.reply(request.scope.cancel)
            await asyncio.shield(request.over)  # noqa: ASYNC102  asyncio code: the bridge bounds it
            raise
        return result

    def _start(self, request: _Request, fn: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> None:
        """On Trio's thread."""
        if self._nursery is None:
            _post(request, functools.partial(_finish, request.answer, error=RuntimeError(_OVER)))
            _post(request, functools.partial(_finish, request.over))
        else:
            self._nursery.start_soon(_serve, request, fn, args)

    def close(self) -> None:
        """On Trio's thread: refuse every request from now on."""
        self._nursery = None


async def _serve(request: _Request, fn: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> None:
    """On Trio's thread: run the function and post its outcome.

    Cancelled from outside there is no answer: the asking function's own cancellation is on its way, and is enough.
    """
    try:
        with request.scope:
            value = await fn(*args)
            _post(request, functools.partial(_finish, request.answer, value))
    except KeyboardInterrupt:
        raise  # Trio's own Ctrl-C
    except BaseException as error:  # ruff: ignore[blind-except]  # noqa: ASYNC103  a real cancellation goes on below
        own, cancellation = apart(error)
        if own is not None:
            _post(request, functools.partial(_finish, request.answer, error=portable(own, name_of(fn))))
        if cancellation is not None:
            raise cancellation from None  # noqa: ASYNC104  the very same
    finally:
        _post(request, functools.partial(_finish, request.over))


def _post(request: _Request, fn: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, and no task waits there any more
        request.loop.call_soon_threadsafe(fn)


def _finish(future: "asyncio.Future[Any]", value: Any = None, error: BaseException | None = None) -> None:
    """On the asking loop's thread."""
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


async def call_with_portal(
    call: Callable[..., Awaitable[T]], running: RunningLoop, fn: Callable[[Portal], Awaitable[T]]
) -> T:
    """On Trio's thread: see ``Bridge.call_with_portal``. ``call`` is the bridge's."""
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
