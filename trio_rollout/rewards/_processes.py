"""Scorer processes: a synchronous scorer made async by processes that can be killed.

There are two forms. ``in_process`` starts a process for each call and needs no owner, because nothing outlives the call.
``open_scorer_processes`` owns processes and keeps them between calls. Both end a process together with everything that it
started, also in other sessions, and reap it, before a cancelled call goes on (``_worker.py`` says how). Neither uses
``multiprocessing`` or ``trio-parallel``: see docs/decisions/0006-scorer-processes-have-two-forms.md and
docs/decisions/0039-scorer-processes-stay-our-own.md.

A reply is data and bounded: a scorer process runs code that may be the policy's, and can't run any here.
"""

import contextlib
import inspect
import json
import os
import pickle
import signal
import subprocess  # ruff: ignore[suspicious-subprocess-import]  for PIPE
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, final

import attrs
import numpy as np
import trio

from .._core.checks import whole
from .._core.scores import shown
from .._util.arguments import refuse, require_callable, require_trio
from .._util.process_tree import kill_descendants
from .._util.threads import scorer_name
from ..errors import RewardError
from ._worker import LENGTH, REPLY_LIMIT

T = TypeVar("T")
R = TypeVar("R")

REAP_LIMIT = 5.0
"""Seconds that a process may take to exit after SIGKILL. Longer means that the kernel holds it, for example at a dead disk."""
_KEEPER_S = 1.0
"""Seconds that a keeper may take to end what is below it before the host helps: the scorer may have stopped the keeper."""

_CHUNK = 1 << 16
_WORKER = str(Path(__file__).with_name("_worker.py"))


def pickled_setup(fn: Callable[[Any], object]) -> bytes:
    """Return the first message for a scorer process: the function, and how to import it.

    Raises:
      SettingsTypeError: it is no synchronous function.
      RewardError: another process can't find the function by name.
    """
    require_callable("fn", fn, "a synchronous function")
    if inspect.iscoroutinefunction(inspect.unwrap(fn)):
        raise refuse("fn", fn, "a synchronous function; an async one needs no process around it")
    try:
        pickled = pickle.dumps(fn)
    except Exception as error:
        raise RewardError(
            f"{fn!r} can't be sent to a process, because it must be importable by name (no lambda, no function inside a "
            f"function): {error}"
        ) from error
    main_path = getattr(sys.modules["__main__"], "__file__", None) if b"__main__" in pickled else None
    search = [entry or str(Path.cwd()) for entry in sys.path]
    return pickle.dumps({"fn": pickled, "sys_path": search, "main_path": main_path and str(Path(main_path).absolute())})


@final
@attrs.frozen
class Reply:
    """A process's reply: a value, an array, the scorer's process id, or the scorer's error (classes, message, traceback)."""

    kind: str
    content: Any

    def unwrap(self, what: str = "the scorer raised") -> Any:
        """Return the value, or raise a RewardError for the scorer's error, with the scorer's traceback as a note."""
        if self.kind == "array":
            return np.asarray(self.content)
        if self.kind != "error":
            return self.content
        classes, message, trace = self.content
        error = RewardError(f"{what}: {classes[0].rpartition('.')[2]}: {message}", raised=tuple(classes))
        error.add_note(f"In the scorer's process:\n{trace}")
        raise error


