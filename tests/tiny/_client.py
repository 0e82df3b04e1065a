"""A client of a tiny server over memory streams, so that its tests run in virtual time."""

import json
from collections.abc import AsyncIterator
from typing import Any

import attrs
import h11
import trio
from trio.testing import memory_stream_pair

from trio_rollout.tiny import TinyServer

PROMPT = [5, 6, 7, 8]


@attrs.frozen
class Answer:
    """Status and body of a whole answer."""

    status: int
    body: bytes

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)


class Pending:
    """A call that runs beside the test."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.answer: Answer | None = None

    async def result(self) -> Any:
        """Wait for the JSON of the answer, which must be a 200."""
        await self.done.wait()
        assert self.answer is not None
        assert self.answer.status == 200, self.answer
        return self.answer.json


@attrs.define
class Client:
    """Calls one server; every call opens a connection."""

    server: TinyServer
    nursery: trio.Nursery

    async def _send(self, method: str, path: str, body: bytes) -> tuple[trio.abc.Stream, h11.Connection]:
        stream, remote = memory_stream_pair()
        self.server.accept(remote)
        wire = h11.Connection(h11.CLIENT)
        head = h11.Request(method=method, target=path, headers=[("host", "x"), ("content-length", str(len(body)))])
        await stream.send_all(b"".join(wire.send(event) or b"" for event in (head, h11.Data(body), h11.EndOfMessage())))
        return stream, wire

    async def _events(self, stream: trio.abc.Stream, wire: h11.Connection) -> AsyncIterator[Any]:
        while True:
            event = wire.next_event()
            if event is h11.NEED_DATA:
                data = await stream.receive_some(65536)
                if not data:
                    return  # the server is dead: the answer ends here
                wire.receive_data(data)
            else:
                yield event
                if isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                    return

    async def call(self, path: str, body: Any = None, *, method: str | None = None) -> Answer:
        """Make one call: POST with a body (an object, or bytes as they are), otherwise GET."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        stream, wire = await self._send(method or ("GET" if body is None else "POST"), path, data)
        status, received = 0, b""
        async with stream:
            async for event in self._events(stream, wire):
                if isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    received += bytes(event.data)
        return Answer(status, received)

    async def generate(self, **body: Any) -> Any:
        """Return the JSON of a ``/generate`` answer, which must be a 200."""
        answer = await self.call("/generate", request(**body))
        assert answer.status == 200, answer
        return answer.json

    def start(self, **body: Any) -> Pending:
        """Start a ``/generate`` call beside the test."""
        pending = Pending()

        async def run() -> None:
            pending.answer = await self.call("/generate", request(**body))
            pending.done.set()

        self.nursery.start_soon(run)
        return pending

    async def begin(self, **body: Any) -> trio.abc.Stream:
        """Send a ``/generate`` call and return its connection, unread."""
        stream, _ = await self._send("POST", "/generate", json.dumps(request(**body)).encode())
        return stream

    async def chunks(self, **body: Any) -> list[Any]:
        """Return all chunks of a stream that ends with [DONE]."""
        answer = await self.call("/generate", request(stream=True, **body))
        assert answer.status == 200
        *events, done, rest = answer.body.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


def request(**body: Any) -> dict[str, Any]:
    """Return a request in SGLang's shape; names that are not its fields go into ``sampling_params``."""
    fields = {"text", "input_ids", "rid", "stream", "return_logprob", "logprob_start_len", "top_logprobs_num"}
    fields |= {"token_ids_logprob", "return_prompt_token_ids", "return_text_in_logprobs", "sampling_params"}
    sampling = {name: value for name, value in body.items() if name not in fields}
    whole = {name: value for name, value in body.items() if name in fields}
    if not {"text", "input_ids"} & whole.keys():
        whole["input_ids"] = PROMPT
    return {"sampling_params": {"max_new_tokens": 8, "ignore_eos": True, **sampling}, **whole}
