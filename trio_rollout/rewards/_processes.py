"""Scorer processes that are kept between calls: owned by a context manager, killed and reaped when it is left.

A synchronous scorer made async by a process a call: it needs no owner, because nothing outlives the call.
"""

import pickle
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from typing import Generic, TypeVar, cast, final

import attrs
import trio

from .._core.checks import whole
from .._util.threads import scorer_name
from ..errors import RewardError
from ._process import REAP_LIMIT, ScorerProcess, pickled_setup, start_scorer

T = TypeVar("T")
R = TypeVar("R")


@final
@attrs.define(eq=False, repr=False)
class ScorerProcesses(Generic[T, R]):
    """Made by ``open_scorer_processes``: call it like the function, with ``await``.

    Invariant: a process that has loaded its scorer is in ``_owned`` until it has been reaped; it is in ``_idle`` too while
    nobody asks it. So ``_end`` finds them all.
    """

    _fn: Callable[[T], R]
    workers: int = attrs.field(kw_only=True, validator=whole(1))
    _setup: bytes = attrs.field(init=False)
    _slots: trio.CapacityLimiter = attrs.field(init=False)
    _owned: set[ScorerProcess] = attrs.field(factory=set, init=False)
    _idle: list[ScorerProcess] = attrs.field(factory=list, init=False)
    _closed: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._setup = pickled_setup(self._fn)
        self._slots = trio.CapacityLimiter(self.workers)

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of this moment."""
        return tuple(sorted(worker.pid for worker in self._owned if not worker.is_dead))

    def __repr__(self) -> str:
        return (
            f"<scorer_processes({scorer_name(self._fn)}): {self._slots.borrowed_tokens} of {self.workers} running, "
            f"{len(self.pids)} alive>"
        )

    async def __call__(self, value: T, /) -> R:
        """Run the function in one of the processes.

        Blocks until one of them is free and the function has returned. Cancelled, that process and all that it started are
        killed and reaped before Cancelled goes on; a later call starts another.

        Raises:
          RewardError: the function raised, its process died, or the processes are closed.

        """
        request = pickle.dumps(value)
        async with self._slots:
            worker = await self._idle_worker() or await self._started()
            with ExitStack() as on_failure:
                on_failure.callback(self._owned.discard, worker)
                reply = await worker.ask(request)  # unless it replies, it is gone
                on_failure.pop_all()
            self._idle.append(worker)
        return cast(R, reply.unwrap())

    async def _idle_worker(self) -> ScorerProcess | None:
        """One that lives. Others were killed while nobody asked them, for want of memory: nothing of those is kept."""
        while self._idle:
            worker = self._idle.pop()
            if not worker.is_dead:
                return worker
            await worker.end()
            self._owned.discard(worker)
        return None

    async def _started(self) -> ScorerProcess:
        self._require_open()
        worker = await start_scorer(self._setup)
        self._owned.add(worker)
        if self._closed:  # while it started
            await worker.end()
        self._require_open()
        return worker

    def _require_open(self) -> None:
        if self._closed:
            raise RewardError(f"{self!r}: the scorer processes are closed")

    async def _end(self) -> None:
        self._closed = True
        self._idle.clear()
        for worker in self._owned:
            worker.kill()  # all at once, so that one REAP_LIMIT is enough
        with trio.move_on_after(REAP_LIMIT, shield=True):
            await trio.lowlevel.checkpoint()
            while self._owned:
                await self._owned.pop().end()


@asynccontextmanager
async def open_scorer_processes(fn: Callable[[T], R], *, workers: int = 2) -> AsyncGenerator[ScorerProcesses[T, R]]:
    """A synchronous scorer as an async one: at most ``workers`` calls at once, in processes that are kept.

    Entering blocks until the first process has loaded the scorer; the others are started when they are needed, and a killed
    one is replaced then. Leaving kills and reaps all of them; a call that is still running gets a RewardError. What
    ``in_process`` says about the function holds here too.

    Raises:
      RewardError: the function can't be sent to a process, or loaded there.
      SettingsError: ``workers`` is out of its range.

    """
    processes = ScorerProcesses(fn, workers=workers)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(processes._end)
        processes._idle.append(await processes._started())
        yield processes


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
