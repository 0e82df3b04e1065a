"""One call into the engine's thread, seen from both sides."""

import concurrent.futures
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, final

import attrs
import trio

from ..bridge._call import name_of
from ..bridge._errors import apart, described, portable

_log: Final = logging.getLogger("trio_rollout.compat")


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
        """Run it on the engine's thread. What it raises is the caller's, whatever its class: the engine goes on.

        Cancelled from outside, the answer stays open: only the end of the run knows why.
        """
        try:
            with self.scope:
                value = await self.fn(*self.args, **self.kwargs)
                self.settle(value)
            if self.scope.cancelled_caught:
                self.answer.cancel()
        except BaseException as error:  # ruff: ignore[blind-except]  # noqa: ASYNC103  a real cancellation goes on below
            own, cancellation = apart(error)
            if own is not None:
                self.settle(error=portable(own, self.name))
            if cancellation is not None:
                raise cancellation from None  # noqa: ASYNC104  the very same
        self.finish()

    def settle(self, value: Any = None, *, error: BaseException | None = None) -> None:
        """Give the answer, unless the host has given it up."""
        try:
            if error is None:
                self.answer.set_result(value)
            else:
                self.answer.set_exception(error)
        except concurrent.futures.InvalidStateError:
            pass
        except BaseException as raised:  # ruff: ignore[blind-except]  # noqa: ASYNC103  no cancellation comes here
            _log.error("a callback on the answer of %s raised %s", self.name, described(raised))  # noqa: ASYNC104

    def finish(self) -> None:
        """Nothing of it runs any more, or nobody waits for that any more."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.over.set_result(None)
