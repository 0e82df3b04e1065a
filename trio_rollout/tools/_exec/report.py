"""Output cut into pieces for a display: no piece ends inside a code point, and no byte is lost. Pure.

What listeners are told of one session: its beginning, its output in pieces, its end. One beginning, one end.

Owns the transcript: everything the session has written, head and tail.
"""

import logging
from collections.abc import Callable, Iterator
from typing import final

import attrs
import trio

from .._commands.captured import HeadTailBuffer
from .._commands.command import Command
from .._limits import ExecLimits
from .values import CommandBegin, CommandEnd, OutputDelta, SessionEvent, SessionListener, TerminalInteraction

_ASCII_END = 0x80
# From which lead byte on a sequence has how many bytes; what is above 4 is no UTF-8, and complete as it is.
_LEADS = ((0xF8, 1), (0xF0, 4), (0xE0, 3), (0xC0, 2))


def complete_length(data: bytes | bytearray) -> int:
    """How much of ``data`` does not end in the middle of a UTF-8 sequence. Bytes that are no UTF-8 are complete."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte < _ASCII_END:
            break
        for lead, needed in _LEADS:
            if byte >= lead:  # does its sequence end within the data?
                return len(data) if back >= needed else len(data) - back
    return len(data)


@final
@attrs.define(eq=False, repr=False)
class Utf8Splitter:
    """Cuts a stream into pieces of at most ``limit`` (>= 4) bytes; waits for the rest of an incomplete code point."""

    limit: int
    _rest: bytearray = attrs.field(factory=bytearray, init=False)

    def feed(self, chunk: bytes | bytearray) -> Iterator[bytes]:
        """The pieces that are complete now."""
        self._rest += chunk
        while length := complete_length(self._rest[: self.limit]):
            yield bytes(self._rest[:length])
            del self._rest[:length]

    def flush(self) -> bytes:
        """What is left at the end of the stream, complete or not."""
        rest = bytes(self._rest)
        self._rest.clear()
        return rest


_log = logging.getLogger("trio_rollout.tools")


@final
@attrs.define(eq=False, repr=False)
class SessionReport:
    """The story of one session, told to its listeners as it happens."""

    process_id: int
    call_id: str
    command: Command
    limits: ExecLimits
    listeners: tuple[SessionListener, ...]
    on_output: Callable[[], None] = lambda: None
    _transcript: HeadTailBuffer = attrs.field(init=False)
    _splitter: Utf8Splitter = attrs.field(init=False)
    _deltas: int = attrs.field(default=0, init=False)
    _began: float | None = attrs.field(default=None, init=False)
    _ended: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._transcript = HeadTailBuffer(self.limits.session_bytes)
        self._splitter = Utf8Splitter(self.limits.delta_bytes)

    def begin(self) -> None:
        """The process runs."""
        self._began = trio.current_time()
        self._tell(
            CommandBegin(
                call_id=self.call_id, process_id=self.process_id, command=self.command.argv, cwd=self.command.cwd
            )
        )

    def output(self, chunk: bytes | bytearray) -> None:
        """It has written something."""
        self._transcript.append(chunk)
        self.on_output()
        for piece in self._splitter.feed(chunk):
            self._piece(piece)

    def output_end(self) -> None:
        """It won't write any more."""
        if rest := self._splitter.flush():
            self._piece(rest)

    def _piece(self, piece: bytes) -> None:
        if self._deltas < self.limits.max_deltas:
            self._deltas += 1
            self._tell(OutputDelta(call_id=self.call_id, process_id=self.process_id, chunk=piece))

    def interaction(self, text: str) -> None:
        """Somebody wrote to it, or looked at it while it ran."""
        self._tell(TerminalInteraction(call_id=self.call_id, process_id=self.process_id, text=text))

    def end(self, exit_code: int, failure: str | None) -> None:
        """It is over. Told once, and only if its beginning was."""
        if self._ended or self._began is None:
            return
        self._ended = True
        said = self._transcript.rendered()
        if failure is not None:
            said = b"\n".join(part for part in (said, failure.encode()) if part)
        self._tell(
            CommandEnd(
                call_id=self.call_id,
                process_id=self.process_id,
                exit_code=exit_code if failure is None else -1,
                aggregated=said,
                failure=failure,
                duration=trio.current_time() - self._began,
            )
        )

    def _tell(self, event: SessionEvent) -> None:
        for listener in self.listeners:
            try:
                listener(event)
            except Exception:  # ruff: ignore[blind-except]  a watcher's error must not change what it watches
                _log.exception("a listener of exec sessions failed")