def parsed(body: bytes, number: int) -> Reply:
    """Return the reply in a message: the one to the request of this number, 0 for the setup.

    Raises:
      ValueError: the message is no such reply; says what was seen.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{body[:60]!r} is not JSON: {error}") from error
    match found:
        case [int(), "error", [*classes], str(), str()] if classes and all(isinstance(name, str) for name in classes):
            reply = Reply("error", found[2:])
        case [0, "ready", int() as content] if number == 0:
            reply = Reply("ready", content)
        case [int(), "value", content] if number > 0:
            reply = Reply("value", content)
        case [int(), "array", [*content]] if number > 0 and all(isinstance(item, int | float) for item in content):
            reply = Reply("array", content)
        case _:
            raise ValueError(f"got {shown(found)}")
    if found[0] != number:
        raise ValueError(f"the reply to request {found[0]}, wanted: to {number}")
    return reply


@final
@attrs.define(eq=False, repr=False)
class ScorerProcess:
    """A running keeper with a scorer below it. Its starter must ``end`` it."""

    _keeper: trio.Process
    _stdin: trio.abc.SendStream
    _stdout: trio.lowlevel.FdStream
    _lifeline: int
    """The end of a pipe that the keeper watches: the keeper ends the scorer when it is closed, also by the host's own death."""
    pid: int = attrs.field(init=False)
    """The scorer's process id as the process says, for errors only."""
    _requests: int = attrs.field(default=0, init=False)
    _killed: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self.pid = self._keeper.pid

    @property
    def is_dead(self) -> bool:
        """True once the process has ended, by itself or by ``kill``. Does not reap it: its id must not be reused yet."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self._killed or os.waitid(os.P_PID, self._keeper.pid, options) is not None

    async def ask(self, request: bytes) -> Reply:
        """Send the setup, later one pickled value a call, and return the reply.

        Blocks until the reply is there. Cancelled, or if the process dies or replies with something else, no process is left.

        Raises:
          RewardError: the process died, or its reply is malformed.
        """
        try:
            async with contextlib.AsyncExitStack() as on_failure:
                on_failure.push_async_callback(self.end)
                reply = parsed(await self._exchanged(request), self._requests)
                on_failure.pop_all()
        except (trio.BrokenResourceError, trio.ClosedResourceError, EOFError) as error:
            raise RewardError(
                f"the scorer's process {self.pid} died while it was asked, exit status {self._keeper.returncode}"
            ) from error
        except ValueError as error:
            raise RewardError(
                f"the scorer's process {self.pid} sent a malformed reply and was ended: {error}"
            ) from error
        self._requests += 1
        if reply.kind == "ready":
            self.pid = reply.content
        return reply

    def kill(self) -> None:
        """Have the process killed with everything that it started; ``end`` must follow. May be repeated."""
        if not self._killed:
            self._killed = True
            os.close(self._lifeline)

    async def end(self) -> None:
        """Kill the process with everything that it started, and reap it. Shielded, bounded by ``REAP_LIMIT``. May be repeated.

        A keeper that was stopped is continued, and what is below it is killed here as well.
        """
        self.kill()
        with trio.move_on_after(REAP_LIMIT, shield=True):
            while self._keeper.returncode is None:
                with trio.move_on_after(_KEEPER_S):
                    await self._keeper.wait()
                    break
                kill_descendants(self._keeper.pid)
                self._keeper.send_signal(signal.SIGCONT)
            await trio.aclose_forcefully(self._stdin)
            await trio.aclose_forcefully(self._stdout)

    async def _exchanged(self, request: bytes) -> bytes:
        await self._stdin.send_all(LENGTH.pack(len(request)) + request)
        (length,) = LENGTH.unpack(await self._received(LENGTH.size))
        if length > REPLY_LIMIT:
            raise ValueError(f"a reply of {length} bytes, allowed: {REPLY_LIMIT}")
        return await self._received(length)

    async def _received(self, length: int) -> bytes:
        received = bytearray()
        while len(received) < length:
            received += await self._chunk(length - len(received))
        return bytes(received)

    async def _chunk(self, at_most: int) -> bytes:
        chunk = await self._stdout.receive_some(min(_CHUNK, at_most))
        if not chunk:
            raise EOFError
        return bytes(chunk)


async def start_scorer(setup: bytes) -> ScorerProcess:
    """Start a process and load the scorer in it. The caller must ``end`` it.

    Blocks until the scorer is loaded. Cancelled or failed, no process is left.

    Raises:
      RewardError: the process can't be started, or the scorer can't be loaded there.
    """
    # The name __mp_main__ would not do as a test: it exists in every program that has imported multiprocessing.
    if getattr(sys.modules["__main__"], "__file__", None) == _WORKER:
        raise RewardError(
            "a scorer process is about to start scorer processes: guard what your script runs by "
            "'if __name__ == \"__main__\":'"
        )
    worker = await _start_process()
    reply = await worker.ask(setup)
    if reply.kind == "error":
        await worker.end()
    reply.unwrap("the scorer can't be loaded in another process")
    return worker


async def _start_process() -> ScorerProcess:
    """Start it in a new session: a terminal's Ctrl-C reaches only the parent."""
    lifeline, ours = os.pipe()
    with contextlib.ExitStack() as always, contextlib.ExitStack() as on_failure:
        always.callback(os.close, lifeline)
        on_failure.callback(os.close, ours)
        command = [sys.executable, _WORKER, str(lifeline)]
        try:
            process = await trio.lowlevel.open_process(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[lifeline],
                start_new_session=True,
            )
        except OSError as error:
            raise RewardError(f"a scorer process can't be started: {error}") from error
        on_failure.pop_all()
    if process.stdin is None or not isinstance(process.stdout, trio.lowlevel.FdStream):
        raise AssertionError("started without pipes")
    return ScorerProcess(process, process.stdin, process.stdout, ours)


