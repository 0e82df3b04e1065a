"""A synchronous scorer made async by a process a call: it needs no owner, because nothing outlives the call."""

import pickle
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Generic, TypeVar, cast, final

import attrs
import trio

from .._core.checks import whole
from .._in_thread import scorer_name
from ._process import pickled_setup, start_scorer

T = TypeVar("T")
R = TypeVar("R")


@final
@attrs.define(eq=False, repr=False)
class InProcess(Generic[T, R]):
    """Made by ``in_process``: call it like the function, with ``await``."""

    _fn: Callable[[T], R]
    workers: int = attrs.field(kw_only=True, validator=whole(1))
    _setup: bytes = attrs.field(init=False)
    _slots: trio.CapacityLimiter = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._setup = pickled_setup(self._fn)
        self._slots = trio.CapacityLimiter(self.workers)

    def __repr__(self) -> str:
        return f"<in_process({scorer_name(self._fn)}): {self._slots.borrowed_tokens} of {self.workers} running>"

    async def __call__(self, value: T, /) -> R:
        """Run the function in a process of its own.

        Blocks until one of ``workers`` slots is free and the function has returned. Cancelled, the process and all that it
        started are killed and reaped before Cancelled goes on.

        Raises:
          RewardError: the function raised, can't be loaded in another process, or its process died.

        """
        request = pickle.dumps(value)
        async with self._slots, AsyncExitStack() as stack:
            worker = await start_scorer(self._setup)
            stack.push_async_callback(worker.end)
            reply = await worker.ask(request)
        return cast(R, reply.unwrap())


def in_process(fn: Callable[[T], R], *, workers: int = 2) -> InProcess[T, R]:
    """A synchronous scorer as an async one: at most ``workers`` calls at once, each in a new process.

    Starting one costs some tenths of a second of processor time, the imports of the scorer's module included. Where that
    matters, ``open_scorer_processes`` keeps them. The function must be importable by name; what it is given and what it
    returns is pickled. A script that defines it must guard what it runs by ``if __name__ == "__main__":``.

    Raises:
      RewardError: the function can't be sent to a process.
      SettingsError: ``workers`` is out of its range.

    """
    return InProcess(fn, workers=workers)
