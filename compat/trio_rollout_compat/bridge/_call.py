"""Whether a suspended asyncio task is cleaning up after a cancellation, or has swallowed it.

Cancellation is delivered again until it is heeded. But an ``await`` inside ``finally`` or ``except CancelledError`` is the
heeding, and a second delivery would tear it off half-way. A suspended coroutine keeps the exception that it is handling.
There is no way to ask for that, but the garbage collector visits it, and **after everything else**: the last thing that a
suspended coroutine refers to is the exception that it handles, None where it has handled one before, or else what it awaits
(CPython 3.11 to 3.13, where tests pin it). An exception that somebody only keeps, in a variable or on the stack, is visited earlier.

One call as the loop sees it: its task, the tasks those started, and how it ended.

Everything here runs on the loop's thread, except where it says otherwise. ``ended`` and ``quiet`` are Trio events, set on
Trio's thread; ``ending`` is written before ``ended`` is set and never again.
"""

import asyncio
import contextlib
import contextvars
import functools
import gc
import types
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any, Final, Protocol, final

import attrs
import trio

from ._errors import BridgeError, described

# How many coroutines deep a task is looked into; recursion deeper than that is not cleanup.
_DEPTH: Final = 200
_MARK: Final = "_trio_rollout_asked"
_FRAMES: Final = (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)


def mark(error: BaseException) -> None:
    """Note of a CancelledError that it came after one was asked for: what is raised while it is handled belongs to the cleanup."""
    with contextlib.suppress(AttributeError):
        setattr(error, _MARK, True)


def _awaited_by(frame: object) -> Any:
    if isinstance(frame, types.CoroutineType):
        return frame.cr_await
    if isinstance(frame, types.GeneratorType):
        return frame.gi_yieldfrom
    if isinstance(frame, types.AsyncGeneratorType):
        return frame.ag_await
    # What stands between a coroutine and an async generator, or a wrapped coroutine, has no name for what it awaits.
    below = (types.CoroutineType, types.AsyncGeneratorType)
    return next((item for item in gc.get_referents(frame) if isinstance(item, below)), None)


def _chain(task: "asyncio.Task[Any]") -> Iterator[object]:
    current: Any = task.get_coro()
    for _ in range(_DEPTH):
        if current is None or isinstance(current, asyncio.Future):
            return
        yield current
        current = _awaited_by(current)


def _handled_by(frame: object) -> BaseException | None:
    last = gc.get_referents(frame)[-1:] if isinstance(frame, _FRAMES) else []
    return last[0] if last and isinstance(last[0], BaseException) else None


def _is_cancellation(error: BaseException | None) -> bool:
    """Whether a CancelledError is handled, or something that was raised while one that was asked for was.

    A TimeoutError was made of a CancelledError as well, but of one that nobody here had asked for.
    """
    if isinstance(error, asyncio.CancelledError):
        return True
    for _ in range(_DEPTH):
        if error is None or hasattr(error, _MARK):
            break
        error = error.__context__
    return error is not None


def is_cleaning_up(task: "asyncio.Task[Any]") -> bool:
    """Whether one of its coroutines is suspended while it handles a CancelledError. Call it on the loop's own thread."""
    return any(_is_cancellation(_handled_by(frame)) for frame in _chain(task))


CURRENT: Final[contextvars.ContextVar["Call | None"]] = contextvars.ContextVar("trio_rollout_call", default=None)


@attrs.frozen(kw_only=True, eq=False)
class Ending:
    """How the function ended. ``swallowed``: it had been cancelled and returned all the same."""

    value: Any = None
    error: BaseException | None = None
    cancelled: bool = False
    swallowed: bool = False


def name_of(fn: object) -> str:
    """What a function is called in messages and counts."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    try:
        name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
        return f"{getattr(fn, '__module__', None) or type(fn).__module__}.{name}"
    except Exception:  # ruff: ignore[blind-except]  a callable object with attributes of its own making
        return f"{type(fn).__module__}.{type(fn).__qualname__}"


class Home(Protocol):
    """The bridge that a call belongs to, as the call sees it."""

    def guarded(self, coro: Coroutine[Any, Any, Any], call: "Call") -> Coroutine[Any, Any, Any]:
        """The coroutine, such that it can't end the loop."""
        ...


