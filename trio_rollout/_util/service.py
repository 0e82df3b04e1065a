"""A service beside a ``with`` body: the shape that every ``open_x()`` of the package shares.

The service runs in a child task inside a shielded scope, the body does not. So an outer cancellation reaches the body at
once, while the service stays alive for the cleanups of the body; ``leave`` then ends it. The nursery around the body is
invisible: the body's exception comes out as the same object, never inside a group of this nursery.
"""

import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, Protocol, TypeVar, final

import attrs
import trio

from .._core.failures import leaves_of
from .exception_groups import is_cancellation

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Serve(Protocol[T_co]):
    """A long-running task that reports a value through ``task_status`` once it is ready."""

    def __call__(self, *, task_status: trio.TaskStatus[T_co]) -> Awaitable[None]:
        """Run until cancelled."""
        ...


def _failure_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the service's failure: bare if it is a single one, a KeyboardInterrupt before all others."""
    leaves = leaves_of(group)
    for leaf in leaves:
        if isinstance(leaf, KeyboardInterrupt):
            return leaf
    return leaves[0] if len(leaves) == 1 else group


def _raise_outcome(body_error: BaseException | None, failure: BaseException | None) -> None:
    if failure is None:
        if body_error is not None:
            raise body_error
        return
    # The failure has cancelled the body then, and a KeyboardInterrupt hides nothing worth keeping.
    if body_error is None or is_cancellation(body_error) or isinstance(failure, KeyboardInterrupt):
        raise failure
    raise BaseExceptionGroup("the body and its service both failed", [body_error, failure])


@final
@attrs.frozen(eq=False)
class _Shielding(Generic[T]):
    """Passes on that the service has started, and shields it in the same step: nothing can come between."""

    _status: trio.TaskStatus[T]
    _scope: trio.CancelScope

    def started(self, value: Any = None) -> None:
        self._status.started(value)
        # If it is cancelled while it starts, there is no body yet to be kept alive for: the service has to end.
        if trio.current_effective_deadline() != -math.inf:
            self._scope.shield = True


@asynccontextmanager
async def open_service(
    serve: Serve[T],
    leave: Callable[[T, BaseException | None], Awaitable[None]] | None = None,
) -> AsyncGenerator[T]:
    """Run ``serve(task_status=...)`` beside the body and yield the value that it started with.

    Entering blocks until the service has started. Leaving calls ``leave(value, error)``, if it is given, where ``error`` is
    the body's exception or None, inside a shield: it must bound itself. Then the service's scope is cancelled and awaited.

    Raises:
      BaseException: the body's exception as itself, or the service's failure bare, or both in one group.
    """
    scope = trio.CancelScope()

    async def shielded(*, task_status: trio.TaskStatus[T]) -> None:  # noqa: ASYNC128  serve calls it
        with scope:
            await serve(task_status=_Shielding(task_status, scope))

    body_error: BaseException | None = None
    failure: BaseException | None = None
    try:
        async with trio.open_nursery(strict_exception_groups=True) as nursery:
            value: Any = await nursery.start(shielded)
            try:
                yield value
            # Raised again below, outside the nursery, as itself.
            except BaseException as error:  # ruff: ignore[blind-except]  # noqa: ASYNC103
                body_error = error
            try:
                if leave is not None:
                    with trio.CancelScope(shield=True):
                        await leave(value, body_error)
            finally:
                scope.cancel()
    except BaseExceptionGroup as group:
        failure = _failure_of(group)
    _raise_outcome(body_error, failure)


@asynccontextmanager
async def open_service_nursery() -> AsyncGenerator[trio.Nursery]:
    """Open a nursery for tasks that serve the body, and cancel it when the body is left.

    An outer cancellation reaches the body at once and these tasks only when the body is left. A task that raises ends the
    body, and the error comes out as ``open_service`` says.
    """

    async def serve(*, task_status: trio.TaskStatus[trio.Nursery]) -> None:
        async with trio.open_nursery() as nursery:
            task_status.started(nursery)
            await trio.sleep_forever()

    async with open_service(serve) as nursery:
        yield nursery
