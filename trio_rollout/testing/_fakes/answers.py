"""The answers of FakeSGLang: of the requests that it runs, whole or streamed, and damaged by a fault in shape or content."""

import enum
import gzip
import json
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import attrs
import trio

from ..._http.server import (
    CONTINUE,
    EVENT_STREAM_HEADERS,
    LAST_CHUNK,
    ServerConnection,
    answer_head,
    chunk,
    event,
    whole_answer,
)
from .._sim.connection import SimStream
from .plan import Fault, Reply, Run


async def reset(stream: trio.abc.Stream) -> None:
    """Reset the connection, or close it if the stream knows no reset."""
    if isinstance(stream, SimStream):
        stream.reset()
    if isinstance(stream, trio.SocketStream):
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await trio.aclose_forcefully(stream)


class _End(enum.Enum):
    """The end of a connection after an answer."""

    KEEP = enum.auto()
    """The connection carries the next request."""
    CLOSE = enum.auto()
    """The connection is closed."""
    RESET = enum.auto()
    """The connection is reset."""
    HANG = enum.auto()
    """The connection stays open, and nothing more is sent."""


@attrs.frozen
class _Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def whole(self, *, body: bytes | None = None, **more: str) -> bytes:
        """Return head and body with the body's length announced; ``body`` replaces the announced body."""
        extra = {name.replace("_", "-"): value for name, value in more.items()}
        whole = whole_answer(self.status, self.body, [*self.headers.items(), *extra.items()])
        return whole if body is None else whole[: len(whole) - len(self.body)] + body

    def half(self) -> bytes:
        """Return the answer up to the middle of its body."""
        return self.whole(body=self.body[: len(self.body) // 2])

    def chunked(self, *, ended: bool) -> bytes:
        """Return the answer in chunks of seven bytes, with extensions and a trailer, or without its end."""
        pieces = [self.body[start : start + 7] for start in range(0, len(self.body), 7)]
        chunks = b"".join(b"%x;note=odd\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        head = answer_head(self.status, [*self.headers.items(), ("transfer-encoding", "chunked")])
        return head + chunks + (b"0\r\nx-trailer: 1\r\n\r\n" if ended else b"")

    def in_1_0(self) -> bytes:
        """Return the answer in HTTP/1.0: its body ends with the connection."""
        return answer_head(self.status, self.headers.items(), version="1.0") + self.body

    def packed(self) -> bytes:
        """Return the answer with a compressed body."""
        return attrs.evolve(self, body=gzip.compress(self.body)).whole(content_encoding="gzip")


_Shape: TypeAlias = tuple[Callable[[_Answer], bytes], _End]
_WHOLE: Final[_Shape] = (_Answer.whole, _End.KEEP)
_SHAPES: Final[Mapping[Fault, _Shape]] = {
    Fault.HANG_IN_BODY: (_Answer.half, _End.HANG),
    Fault.RESET_IN_BODY: (_Answer.half, _End.RESET),
    Fault.SHORT_BODY: (_Answer.half, _End.CLOSE),
    Fault.SHORT_CHUNKED: (lambda answer: answer.chunked(ended=False), _End.CLOSE),
    Fault.LONG_BODY: (lambda answer: answer.whole() + b'{"more": 1}', _End.KEEP),
    Fault.CHUNKED: (lambda answer: answer.chunked(ended=True), _End.KEEP),
    Fault.CLOSE_AFTER: (lambda answer: answer.whole(connection="close"), _End.CLOSE),
    Fault.CLOSE_QUIETLY: (_Answer.whole, _End.CLOSE),
    Fault.CONTINUE_FIRST: (lambda answer: CONTINUE + answer.whole(), _End.KEEP),
    Fault.HTTP_1_0: (_Answer.in_1_0, _End.CLOSE),
    Fault.GZIP: (_Answer.packed, _End.KEEP),
    Fault.NOT_HTTP: (lambda _: b"-ERR unknown command\r\n\r\n", _End.CLOSE),
}


async def send_answer(connection: ServerConnection, reply: Reply, fault: Fault | None, *, drip_s: float) -> None:
    """Send an answer, damaged by the fault, and end the connection if the fault does."""
    body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
    answer = _Answer(reply.status, {"content-type": "application/json", **reply.headers}, body)
    if fault is Fault.DRIP:
        for byte in answer.whole():
            await connection.stream.send_all(bytes([byte]))
            await trio.sleep(drip_s)
        return
    shape, end = _WHOLE if fault is None else _SHAPES.get(fault, _WHOLE)
    await connection.stream.send_all(shape(answer))
    if end is _End.KEEP:
        return
    connection.keep_open = False
    if end is _End.HANG:
        await connection.gone.wait()
    if end is _End.RESET:
        await reset(connection.stream)


@attrs.define(eq=False)
class Running:
    """A request that is generated, or waits in a paused server."""

    rid: str
    prompt: list[int]
    wanted: int
    run: Run | None
    text: bool
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    parked: bool = False
    """The request arrived while the server was paused: SGLang loses the aborts of such a request."""
    deaf: bool = False
    """An abort of the request was lost; SGLang remembers that it sent one, and swallows the others."""
    abort_later: bool = False
    """An abort of the request arrived while the server was paused."""
    aborted: bool = False
    spans: list[tuple[str, int]] = attrs.field(factory=list)
    """(version, tokens so far) for every version that it was sampled under, except the last."""

    @property
    def so_far(self) -> int:
        """The number of tokens while the request runs."""
        return min(self.wanted, self.run.partial) if self.run is not None else 0

    def answer(self, version: str, fault: Fault | None, *, since: int = 0) -> object:
        """Return the JSON of the answer, with the tokens from ``since`` on."""
        if fault is Fault.WRONG_TYPE:
            return ["no", "answer"]
        count = self.so_far if self.aborted else self.wanted
        answer = self.part(count, version, since=since)
        meta = answer["meta_info"]
        meta |= {"finish_reason": self._reason(count), "e2e_latency": 0.01}
        meta["weight_versions"] = self._versions(version, count)
        if self.aborted and not count:  # aborted in the queue: a shorter record
            for field in ("prompt_tokens", "cached_tokens", "num_retractions", "output_token_logprobs"):
                del meta[field]
        if fault is not None:
            _damage(meta, fault)
        return answer

    def part(self, count: int, version: str, *, since: int = 0) -> dict[str, Any]:
        """Return the JSON of a stream's event when there are ``count`` tokens, with those from ``since`` on."""
        first = sum(self.prompt)
        ids = [(first + place) % 997 for place in range(count)]
        triples = [[-0.5 - place % 8 / 8, token, None] for place, token in enumerate(ids)]
        meta = {
            "id": self.rid,
            "finish_reason": None,
            "prompt_tokens": len(self.prompt),
            "completion_tokens": count,
            "cached_tokens": 0,
            "num_retractions": 0,
            "weight_version": version,
            "output_token_logprobs": triples[since:],
            "output_token_logprobs_length": count,
        }
        words = [f"{token} " for token in ids]
        answer = {"text": "".join(words[since:]), "output_ids": ids[since:], "meta_info": meta}
        return answer | {"prompt_token_ids": self.prompt} if self.text else answer

    def _reason(self, count: int) -> dict[str, object]:
        if not self.aborted:
            return {"type": "length", "length": count}
        return {"type": "abort", "message": "Aborted" if count else "Abort in waiting queue"}

    def _versions(self, version: str, count: int) -> list[dict[str, object]]:
        spans, start = [], 0
        for name, stop in [*self.spans, (version, count)]:
            if stop > start:
                spans.append({"version": name, "start": start, "end": stop})
            start = max(start, stop)
        return spans


_OF_LOG_PROBS: Final = {Fault.FEWER_LOG_PROBS, Fault.OTHER_TOKEN, Fault.NULL_LOG_PROB, Fault.NO_LOG_PROBS}


def _damage(meta: dict[str, Any], fault: Fault) -> None:
    if fault in _OF_LOG_PROBS and not meta.get("output_token_logprobs"):
        return  # aborted before its first token: there is no log-prob to damage
    match fault:
        case Fault.FEWER_LOG_PROBS:
            del meta["output_token_logprobs"][-1]
        case Fault.OTHER_TOKEN:
            meta["output_token_logprobs"][-1][1] = 998
        case Fault.NULL_LOG_PROB:
            meta["output_token_logprobs"][-1][0] = None
        case Fault.NO_LOG_PROBS:
            del meta["output_token_logprobs"]
        case Fault.NO_FINISH_REASON:
            del meta["finish_reason"]
        case Fault.OTHER_ANSWER:
            meta["id"] = "0" * 32


_HALF_WAY: Final = {Fault.RESET_IN_BODY, Fault.SHORT_BODY, Fault.SHORT_CHUNKED, Fault.HANG_IN_BODY}


@attrs.define(eq=False)
class EventStream:
    """One streamed answer. ``incremental``: each event has only what is new."""

    _connection: ServerConnection
    _running: Running
    _incremental: bool
    _fault: Fault | None
    _sent: int = attrs.field(default=0, init=False)

    async def begin(self, version: str) -> None:
        """Send the head, and an event for each token that there is at once."""
        await self._connection.stream.send_all(answer_head(200, EVENT_STREAM_HEADERS))
        await self._tokens(self._running.so_far, version)

    async def end(self, version: str) -> None:
        """Send the remaining tokens, the last event and the end, as far as the fault lets them through."""
        count = self._running.so_far if self._running.aborted else self._running.wanted
        if self._fault in _HALF_WAY:
            await self._tokens(count // 2, version)
            if self._fault is Fault.HANG_IN_BODY:
                await trio.sleep_forever()
            if self._fault is Fault.RESET_IN_BODY:
                await reset(self._connection.stream)
            self._connection.keep_open = False
            return
        await self._tokens(count - 1, version)
        answer = self._running.answer(version, self._fault, since=self._since)
        last = event(json.dumps(answer).encode())
        await self._chunk(last[:-20] + b"\n\n" if self._fault is Fault.MALFORMED_JSON else last)
        if self._fault is not Fault.NO_DONE:
            await self._chunk(event(b"[DONE]"))
        await self._connection.stream.send_all(LAST_CHUNK)

    @property
    def _since(self) -> int:
        return self._sent if self._incremental else 0

    async def _tokens(self, count: int, version: str) -> None:
        while self._sent < count:
            part = self._running.part(self._sent + 1, version, since=self._since)
            await self._chunk(event(json.dumps(part).encode()))
            self._sent += 1

    async def _chunk(self, data: bytes) -> None:
        # In two pieces: clients must not expect an event in one piece.
        middle = len(data) // 2
        for piece in (data[:middle], data[middle:]):
            await self._connection.stream.send_all(chunk(piece))
