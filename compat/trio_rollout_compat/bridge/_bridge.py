"""The bridge: asyncio functions called from Trio, with Trio's rules for cancellation and errors; and how one is opened.

``Bridge`` and everything else in this module runs on Trio's thread. It reaches the loop's thread only through
``RunningLoop.post``, and is reached from there only through ``RunningLoop.reply``.
"""

import asyncio
import contextlib
import contextvars
import enum
import functools
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, ParamSpec, TypeVar, final

import attrs
import sniffio
import trio

from trio_rollout.errors import SettingsError
from trio_rollout.lowlevel import Condition, open_service

from ._backends import AttachBackend, Backend, RunningLoop, ThreadBackend, answered
from ._call import Call, Ending, name_of
from ._cancel import LiveCalls
from ._errors import BridgeClosed, BridgeError, LeakedTasks, as_exception
from ._hooks import LoopHooks
from ._inloop import InLoopBackend
from ._portal import Portal, call_with_portal
from ._settings import BridgeSettings, BridgeStatistics, Misuse, OnLeak

P = ParamSpec("P")
T = TypeVar("T")


@final
@attrs.define(eq=False, repr=False)
class Bridge:
    """On Trio's thread: calls asyncio functions. Made by ``open_bridge``; belongs to the Trio run that opened it."""

    _running: RunningLoop
    settings: BridgeSettings
    _token: trio.lowlevel.TrioToken
    _calls: LiveCalls = attrs.field(init=False)
    _hooks: LoopHooks = attrs.field(init=False)
    _closed: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._calls = LiveCalls(self._running, self.settings)
        self._hooks = LoopHooks(self._running, self.settings, self._calls.note)

    def __repr__(self) -> str:
        return f"<Bridge to {self._running.describe}: {self.statistics()}>"

    async def call(self, fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an asyncio function on the bridge's loop and return its result.

        Blocks until the function has ended, and the tasks that it left running as ``BridgeSettings.on_leak`` says. Cancelled,
        the function gets an ``asyncio.CancelledError``, again and again until it ends; its ``finally`` blocks are awaited,
        together at most ``grace`` seconds. A function that has not ended then **goes on by itself**, is counted, and named in
        the log. Context variables are copied in, not back.

        Raises:
          AsyncioCancelled: the function ended with a CancelledError that the Trio side did not ask for.
          AsyncioExit: the function raised SystemExit or KeyboardInterrupt.
          LeakedTasks: the function left tasks running, and the policy is ERROR.
          BridgeClosed: the bridge was left, or the host's loop is closed.
          RuntimeError: the call was made from asyncio code, from outside of Trio, or from another Trio run.
          Exception: the function's own exception, as itself; exception groups whole.
        """
        return await self._call(fn, args, kwargs, keeps_tasks=False)

    async def call_keeping(self, fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Like ``call``, for a function that starts tasks which are to outlive it: a server, a client with its pool.

        These tasks go on whatever the policy is; the bridge cancels them when it is left.

        Raises:
          Exception: as ``call``, but not LeakedTasks.
        """
        return await self._call(fn, args, kwargs, keeps_tasks=True)

    async def call_with_portal(self, fn: Callable[[Portal], Awaitable[T]]) -> T:
        """Like ``call(fn, portal)``, with a portal back into Trio that can be used until the call is over.

        Raises:
          Exception: as ``call``.
        """
        return await call_with_portal(self.call, self._running, fn)

    async def _call(
        self, fn: Callable[..., Awaitable[T]], args: tuple[Any, ...], kwargs: dict[str, Any], *, keeps_tasks: bool
    ) -> T:
        self._refuse_misplaced()
        await trio.lowlevel.checkpoint_if_cancelled()
        call = self._begin(fn, args, kwargs, keeps_tasks=keeps_tasks)
        try:
            ending = await self._ending_of(call)
            left = await self._calls.sweep(call, give_up=self._give_up())
        finally:
            self._calls.live.discard(call)
        result: T = self._unwrapped(call, ending, left)
        return result

    async def _ending_of(self, call: Call) -> Ending:
        """Wait for the function's end. Cancelled, see the essay in ``_cancel``: this is where the exception is held back."""
        try:
            await call.ended.wait()
        except (trio.Cancelled, KeyboardInterrupt) as error:  # noqa: ASYNC103  see the last line
            ending = await self._stopped(call)  # noqa: ASYNC102  it shields and bounds itself
            if isinstance(error, KeyboardInterrupt) or ending is None or ending.cancelled or ending.swallowed:
                raise
            return ending  # noqa: ASYNC104  it had ended before the cancellation reached it: that is its result
        return call.ending or Ending(error=BridgeClosed(f"{call.name}: the bridge was left while it ran"))

    async def _stopped(self, call: Call) -> Ending | None:
        """Cancel the function and its tasks; return how it ended, None if it was abandoned."""
        give_up = self._give_up()
        await self._calls.stop(call, give_up=give_up)
        ending = call.ending
        if ending is not None:
            if ending.swallowed:
                self._calls.note(Misuse.SWALLOWED, call.name, f"returned {type(ending.value).__name__}")
            await self._calls.sweep(call, give_up=give_up)
        return ending

    def _begin(
        self, fn: Callable[..., Awaitable[Any]], args: tuple[Any, ...], kwargs: dict[str, Any], *, keeps_tasks: bool
    ) -> Call:
        context = contextvars.copy_context()
        self._running.prepare(context)
        call = Call(name_of(fn), fn, args, kwargs, self._running.reply, self._hooks, keeps_tasks)
        try:
            self._running.post(functools.partial(call.start, self._running.loop, context))
        except RuntimeError as error:
            raise BridgeClosed(f"{call.name}: {self._running.describe} is closed") from error
        self._calls.live.add(call)
        return call

    def _give_up(self) -> float:
        return trio.current_time() + self.settings.grace

    def _unwrapped(self, call: Call, ending: Ending, left: list[str]) -> Any:
        if ending.cancelled and self._closed:
            raise BridgeClosed(f"{call.name}: cancelled because the bridge was left")
        if ending.error is not None or ending.cancelled:
            raise as_exception(ending.error or asyncio.CancelledError(), call.name)
        if left and self.settings.on_leak is OnLeak.ERROR:
            raise LeakedTasks(f"{call.name} returned with {len(left)} tasks still running: {', '.join(left)}")
        return ending.value

    def _refuse_misplaced(self) -> None:
        """On any thread: raise RuntimeError unless this is Trio code of the run that opened the bridge."""
        try:
            token = trio.lowlevel.current_trio_token()
            inside = sniffio.current_async_library()
        except (RuntimeError, sniffio.AsyncLibraryNotFoundError):
            raise RuntimeError(
                "bridge.call: this is no Trio code. From another thread use trio.from_thread.run(bridge.call, fn); asyncio "
                "code awaits the function itself"
            ) from None
        if inside != "trio":
            raise RuntimeError(
                f"bridge.call: called from {inside} code, which can await the function itself; code that must go back into "
                "Trio uses trio_asyncio.trio_as_aio (in-loop backend) or the portal that it was given"
            )
        if token is not self._token:
            raise RuntimeError("bridge.call: this bridge belongs to another Trio run; open one in each")
        if self._closed:
            raise BridgeClosed("bridge.call: the bridge's block was left")

    def wrap(self, fn: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        """Return a Trio function whose call is ``call(fn, ...)``."""

        @functools.wraps(fn)
        async def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            return await self.call(fn, *args, **kwargs)

        return wrapped

    @asynccontextmanager
    async def iterate(
        self, fn: Callable[P, AsyncIterator[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> AsyncGenerator[AsyncIterator[T]]:
        """Iterate over an asyncio generator: ``async with bridge.iterate(fn, ...) as items: async for item in items``.

        One asyncio task runs the generator, from its first step to its last: leaving the block closes it there and waits for
        that, within the grace. A cancelled ``anext`` loses nothing: the next one gets the item.
        """
        wanted = asyncio.Event()
        feed = _Feed(lambda: self._running.post(wanted.set))
        make = functools.partial(fn, *args, **kwargs)
        pump = _pump(make, wanted, lambda item: self._running.reply(functools.partial(feed.deliver, item)))

        async def serve(*, task_status: trio.TaskStatus[None]) -> None:
            task_status.started()
            await self.call(pump)

        async with open_service(serve):  # leaving cancels the call, and that closes the generator
            yield feed

    def statistics(self) -> BridgeStatistics:
        """Return counts of this moment, and the misuse by kind and function. On any thread."""
        return self._calls.statistics()

    async def _enter(self) -> None:
        def hello() -> None:  # on the loop's thread
            self._hooks.install()
            self._calls.loop_thread = threading.get_ident()

        if not await answered(self._running, hello, self.settings.answer):
            raise BridgeError(f"{self._running.describe} did not answer within {self.settings.answer} s")

    async def _leave(self) -> None:
        """End every call that is still alive, abandoned ones too; at most the grace. The caller shields it."""
        self._closed = True
        give_up = self._give_up()
        async with trio.open_nursery() as nursery:
            for call in self._calls.everything():
                nursery.start_soon(self._end_at_leave, call, give_up)
        if not self._running.foreign:
            for call in self._calls.everything():
                self._running.post(call.unregister_tasks)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            await answered(self._running, self._hooks.remove, self.settings.again)

    async def _end_at_leave(self, call: Call, give_up: float) -> None:
        await self._calls.stop(call, give_up=give_up, everything=True)
        call.ended.set()  # a task that still waits for an abandoned call is told that the bridge is closed


_NOTHING: Final = object()


@attrs.frozen
class _Raised:
    """On any thread: the exception that a generator raised in place of the next item."""

    error: Exception


@final
@attrs.define(eq=False)
class _Feed:
    """On Trio's thread: asks an asyncio generator for one item at a time.

    One asyncio task drives the generator from its first step to its last, because a generator may hold an
    ``asyncio.timeout`` or a task group across its yields, and those belong to the task that entered them.
    """

    _ask: Callable[[], None]
    _asked: bool = attrs.field(default=False, init=False)
    _item: object = attrs.field(default=_NOTHING, init=False)
    _came: Condition = attrs.field(factory=Condition, init=False)

    def deliver(self, item: object) -> None:
        """Take the item that was asked for."""
        self._item = item
        self._came.notify()

    def __aiter__(self) -> "_Feed":
        return self

    async def __anext__(self) -> Any:
        """Wait for the next item. Cancelled, the item is not lost: the next call gets it."""
        if not self._asked:
            self._asked = True
            self._ask()
        await self._came.wait_until(lambda: self._item is not _NOTHING)
        item = self._item
        if isinstance(item, _Raised):
            self._item = _Raised(StopAsyncIteration())
            raise item.error
        self._item, self._asked = _NOTHING, False
        return item


def _pump(
    make: Callable[[], AsyncIterator[Any]], wanted: asyncio.Event, deliver: Callable[[object], None]
) -> Callable[[], Any]:
    """Return the function for the loop's thread: one item for each time that ``wanted`` is set; closes the generator."""

    async def pump() -> None:
        items = make()
        item: object = _NOTHING
        try:
            while not isinstance(item, _Raised):
                await wanted.wait()
                wanted.clear()
                try:
                    # With a default, anext crashes the interpreter if __anext__ raises StopIteration.
                    item = await anext(items)
                except Exception as error:  # ruff: ignore[blind-except]  it is raised where the item was asked for
                    item = _Raised(error)
                deliver(item)
        finally:
            if (aclose := getattr(items, "aclose", None)) is not None:
                await aclose()  # noqa: ASYNC102  asyncio code: the bridge bounds it

    pump.__module__, _, pump.__qualname__ = name_of(make).rpartition(".")  # its misuse is the generator's
    return pump


LoopFactory = Callable[[], asyncio.AbstractEventLoop]
_DEFAULTS: Final = BridgeSettings()


class BackendName(enum.Enum):
    """The kind of loop that asyncio code runs on."""

    ATTACH = "attach"
    """On a loop that the host owns and runs on another thread. The right one whenever there is such a loop."""
    THREAD = "thread"
    """On the bridge's own loop, on a separate thread. User code that blocks does not stall the engine."""
    IN_LOOP = "in-loop"
    """On a trio-asyncio loop in the engine's thread: exact under a virtual clock. **Changes stock asyncio in the whole
    process, for good**; see ``docs/embedding.md`` before choosing it."""


def _backend(
    name: BackendName, loop: asyncio.AbstractEventLoop | None, factory: LoopFactory | None, settings: BridgeSettings
) -> Backend:
    if (loop is not None) is not (name is BackendName.ATTACH):
        raise SettingsError(
            f"open_bridge: backend {name.value!r} with loop={loop!r}; a loop belongs to 'attach', which needs one"
        )
    if factory is not None and name is not BackendName.THREAD:
        raise SettingsError(f"open_bridge: backend {name.value!r} makes no loop, so loop_factory has no meaning")
    if loop is not None:
        return AttachBackend(loop, settings.answer)
    return ThreadBackend(factory, settings.grace) if name is BackendName.THREAD else InLoopBackend()


@asynccontextmanager
async def open_bridge(
    backend: BackendName | str | None = None,
    *,
    loop: asyncio.AbstractEventLoop | None = None,
    loop_factory: LoopFactory | None = None,
    settings: BridgeSettings = _DEFAULTS,
) -> AsyncGenerator[Bridge]:
    """Run asyncio code until the block is left. Open it outside of the engine that uses it.

    ``backend``: ``"attach"``, ``"thread"`` or ``"in-loop"``; without one it is attach if a ``loop`` is given, else thread.
    ``loop_factory``: for thread, such as ``uvloop.new_event_loop``.

    Entering blocks until the loop answers. Leaving cancels the calls that still run, and waits for them, for abandoned calls
    and for a loop of the bridge's own at most ``grace`` seconds each.

    Raises:
      SettingsError: the arguments do not fit each other.
      BridgeError: the host's loop does not answer, or in-loop was asked for where it cannot work.
    """
    try:
        name = BackendName(backend or (BackendName.THREAD if loop is None else BackendName.ATTACH))
    except ValueError as error:
        allowed = ", ".join(repr(item.value) for item in BackendName)
        raise SettingsError(f"open_bridge: backend {backend!r}, allowed: {allowed}") from error
    opened = _backend(name, loop, loop_factory, settings)

    async def serve(*, task_status: trio.TaskStatus[Bridge]) -> None:
        async with opened() as running:
            bridge = Bridge(running, settings, trio.lowlevel.current_trio_token())
            await bridge._enter()
            task_status.started(bridge)
            await trio.sleep_forever()

    async with open_service(serve, lambda bridge, _error: bridge._leave()) as bridge:
        yield bridge