@final
@attrs.define(eq=False, repr=False)
class Call:
    """Identity and state of one call. ``reply`` runs a function on Trio's thread.

    ``home``: whose call it is, where several bridges share a loop. ``keeps``: what it leaves running is meant to go on.
    """

    name: str
    _fn: Callable[..., Awaitable[Any]]
    _args: tuple[Any, ...]
    _kwargs: Mapping[str, Any]
    _reply: Callable[[Callable[[], object]], None]
    home: "Home"
    keeps: bool
    ended: trio.Event = attrs.field(factory=trio.Event, init=False)
    quiet: trio.Event = attrs.field(factory=trio.Event, init=False)
    ending: Ending | None = attrs.field(default=None, init=False)
    heard: bool = attrs.field(default=False, init=False)
    """The loop has run something that was asked of it since the cancellation."""
    blamed: bool = attrs.field(default=False, init=False)
    """It was said already that what it left behind starts tasks."""
    _main: "asyncio.Task[Any] | None" = attrs.field(default=None, init=False)
    _withdrawn: bool = attrs.field(default=False, init=False)
    _disturbed: bool = attrs.field(default=False, init=False)
    _alive: "dict[asyncio.Task[Any], None]" = attrs.field(factory=dict, init=False)
    """In the order in which they were started: parents first."""
    _told: "set[asyncio.Task[Any]]" = attrs.field(factory=set, init=False)
    _then: list[Callable[[], object]] = attrs.field(factory=list, init=False)

    def __repr__(self) -> str:
        return f"<asyncio call {self.name}, {len(self._alive)} tasks>"

    def start(self, loop: asyncio.AbstractEventLoop, context: contextvars.Context) -> None:
        """Start the function as a task, unless the call was cancelled before the loop came to it."""
        if self._withdrawn:
            self._end(Ending(cancelled=True))
            self._reply(self._fall_quiet)
            return
        context.run(CURRENT.set, self)
        run: Any = self._run()
        run.__qualname__ = self.name  # what its task is called in reprs, stack dumps and errors
        coro = self.home.guarded(run, self)  # here, too: somebody's code may have put another task factory in
        try:
            # Not with ``context=``: a host's task factory need not take it.
            self._main = context.run(loop.create_task, coro)
            self.adopt(self._main)  # the loop's task factory may have done it already
            self._main.set_name(self.name)
        except BaseException as error:  # noqa: ASYNC103  whatever a host's task factory raises, somebody waits
            coro.close()
            self._not_started(error)
            if isinstance(error, KeyboardInterrupt):
                raise  # the host's own

    def _not_started(self, error: BaseException) -> None:
        refused = BridgeError(f"{self.name}: the loop made no task of it: {described(error)}")
        refused.__cause__ = error
        self._end(Ending(error=refused))
        self._reply(self._fall_quiet)

    async def _run(self) -> Any:
        made = self._fn(*self._args, **self._kwargs)
        if not isinstance(made, Awaitable):
            raise TypeError(
                f"{self.name} returned {type(made).__name__}, an awaitable is wanted: the bridge runs asyncio functions "
                "(for a sync one there is trio_rollout.in_thread)"
            )
        return await made

    def adopt(self, task: "asyncio.Task[Any]") -> None:
        """Count a task as the call's: its own, or one that was started by it or by one of those."""
        if task not in self._alive:
            self._alive[task] = None
            task.add_done_callback(self._task_done)

    def _main_done(self, task: "asyncio.Task[Any]") -> None:
        if task.cancelled():
            self._end(Ending(cancelled=True))
        elif (error := task.exception()) is not None:
            self._end(Ending(error=error, cancelled=isinstance(error, asyncio.CancelledError)))
        else:
            self._end(Ending(value=task.result(), swallowed=self._disturbed))

    def thrown(self, error: BaseException) -> None:
        """A CancelledError goes into one of its tasks: ours, if we have asked for one."""
        if self._told:
            mark(error)

    def interrupted(self, error: BaseException) -> None:
        """Its loop is about to be left with this exception: nothing of it will run again soon."""
        self._end(Ending(error=error))

    def _end(self, ending: Ending) -> None:
        if self.ending is None:
            self.ending = ending
            self._reply(self.ended.set)

    def _task_done(self, task: "asyncio.Task[Any]") -> None:
        if task is self._main:
            self._main_done(task)  # before it is told that all is quiet: whoever hears that may look at how it ended
        self._alive.pop(task, None)
        self._told.discard(task)
        if not self._alive:
            self._reply(self._fall_quiet)

    def _fall_quiet(self) -> None:
        self.quiet.set()
        while self._then:
            self._then.pop()()

    def when_quiet(self, fn: Callable[[], object]) -> None:
        """Call ``fn`` as soon as nothing of it is alive any more. On Trio's thread, and so is ``fn``."""
        self._then.append(fn)
        if self.quiet.is_set():
            self._fall_quiet()

    def cancel_main(self) -> None:
        """Cancel the function, unless it is cleaning up after an earlier cancellation.

        Again, it is for those of its tasks as well that were cancelled and go on: a task group cancels its tasks only once.
        """
        self.heard = True
        if self._main is None:
            self._withdrawn = True
        elif self._main in self._told and any(map(is_cleaning_up, self._alive)):
            return  # a gather passes every cancellation on to its children, so theirs counts too
        elif self._main not in self._told:
            self._cancel([self._main])
        else:
            self._cancel_again()

    def _cancel_again(self) -> None:
        asked = {task: task.cancelling() for task in self._alive}
        for task, before in asked.items():
            # One that a parent of it has just passed it on to must not get it twice.
            if task is self._main or (before and task.cancelling() == before):
                self._cancel([task])

    def cancel_all(self) -> None:
        """Cancel everything that is still alive, except what is cleaning up after an earlier cancellation."""
        self.heard = True
        self._withdrawn = self._withdrawn or self._main is None
        self._cancel([task for task in self._alive if task not in self._told or not is_cleaning_up(task)])

    def _cancel(self, tasks: "Iterable[asyncio.Task[Any]]") -> None:
        for task in tasks:
            if task.cancel():
                self._told.add(task)
                self._disturbed = self._disturbed or task is self._main

    def forget(self) -> None:
        """Take what is still alive out of asyncio's list of tasks, so that whoever winds up the loop does not wait for it."""
        for task in self._alive:
            asyncio._unregister_task(task)

    def survivors(self) -> list[str]:
        """What is still alive, by name. On Trio's thread it is right only once the function has ended."""
        return sorted(
            f"{task.get_name()} ({getattr(task.get_coro(), '__qualname__', '?')})"
            for task in tuple(self._alive)
            if task is not self._main
        )

    def owns(self, task: object) -> bool:
        """Whether this task belongs to the call; from any thread."""
        return task in self._alive
