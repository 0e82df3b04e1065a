"""A coroutine under guard: what ends a process becomes an exception, and a step that keeps the loop is noted.

A SystemExit in a task goes straight through ``run_forever``: it ends the loop's thread, and everybody who waits for it hangs.
It is a class and not an ``async def`` around the coroutine because a task that is cancelled before its first step must
reach the coroutine itself, or Python warns that it was never awaited.

The loop's hooks: which task belongs to which call, and what nobody was there to see.

Owns, on the loop, the task factory and the exception handler, both chained to what was there before. On a foreign loop only
tasks of our calls are touched. Everything runs on the loop's thread.
"""

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Final, final

import attrs

from ._account import Offence
from ._call import CURRENT, Call
from ._errors import AsyncioExit, described

_CODES: Final = frozenset({"cr_await", "cr_code", "cr_frame", "cr_origin", "cr_running", "cr_suspended"})


@final
class Guarded(Coroutine[Any, Any, Any]):
    """Behaves like ``coro``; ``owner`` is whose it is.

    ``exited(error)`` is told of a SystemExit or KeyboardInterrupt and says whether it is to go on as it is; ``stepped(seconds)``
    of every step, ``cancelled(error)`` of every CancelledError that goes in. None of them may raise.
    """

    def __init__(
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        owner: object,
        exited: Callable[[BaseException], bool],
        stepped: Callable[[float], None],
        cancelled: Callable[[BaseException], None],
    ) -> None:
        self._coro = coro
        self.owner = owner
        self._exited = exited
        self._stepped = stepped
        self._cancelled = cancelled
        self.__name__ = getattr(coro, "__name__", type(coro).__name__)
        self.__qualname__ = getattr(coro, "__qualname__", self.__name__)

    def __getattr__(self, name: str) -> Any:
        if name in _CODES:  # what asyncio's own reprs and stack dumps read
            return getattr(self._coro, name)
        raise AttributeError(name)

    def __await__(self) -> "Guarded":
        return self

    def __iter__(self) -> "Guarded":
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        """One step."""
        return self._step(self._coro.send, value)

    def throw(self, kind: Any, value: BaseException | object = None, traceback: TracebackType | None = None) -> Any:
        """One step that begins with an exception."""
        error = kind if isinstance(kind, BaseException) else value if isinstance(value, BaseException) else kind()
        if isinstance(error, asyncio.CancelledError):
            self._cancelled(error)
        return self._step(self._coro.throw, error if traceback is None else error.with_traceback(traceback))

    def close(self) -> None:
        """Close it."""
        self._coro.close()

    def _step(self, step: Callable[[Any], Any], value: Any) -> Any:
        begun = time.perf_counter()
        try:
            return step(value)
        except (SystemExit, KeyboardInterrupt) as error:
            if self._exited(error):
                raise
            raise AsyncioExit(f"{self.__qualname__}: raised {described(error)}") from error
        finally:
            self._stepped(time.perf_counter() - begun)


Blame = Callable[[Offence, str, str], None]
"""Told of an offence, the function's name and what happened. On the loop's thread."""

Context = dict[str, Any]


