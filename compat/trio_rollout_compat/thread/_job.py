"""One call into the engine's thread, seen from both sides."""

import concurrent.futures
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, final

import attrs
import trio

from ..bridge._call import name_of


@final
@attrs.frozen(eq=False, repr=False)
class Job:
    """``answer`` is what the host waits for; ``over`` is set when nothing of it runs any more."""

    fn: Callable[..., Awaitable[Any]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    answer: "concurrent.futures.Future[Any]" = attrs.field(factory=concurrent.futures.Future)
    over: "concurrent.futures.Future[None]" = attrs.field(factory=concurrent.futures.Future)
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    @property
    def name(self) -> str:
        """What was called."""
        return name_of(self.fn)

    async def run(self) -> None:  # noqa: ASYNC910  whether there is a checkpoint is the function's affair
        """Run it on the engine's thread.

        Cancelled from outside, the answer stays open: only the end of the run knows why.
        """
        try:
            with self.scope:
                value = await self.fn(*self.args, **self.kwargs)
                self.settle(value)
            if self.scope.cancelled_caught:
                self.answer.cancel()
        except Exception as error:  # ruff: ignore[blind-except]  it is the caller's
            self.settle(error=error)
        except (SystemExit, KeyboardInterrupt) as error:  # meant for the host, which may leave with it
            self.settle(error=error)
        self.finish()

    def settle(self, value: Any = None, *, error: BaseException | None = None) -> None:
        """Give the answer, unless the host has given it up."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            if error is None:
                self.answer.set_result(value)
            else:
                self.answer.set_exception(error)

    def finish(self) -> None:
        """Nothing of it runs any more."""
        self.over.set_result(None)