@final
@attrs.define(eq=False, repr=False)
class InProcess(Generic[T, R]):
    """An async scorer made by ``in_process``: call it like the function, with ``await``."""

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
        """Run the function in a new process.

        Blocks until one of ``workers`` slots is free and the function has returned. Cancelled, the process and everything that
        it started are killed and reaped before Cancelled goes on.

        Raises:
          RewardError: the function raised, can't be loaded in another process, or its process died or sent no valid reply.
        """
        request = pickle.dumps(value)
        async with self._slots, contextlib.AsyncExitStack() as stack:
            worker = await start_scorer(self._setup)
            stack.push_async_callback(worker.end)
            reply = await worker.ask(request)
        return cast(R, reply.unwrap())


def in_process(fn: Callable[[T], R], *, workers: int = 2) -> InProcess[T, R]:
    """Make a synchronous scorer async: at most ``workers`` calls at once, each in a new process.

    A start costs some tenths of a second of processor time, including the imports of the scorer's module.
    ``open_scorer_processes`` avoids that by keeping processes. The function must be importable by name; its argument is
    pickled. Its result is what a reward may be, or numbers, texts, None, and lists and mappings of them, in at most 16 MiB of
    JSON; the process can't run code here. A script that defines the function must guard what it runs by
    ``if __name__ == "__main__":``.

    Raises:
      RewardError: the function can't be sent to a process.
      SettingsError: ``workers`` is out of its range.
    """
    return InProcess(fn, workers=workers)


@final
@attrs.define(eq=False, repr=False)
class ScorerProcesses(Generic[T, R]):
    """An async scorer made by ``open_scorer_processes``: call it like the function, with ``await``.

    Invariant: a process that has loaded its scorer is in ``_owned`` until it has been reaped, and in ``_idle`` as well while it
    has no request. So ``_end`` finds all processes.
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
        """The ids of the processes that are alive now."""
        return tuple(sorted(worker.pid for worker in self._owned if not worker.is_dead))

    def __repr__(self) -> str:
        return (
            f"<scorer_processes({scorer_name(self._fn)}): {self._slots.borrowed_tokens} of {self.workers} running, "
            f"{len(self.pids)} alive>"
        )

    async def __call__(self, value: T, /) -> R:
        """Run the function in one of the processes.

        Blocks until a process is free and the function has returned. Cancelled, that process and everything that it started are
        killed and reaped before Cancelled goes on; a later call starts another process.

        Raises:
          RewardError: the function raised, its process died or sent no valid reply, or the processes are closed.
        """
        request = pickle.dumps(value)
        async with self._slots:
            worker = await self._idle_worker() or await self._started()
            with contextlib.ExitStack() as on_failure:
                on_failure.callback(self._owned.discard, worker)
                reply = await worker.ask(request)  # a process that does not reply is gone
                on_failure.pop_all()
            self._idle.append(worker)
        return cast(R, reply.unwrap())

    async def _idle_worker(self) -> ScorerProcess | None:
        """Return an idle process that is alive. Reap those that were killed while idle, for example for want of memory."""
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


@contextlib.asynccontextmanager
async def open_scorer_processes(fn: Callable[[T], R], *, workers: int = 2) -> AsyncGenerator[ScorerProcesses[T, R]]:
    """Make a synchronous scorer async: at most ``workers`` calls at once, in processes that are kept between calls.

    Entering blocks until the first process has loaded the scorer. The others are started when they are needed, and a killed
    process is replaced then. Leaving kills and reaps all of them; a call that is still running gets a RewardError. The
    conditions of ``in_process`` for the function hold here, too.

    Raises:
      RewardError: the function can't be sent to a process, or loaded there.
      SettingsError: ``workers`` is out of its range.
    """
    require_trio("open_scorer_processes")
    processes = ScorerProcesses(fn, workers=workers)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(processes._end)
        processes._idle.append(await processes._started())
        yield processes
