"""Streamed answers of FakeSGLang: server-sent events, whole or in parts, and what can go wrong half-way."""

import json
from typing import Final

import trio

from ._fake_http import head_of, reset
from ._fake_plan import Fault
from ._fake_running import Running

_DONE: Final = b"data: [DONE]\n\n"
_HALF_WAY: Final = {Fault.RESET_IN_BODY, Fault.SHORT_BODY, Fault.SHORT_CHUNKED, Fault.HANG_IN_BODY}


def _event(value: object) -> bytes:
    return b"data: %b\n\n" % json.dumps(value).encode()


class EventStream:
    """One streamed answer on its way. ``incremental``: each event has only what is new."""

    def __init__(self, stream: trio.abc.Stream, running: Running, *, incremental: bool, fault: Fault | None) -> None:
        self._stream = stream
        self._running = running
        self._incremental = incremental
        self._fault = fault
        self._sent = 0

    async def begin(self, version: str) -> None:
        """Send the head, and an event for each token that there is at once."""
        headers = {"content-type": "text/event-stream; charset=utf-8", "transfer-encoding": "chunked"}
        await self._stream.send_all(head_of(200, headers))
        await self._tokens(self._running.so_far, version)

    async def end(self, version: str) -> bool:
        """Send the remaining tokens, the last event and the end; whether the connection may carry another request."""
        count = self._running.so_far if self._running.aborted else self._running.wanted
        if self._fault in _HALF_WAY:
            await self._tokens(count // 2, version)
            if self._fault is Fault.HANG_IN_BODY:
                await trio.sleep_forever()
            if self._fault is Fault.RESET_IN_BODY:
                await reset(self._stream)
            return False
        await self._tokens(count - 1, version)
        last = _event(self._running.answer(version, self._fault, since=self._since))
        await self._chunk(last[:-20] + b"\n\n" if self._fault is Fault.MALFORMED_JSON else last)
        if self._fault is not Fault.NO_DONE:
            await self._chunk(_DONE)
        await self._stream.send_all(b"0\r\n\r\n")
        return True

    @property
    def _since(self) -> int:
        return self._sent if self._incremental else 0

    async def _tokens(self, count: int, version: str) -> None:
        while self._sent < count:
            await self._chunk(_event(self._running.part(self._sent + 1, version, since=self._since)))
            self._sent += 1

    async def _chunk(self, data: bytes) -> None:
        # In two pieces: an event does not arrive as it was sent.
        middle = len(data) // 2
        for piece in (data[:middle], data[middle:]):
            await self._stream.send_all(b"%x\r\n%b\r\n" % (len(piece), piece))
