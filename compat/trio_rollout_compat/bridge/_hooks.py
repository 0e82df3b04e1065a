"""The hooks in an asyncio loop: a task factory that knows which call a task belongs to, and an exception handler.

Both are chained to the hooks that were there before. On a host's loop only tasks of the bridge's calls are touched.
"""

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Final, final

import attrs

from ._backends import RunningLoop
from ._call import CURRENT, Call
from ._errors import described, exit_of
from ._settings import BridgeSettings, Misuse, OnLeak

Note = Callable[[Misuse, str, str], None]
"""Is told of a misuse: its kind, the function's name, and what happened. On the loop's thread."""

Context = dict[str, Any]

# The attributes that asyncio's own reprs and stack dumps read.
_CODES: Final = frozenset({"cr_await", "cr_code", "cr_frame", "cr_origin", "cr_running", "cr_suspended"})


@final
class GuardedCoroutine(Coroutine[Any, Any, Any]):
    """On the loop's thread: behaves like ``coro``, but cannot end the loop, and reports its steps.

    A SystemExit in a task would go straight through ``run_forever``: it would end the loop's thread, and everything that
    waits for it would hang. It is a class and not an ``async def`` around the coroutine, because a task that is cancelled
    before its first step must reach the coroutine itself, or Python warns that it was never awaited.

    ``exited(error)`` is told of a SystemExit or KeyboardInterrupt and returns True to let it through, ``stepped(seconds)``
    of each step, and ``cancelled(error)`` of each CancelledError that goes in. None of them may raise.
    """

    def __init__(
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        call: Call,
        exited: Callable[[BaseException], bool],
        stepped: Callable[[float], None],
        cancelled: Callable[[BaseException], None],
    ) -> None:
        self._coro = coro
        self.call = call
        self._exited = exited
        self._stepped = stepped
        self._cancelled = cancelled
        self.__name__ = getattr(coro, "__name__", type(coro).__name__)
        self.__qualname__ = getattr(coro, "__qualname__", self.__name__)

    def __getattr__(self, name: str) -> Any:
        if name in _CODES:
            return getattr(self._coro, name)
        raise AttributeError(name)

    def __await__(self) -> "GuardedCoroutine":
        return self

    def __iter__(self) -> "GuardedCoroutine":
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        """Run one step."""
        return self._step(self._coro.send, value)

    def throw(self, kind: Any, value: BaseException | object = None, traceback: TracebackType | None = None) -> Any:
        """Run one step that begins with an exception."""
        error = kind if isinstance(kind, BaseException) else value if isinstance(value, BaseException) else kind()
        if isinstance(error, asyncio.CancelledError):
            self._cancelled(error)
        return self._step(self._coro.throw, error if traceback is None else error.with_traceback(traceback))

    def close(self) -> None:
        """Close the coroutine."""
        self._coro.close()

    def _step(self, step: Callable[[Any], Any], value: Any) -> Any:
        begun = time.perf_counter()
        try:
            return step(value)
        except (SystemExit, KeyboardInterrupt) as error:
            if self._exited(error):
                raise
            raise exit_of(error, self.__qualname__) from error
        finally:
            self._stepped(time.perf_counter() - begun)


