"""One scorer process: started, asked, killed and reaped. Whoever starts one must end it."""

import contextlib
import os
import pickle
import signal
import subprocess  # ruff: ignore[suspicious-subprocess-import]  for PIPE
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import attrs
import trio

from ..errors import RewardError
from ._worker import LENGTH

REAP_LIMIT = 5.0
"""Seconds that a process may take to be gone after SIGKILL; longer means that the kernel holds it (a dead disk, say)."""

_CHUNK = 1 << 16
_WORKER = str(Path(__file__).with_name("_worker.py"))


def pickled_setup(fn: Callable[[Any], object]) -> bytes:
    """What a scorer process is started with.

    Raises:
      RewardError: the function can't be found by name from another process.

    """
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
    """What came back from a process: a value, or what the scorer raised as (type, message, traceback)."""

    kind: str
    content: Any

    def unwrap(self, what: str = "the scorer raised") -> Any:
        """The value.

        Raises:
          RewardError: in place of what the scorer raised, with its traceback as a note.

        """
        if self.kind != "error":
            return self.content
        type_name, message, trace = self.content
        error = RewardError(f"{what}: {type_name}: {message}")
        error.add_note(f"In the scorer's process:\n{trace}")
        raise error


@final
@attrs.define(eq=False, repr=False)
class ScorerProcess:
    """A running process with a scorer in it."""

    _process: trio.Process
    _lifeline: int
    """The end of a pipe that the process watches: it dies when this is closed, also by this process's own death."""
    _killed: bool = False

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_dead(self) -> bool:
        """Whether it has ended, by itself or by ``kill``. Asking does not reap it: its group's id must not be reused yet."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self._killed or os.waitid(os.P_PID, self.pid, options) is not None

    async def load(self, setup: bytes) -> None:
        """Load the scorer, before anything is asked.

        Cancelled or failed, nothing of the process is left.

        Raises:
          RewardError: it can't be loaded there.

        """
        reply = await self.ask(setup)
        if reply.kind == "error":
            await self.end()
        reply.unwrap("the scorer can't be loaded in a process of its own")

    async def ask(self, request: bytes) -> Reply:
        """The scorer's reply to one pickled value.

        Blocks until it is there. Cancelled, or the process gone, nothing of it is left.

        Raises:
          RewardError: the process died.

        """
        try:
            async with contextlib.AsyncExitStack() as on_failure:
                on_failure.push_async_callback(self.end)
                body = await self._exchanged(request)
                on_failure.pop_all()
        except (trio.BrokenResourceError, trio.ClosedResourceError, EOFError) as error:
            raise RewardError(
                f"the scorer's process {self.pid} died while it was asked, exit status {self._process.returncode}"
            ) from error
        return Reply(*pickle.loads(body))

    def kill(self) -> None:
        """Kill it with all that it started; ``end`` must follow. May be repeated."""
        if not self._killed:
            self._killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            os.close(self._lifeline)

    async def end(self) -> None:
        """Kill it with all that it started, and reap it. Shielded, bounded by ``REAP_LIMIT``. May be repeated."""
        self.kill()
        with trio.move_on_after(REAP_LIMIT, shield=True):
            await self._process.wait()
            await trio.aclose_forcefully(self._stdin)
            await trio.aclose_forcefully(self._stdout)

    async def _exchanged(self, request: bytes) -> bytes:
        await self._stdin.send_all(LENGTH.pack(len(request)) + request)
        (length,) = LENGTH.unpack(await self._received(LENGTH.size))
        return await self._received(length)

    async def _received(self, length: int) -> bytes:
        received = await self._chunk(length)
        while len(received) < length:
            received += await self._chunk(length - len(received))
        return bytes(received)

    async def _chunk(self, at_most: int) -> bytearray:
        chunk = await self._stdout.receive_some(min(_CHUNK, at_most))
        if not chunk:
            raise EOFError
        return bytearray(chunk)

    @property
    def _stdin(self) -> trio.abc.SendStream:
        if self._process.stdin is None:
            raise AssertionError("started without a pipe")
        return self._process.stdin

    @property
    def _stdout(self) -> trio.abc.ReceiveStream:
        if self._process.stdout is None:
            raise AssertionError("started without a pipe")
        return self._process.stdout


async def start_scorer(setup: bytes) -> ScorerProcess:
    """Start a process and load the scorer in it. The caller must ``end`` it.

    Blocks until it has loaded. Cancelled or failed, no process is left.

    Raises:
      RewardError: it can't be started, or the scorer can't be loaded there.

    """
    # Not "is there an __mp_main__": that name exists in every program that has imported multiprocessing.
    if getattr(sys.modules["__main__"], "__file__", None) == _WORKER:
        raise RewardError(
            "a scorer process is about to start scorer processes of its own: guard what your script runs by "
            "'if __name__ == \"__main__\":'"
        )
    worker = await _open()
    await worker.load(setup)
    return worker


async def _open() -> ScorerProcess:
    """In a session of its own, so that a terminal's Ctrl-C reaches the parent alone, and ``end`` reaches all children."""
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
    return ScorerProcess(process, ours)
