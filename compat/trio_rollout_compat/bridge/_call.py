"""One call of an asyncio function: its task, the tasks that were started by it, and how it ended.

A call also knows if one of its tasks is cleaning up after a cancellation, because such a task must not be cancelled again:
an ``await`` inside ``finally`` or ``except CancelledError`` is the answer to the first cancellation, and a second one would
tear it off half-way. asyncio has no question for that. But a suspended coroutine keeps the exception that it is handling,
and the garbage collector visits it **after everything else**: the last object that a suspended coroutine refers to is the
exception that it handles, None where it has handled one before, or else the object that it awaits (CPython 3.11 to 3.13,
where tests pin it). An exception that is only kept, in a variable or on the stack, is visited earlier. Decision:
docs/decisions/0019-whose-fault-an-exception-is.md.
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

CURRENT: Final[contextvars.ContextVar["Call | None"]] = contextvars.ContextVar("trio_rollout_call", default=None)
"""The call that a task, a timer or a callback of the loop belongs to."""

# The number of coroutines that are looked at in a task; deeper recursion is not taken for cleanup.
_DEPTH: Final = 200
_MARK: Final = "_trio_rollout_asked"
_FRAMES: Final = (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)


@attrs.frozen(kw_only=True, eq=False)
class Ending:
    """On any thread: how the function ended. ``swallowed``: it was cancelled and returned all the same."""

    value: Any = None
    error: BaseException | None = None
    cancelled: bool = False
    swallowed: bool = False


class CallOwner(Protocol):
    """On the loop's thread: the bridge that a call belongs to. Several bridges may share a loop."""

    def guarded(self, coro: Coroutine[Any, Any, Any], call: "Call") -> Coroutine[Any, Any, Any]:
        """Return the coroutine, wrapped such that it cannot end the loop."""
        ...


@final
@attrs.define(eq=False, repr=False)
class Call:
    """On the loop's thread, except for the methods that say otherwise: identity and state of one call.

    ``reply`` runs a function on Trio's thread. ``keeps_tasks``: tasks that outlive the function are no leak. ``ended`` (the
    function has) and ``all_ended`` (its tasks have, too) are Trio's events, set and waited for on Trio's thread. ``ending``
    is written before ``ended`` is set, and never again, so Trio's thread may read it then.
    """

    name: str
    _fn: Callable[..., Awaitable[Any]]
    _args: tuple[Any, ...]
    _kwargs: Mapping[str, Any]
    _reply: Callable[[Callable[[], object]], None]
    owner: CallOwner
    keeps_tasks: bool
    ended: trio.Event = attrs.field(factory=trio.Event, init=False)
    all_ended: trio.Event = attrs.field(factory=trio.Event, init=False)
    ending: Ending | None = attrs.field(default=None, init=False)
    loop_responded: bool = attrs.field(default=False, init=False)
    """The loop has run a function that was posted since the cancellation."""
    late_tasks_noted: bool = attrs.field(default=False, init=False)
    """It was counted already that the ended call still starts tasks."""
    _main: "asyncio.Task[Any] | None" = attrs.field(default=None, init=False)
    _cancelled_before_start: bool = attrs.field(default=False, init=False)
    _main_was_cancelled: bool = attrs.field(default=False, init=False)
    _alive: "dict[asyncio.Task[Any], None]" = attrs.field(factory=dict, init=False)
    """In the order in which they were started: parents first."""
    _cancelled: "set[asyncio.Task[Any]]" = attrs.field(factory=set, init=False)
    """Those of the tasks alive that the bridge has cancelled."""
    _then: list[Callable[[], object]] = attrs.field(factory=list, init=False)

    def __repr__(self) -> str:
        return f"<asyncio call {self.name}, {len(self._alive)} tasks>"

    def start(self, loop: asyncio.AbstractEventLoop, context: contextvars.Context) -> None:
        """Start the function as a task, unless the call was cancelled before the loop came to it."""
        if self._cancelled_before_start:
            self._end(Ending(cancelled=True))
            self._reply(self._note_all_ended)
            return
        context.run(CURRENT.set, self)
        run: Any = self._run()
        run.__qualname__ = self.name  # the task's name in reprs, stack dumps and errors
        coro = self.owner.guarded(run, self)  # here, too: a host may have put another task factory in
        try:
            # Not with ``context=``: a host's task factory need not take it.
            self._main = context.run(loop.create_task, coro)
            self.adopt(self._main)  # the loop's task factory may have done it already
            self._main.set_name(self.name)
        except BaseException as error:  # noqa: ASYNC103  a host's task factory may raise anything, and Trio waits
            coro.close()
            self._not_started(error)
            if isinstance(error, KeyboardInterrupt):
                raise  # the host's own

    def _not_started(self, error: BaseException) -> None:
        refused = BridgeError(f"{self.name}: the loop made no task of it: {described(error)}")
        refused.__cause__ = error
        self._end(Ending(error=refused))
        self._reply(self._note_all_ended)

    async def _run(self) -> Any:
        made = self._fn(*self._args, **self._kwargs)
        if not isinstance(made, Awaitable):
            raise TypeError(
                f"{self.name} returned {type(made).__name__}, an awaitable is wanted: the bridge runs asyncio functions "
                "(for a sync one there is trio_rollout.in_thread)"
            )
        return await made

    def adopt(self, task: "asyncio.Task[Any]") -> None:
        """Count a task as the call's: its own, or one that was started by one of its tasks."""
        if task not in self._alive:
            self._alive[task] = None
            task.add_done_callback(self._task_done)

    def _task_done(self, task: "asyncio.Task[Any]") -> None:
        if task is self._main:
            self._main_done(task)  # before ``all_ended`` is set: code that waits for it may look at ``ending``
        self._alive.pop(task, None)
        self._cancelled.discard(task)
        if not self._alive:
            self._reply(self._note_all_ended)

    def _main_done(self, task: "asyncio.Task[Any]") -> None:
        if task.cancelled():
            self._end(Ending(cancelled=True))
        elif (error := task.exception()) is not None:
            self._end(Ending(error=error, cancelled=isinstance(error, asyncio.CancelledError)))
        else:
            self._end(Ending(value=task.result(), swallowed=self._main_was_cancelled))

    def _end(self, ending: Ending) -> None:
        if self.ending is None:
            self.ending = ending
            self._reply(self.ended.set)

    def end_by_interrupt(self, error: BaseException) -> None:
        """Take this exception, with which the loop is about to be left, as the end: the loop runs nothing more soon."""
        self._end(Ending(error=error))

    def note_cancelled_error(self, error: BaseException) -> None:
        """Mark a CancelledError that goes into one of the tasks, if the bridge has cancelled any."""
        if self._cancelled:
            mark(error)

    def cancel_main(self) -> None:
        """Cancel the function, unless it is cleaning up after an earlier cancellation.

        From the second time on, also cancel those of its tasks that were cancelled and go on: a task group cancels its
        tasks only once.
        """
        self.loop_responded = True
        if self._main is None:
            self._cancelled_before_start = True
        elif self._main in self._cancelled and any(map(is_cleaning_up, self._alive)):
            return  # a gather passes every cancellation on to its children, so theirs counts too
        elif self._main not in self._cancelled:
            self._cancel([self._main])
        else:
            self._cancel_again()

    def _cancel_again(self) -> None:
        asked = {task: task.cancelling() for task in self._alive}
        for task, before in asked.items():
            # A task to which its parent has just passed the cancellation on must not get it twice.
            if task is self._main or (before and task.cancelling() == before):
                self._cancel([task])

    def cancel_all(self) -> None:
        """Cancel every task that is alive, except those that are cleaning up after an earlier cancellation."""
        self.loop_responded = True
        self._cancelled_before_start = self._cancelled_before_start or self._main is None
        self._cancel([task for task in self._alive if task not in self._cancelled or not is_cleaning_up(task)])

    def _cancel(self, tasks: "Iterable[asyncio.Task[Any]]") -> None:
        for task in tasks:
            if task.cancel():
                self._cancelled.add(task)
                self._main_was_cancelled = self._main_was_cancelled or task is self._main

    def unregister_tasks(self) -> None:
        """Take the tasks that are alive out of asyncio's list of tasks, so that closing the loop does not wait for them."""
        for task in self._alive:
            asyncio._unregister_task(task)

    def _note_all_ended(self) -> None:
        """On Trio's thread."""
        self.all_ended.set()
        while self._then:
            self._then.pop()()

    def when_all_ended(self, fn: Callable[[], object]) -> None:
        """On Trio's thread: call ``fn`` there as soon as no task of the call is alive."""
        self._then.append(fn)
        if self.all_ended.is_set():
            self._note_all_ended()

    def survivors(self) -> list[str]:
        """On Trio's thread, once the function has ended: name the tasks that are still alive."""
        return sorted(
            f"{task.get_name()} ({getattr(task.get_coro(), '__qualname__', '?')})"
            for task in tuple(self._alive)
            if task is not self._main
        )

    def owns(self, task: object) -> bool:
        """On any thread: return True if this task belongs to the call and is alive."""
        return task in self._alive


