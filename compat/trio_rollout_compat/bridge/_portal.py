"""The way back from an asyncio function into Trio, while its bridge call lasts.

Owns a nursery around the call: what the function asks for runs there, is cancelled when the function's task is, and never
outlives the call.
"""

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, final

import attrs
import trio

from ._backend import Running

if TYPE_CHECKING:
    from ._bridge import Bridge

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@attrs.frozen(eq=False)
class _Job:
    """One request. Both futures belong to the loop: ``over`` is set at its end in any case, ``answer`` if there is one."""

    answer: "asyncio.Future[Any]"
    over: "asyncio.Future[None]"
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)


@final
@attrs.define(eq=False)
class Portal:
    """Given to asyncio code; usable until the call that it was given to is over."""

    _running: Running
    _nursery: trio.Nursery
    _closed: bool = attrs.field(default=False, init=False)

    async def run(self, fn: Callable[[*Ts], Awaitable[T]], /, *args: *Ts) -> T:
        """From asyncio code: run a Trio function inside the scopes of the rollout, and return what it returns.

        Cancelled, the Trio function is cancelled and its end awaited.

        Raises:
          RuntimeError: the call that this portal was given to is over.
          Exception: whatever the function raised.

        """
        loop = asyncio.get_running_loop()
        job = _Job(loop.create_future(), loop.create_future())
        self._running.reply(functools.partial(self._start, job, fn, args))
        try:
            result: T = await job.answer
        except asyncio.CancelledError:
            self._running.reply(job.scope.cancel)
            await asyncio.shield(job.over)  # noqa: ASYNC102  asyncio code: the bridge bounds it
            raise
        return result

    def _start(self, job: _Job, fn: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> None:
        if self._closed:
            self._settle(job, error=RuntimeError("this portal's call is over: nothing of it may go on in Trio"))
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
        except Exception as error:  # ruff: ignore[blind-except]  it belongs to the asyncio code that asked
            self._settle(job, error=error)
        finally:
            self._post(functools.partial(_finish, job.over))

    def _settle(self, job: _Job, value: Any = None, *, error: Exception | None = None) -> None:
        self._post(functools.partial(_finish, job.answer, value, error))

    def _post(self, fn: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits there any more
            self._running.post(fn)

    def close(self) -> None:
        """From now on it refuses. On Trio's thread."""
        self._closed = True


def _finish(future: "asyncio.Future[Any]", value: Any = None, error: Exception | None = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


async def call_with_portal(bridge: "Bridge", fn: Callable[[Portal], Awaitable[T]]) -> T:
    """``bridge.call(fn, portal)``, with a portal that lives as long as the call."""
    made: list[T] = []
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        portal = Portal(bridge._running, nursery)
        try:
            made.append(await bridge.call(fn, portal))
        except Exception as error:  # ruff: ignore[blind-except]  raised again below, outside the nursery, as itself
            failure = error
        finally:
            portal.close()
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return made[0]