@final
@attrs.define(eq=False)
class LoopHooks:
    """On the loop's thread: the hooks of one bridge, installed while it is open."""

    running: RunningLoop
    settings: BridgeSettings
    note: Note
    _open: bool = attrs.field(default=False, init=False)
    _factory_before: Any = attrs.field(default=None, init=False)
    _handler_before: Any = attrs.field(default=None, init=False)
    _late_tasks: "set[asyncio.Task[Any]]" = attrs.field(factory=set, init=False)
    """Started by timers, servers and callbacks of calls that had ended."""

    def install(self) -> None:
        """Put the hooks in, in front of those that are there."""
        self._open = True
        self._factory_before = _first_open(self.running.loop.get_task_factory(), "_factory_before")
        self._handler_before = _first_open(self.running.loop.get_exception_handler(), "_handler_before")
        self.running.loop.set_task_factory(self.make_task)
        self.running.loop.set_exception_handler(self.on_error)

    def remove(self) -> None:
        """Cancel the tasks that ended calls have started, and take the hooks out.

        Hooks with other hooks in front of them stay and only pass on; another bridge takes them out when it is left.
        """
        self._open = False
        for task in tuple(self._late_tasks):
            task.cancel()
        if self.running.loop.get_task_factory() == self.make_task:
            self.running.loop.set_task_factory(_first_open(self._factory_before, "_factory_before"))
        if self.running.loop.get_exception_handler() == self.on_error:
            self.running.loop.set_exception_handler(_first_open(self._handler_before, "_handler_before"))

    def make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coro: Any,
        context: contextvars.Context | None = None,
        **more: Any,
    ) -> "asyncio.Future[Any]":
        """Make a task: the loop's task factory."""
        call = CURRENT.get() if context is None else context.get(CURRENT)
        if not self._open or call is None or call.owner is not self or not isinstance(coro, Coroutine):
            return self._plain(loop, coro, context, **more)
        coro = coro if isinstance(coro, GuardedCoroutine) else self.guarded(coro, call)
        task = self._plain(loop, coro, context, **more)
        if isinstance(task, asyncio.Task):
            self._attribute(task, call)
        return task

    def _plain(
        self, loop: asyncio.AbstractEventLoop, coro: Any, context: contextvars.Context | None, **more: Any
    ) -> "asyncio.Future[Any]":
        if context is not None:
            more["context"] = context
        if self._factory_before is not None:
            made: asyncio.Future[Any] = self._factory_before(loop, coro, **more)
            return made
        return asyncio.Task(coro, loop=loop, **more)

    def _attribute(self, task: "asyncio.Task[Any]", call: Call) -> None:
        if not (call.ended.is_set() and call.all_ended.is_set()):
            call.adopt(task)
            return
        # A timer, a server or a callback that the ended call left behind has started it.
        self._late_tasks.add(task)
        task.add_done_callback(self._late_tasks.discard)
        may_outlive = call.keeps_tasks or self.settings.on_leak is OnLeak.WARN
        if not (may_outlive or call.late_tasks_noted):
            call.late_tasks_noted = True  # once, not for each connection of a server
            self.note(
                Misuse.LEAKED,
                call.name,
                f"it has ended, and still starts tasks, {task.get_name()} now; start what is to outlive its call with "
                "call_keeping or iterate",
            )

    def guarded(self, coro: Coroutine[Any, Any, Any], call: Call) -> GuardedCoroutine:
        """Return the coroutine of one of the call's tasks, wrapped such that it cannot end the loop."""
        name = call.name

        def exited(error: BaseException) -> bool:
            self.note(Misuse.EXITED, name, f"raised {described(error)}")
            # On the host's loop in the main thread it is the host's own Ctrl-C, which happened to arrive in our code.
            ctrl_c = isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()
            if self.running.foreign and ctrl_c:
                call.end_by_interrupt(error)
            return self.running.foreign and ctrl_c

        def stepped(seconds: float) -> None:
            if seconds > self.settings.slow_step:
                self.note(Misuse.BLOCKED, name, f"one step kept the event loop for {seconds:.2f} s")

        return GuardedCoroutine(coro, call=call, exited=exited, stepped=stepped, cancelled=call.note_cancelled_error)

    def on_error(self, loop: asyncio.AbstractEventLoop, context: Context) -> None:
        """Handle an error that no code waits for: the loop's exception handler."""
        task = context.get("task") or context.get("future")
        handle = context.get("handle")
        call = _call_of(task) or _call_of(handle)
        ours = call.owner is self if call is not None else not self.running.foreign  # another bridge is told as well
        if self._open and ours:
            what = f"{context.get('message')}: {described(context.get('exception'))}"
            self.note(Misuse.CRASHED, call.name if call is not None else "unknown", what)
        if self._handler_before is not None:
            self._handler_before(loop, context)
        elif self.running.foreign:  # the host is told of background errors, too
            loop.default_exception_handler(context)


def _first_open(hook: Any, before: str) -> Any:
    """Return the first in a chain of hooks that does not belong to a bridge that was left."""
    owner = getattr(hook, "__self__", None)
    while isinstance(owner, LoopHooks) and not owner._open:
        hook = getattr(owner, before)
        owner = getattr(hook, "__self__", None)
    return hook


def _call_of(item: object) -> Call | None:
    """Return the call that a task or a callback belongs to."""
    if isinstance(item, asyncio.Task):
        coro = item.get_coro()  # a task does not show its context before Python 3.12
        return coro.call if isinstance(coro, GuardedCoroutine) else None
    context = getattr(item, "_context", None)
    return context.get(CURRENT) if isinstance(context, contextvars.Context) else None