def name_of(fn: object) -> str:
    """On any thread: return the name of a function for messages and counts."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    try:
        name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
        return f"{getattr(fn, '__module__', None) or type(fn).__module__}.{name}"
    except Exception:  # ruff: ignore[blind-except]  a callable object may compute its attributes
        return f"{type(fn).__module__}.{type(fn).__qualname__}"


def mark(error: BaseException) -> None:
    """Mark a CancelledError that the bridge has caused: exceptions raised while it is handled belong to the cleanup."""
    with contextlib.suppress(AttributeError):
        setattr(error, _MARK, True)


def is_cleaning_up(task: "asyncio.Task[Any]") -> bool:
    """On the loop's thread: return True if the task is suspended while it handles a CancelledError."""
    return any(_is_cancellation(_handled_by(frame)) for frame in _chain(task))


def _chain(task: "asyncio.Task[Any]") -> Iterator[object]:
    """Yield the task's coroutine, the one that this awaits, and so on."""
    current: Any = task.get_coro()
    for _ in range(_DEPTH):
        if current is None or isinstance(current, asyncio.Future):
            return
        yield current
        current = _awaited_by(current)


def _awaited_by(frame: object) -> Any:
    if isinstance(frame, types.CoroutineType):
        return frame.cr_await
    if isinstance(frame, types.GeneratorType):
        return frame.gi_yieldfrom
    if isinstance(frame, types.AsyncGeneratorType):
        return frame.ag_await
    # An object between a coroutine and an async generator, or a wrapped coroutine, has no attribute for what it awaits.
    below = (types.CoroutineType, types.AsyncGeneratorType)
    return next((item for item in gc.get_referents(frame) if isinstance(item, below)), None)


def _handled_by(frame: object) -> BaseException | None:
    last = gc.get_referents(frame)[-1:] if isinstance(frame, _FRAMES) else []
    return last[0] if last and isinstance(last[0], BaseException) else None


def _is_cancellation(error: BaseException | None) -> bool:
    """Return True for a CancelledError, and for an exception raised while one that the bridge has caused was handled.

    A TimeoutError is made of a CancelledError as well, but of one that the bridge has not caused.
    """
    if isinstance(error, asyncio.CancelledError):
        return True
    for _ in range(_DEPTH):
        if error is None or hasattr(error, _MARK):
            break
        error = error.__context__
    return error is not None