@final
@attrs.define(eq=False)
class Hooks:
    """Installed on one loop while a bridge is open."""

    loop: asyncio.AbstractEventLoop
    blame: Blame
    slow_step: float
    foreign: bool
    """The loop is the host's: its own handler is told of background errors, too."""
    may_outlive: bool
    """Tasks may outlive their call."""
    _open: bool = attrs.field(default=False, init=False)
    _factory_before: Any = attrs.field(default=None, init=False)
    _handler_before: Any = attrs.field(default=None, init=False)
    _strays: "set[asyncio.Task[Any]]" = attrs.field(factory=set, init=False)

    def install(self) -> None:
        """Put them in."""
        self._open = True
        self._factory_before = _open_one(self.loop.get_task_factory(), "_factory_before")
        self._handler_before = _open_one(self.loop.get_exception_handler(), "_handler_before")
        self.loop.set_task_factory(self.make_task)
        self.loop.set_exception_handler(self.on_error)

    def remove(self) -> None:
        """Cancel what was started by calls that were over, and take them out.

        If somebody has chained to them meanwhile, they stay and only pass on; another bridge takes them out when it is left.
        """
        self._open = False
        for task in tuple(self._strays):
            task.cancel()
        if self.loop.get_task_factory() == self.make_task:
            self.loop.set_task_factory(_open_one(self._factory_before, "_factory_before"))
        if self.loop.get_exception_handler() == self.on_error:
            self.loop.set_exception_handler(_open_one(self._handler_before, "_handler_before"))

    def make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coro: Any,
        context: contextvars.Context | None = None,
        **more: Any,
    ) -> "asyncio.Future[Any]":
        """The task factory."""
        call = CURRENT.get() if context is None else context.get(CURRENT)
        if not self._open or call is None or call.home is not self or not isinstance(coro, Coroutine):
            return self._plain(loop, coro, context, **more)
        coro = coro if isinstance(coro, Guarded) else self.guarded(coro, call)
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
        if not (call.ended.is_set() and call.quiet.is_set()):
            call.adopt(task)
            return
        # A timer, a server or a callback that the call left behind has started it: nobody waits for that call any more.
        self._strays.add(task)
        task.add_done_callback(self._strays.discard)
        if not (self.may_outlive or call.keeps or call.blamed):
            call.blamed = True  # once, not for each connection of a server
            self.blame(
                Offence.LEAKED,
                call.name,
                f"what it left behind still starts tasks, {task.get_name()} now; what is to outlive its call is for "
                "call_keeping or iterate",
            )

    def guarded(self, coro: Coroutine[Any, Any, Any], call: Call) -> Guarded:
        """The coroutine of one of its tasks, such that it can't end the loop."""
        name = call.name

        def exited(error: BaseException) -> bool:
            self.blame(Offence.EXITED, name, f"raised {described(error)}")
            # On the host's loop in the main thread it is the host's own Ctrl-C, which happened to arrive in our code.
            ctrl_c = isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()
            if self.foreign and ctrl_c:
                call.interrupted(error)
            return self.foreign and ctrl_c

        def stepped(seconds: float) -> None:
            if seconds > self.slow_step:
                self.blame(Offence.BLOCKED, name, f"one step kept the event loop for {seconds:.2f} s")

        return Guarded(coro, owner=call, exited=exited, stepped=stepped, cancelled=call.thrown)

    def on_error(self, loop: asyncio.AbstractEventLoop, context: Context) -> None:
        """The exception handler."""
        task = context.get("task") or context.get("future")
        handle = context.get("handle")
        call = _call_of(task) or _call_of(handle)
        ours = call.home is self if call is not None else not self.foreign  # another bridge is told as well
        if self._open and ours:
            what = f"{context.get('message')}: {described(context.get('exception'))}"
            self.blame(Offence.CRASHED, call.name if call is not None else "unknown", what)
        if self._handler_before is not None:
            self._handler_before(loop, context)
        elif self.foreign:
            loop.default_exception_handler(context)


def _open_one(hook: Any, before: str) -> Any:
    """The first in a chain of hooks that is no left bridge's."""
    owner = getattr(hook, "__self__", None)
    while isinstance(owner, Hooks) and not owner._open:
        hook = getattr(owner, before)
        owner = getattr(hook, "__self__", None)
    return hook


def _call_of(item: object) -> Call | None:
    """Whose task, or whose callback, this is."""
    if isinstance(item, asyncio.Task):
        owner = getattr(item.get_coro(), "owner", None)  # a task does not show its context before Python 3.12
        return owner if isinstance(owner, Call) else None
    context = getattr(item, "_context", None)
    return context.get(CURRENT) if isinstance(context, contextvars.Context) else None
