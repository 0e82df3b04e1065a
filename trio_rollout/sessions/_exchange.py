"""One request of an agent over ASGI: read it within bounds, watch its connection, answer it."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final, TypeAlias, final

import attrs
import msgspec
import trio

from ._refusal import Refusal

AsgiScope: TypeAlias = MutableMapping[str, Any]
AsgiReceive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
AsgiSend: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"


@final
@attrs.define(eq=False)
class Exchange:
    """A request and its answer on one connection."""

    scope: AsgiScope
    _receive: AsgiReceive
    _send: AsgiSend
    started: bool = attrs.field(default=False, init=False)
    """Whether the head of the answer was sent."""
    _read: bool = attrs.field(default=False, init=False)

    def header(self, name: str) -> str:
        """The request's header of this lower-case name; empty if there is none."""
        wanted = name.encode()
        return next((value.decode("latin-1") for key, value in self.scope["headers"] if key.lower() == wanted), "")

    async def body(self, *, most: int, seconds: float) -> bytes:
        """Read the request's body.

        Raises:
          Refusal: it is too large (413), does not come in time or whole (408), or is packed (415).

        """
        encoding = self.header("content-encoding")
        if encoding.lower() not in {"", "identity"}:
            raise Refusal(415, f"content-encoding: got {encoding!r}, allowed: identity")
        self._read = True
        data = bytearray()
        too_large = False
        with trio.move_on_after(seconds):
            while True:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    break
                # What is too large is read on and thrown away: most clients read an answer only when all is sent.
                too_large = too_large or len(data) + len(message.get("body", b"")) > most
                data += b"" if too_large else message.get("body", b"")
                if message.get("more_body", False):
                    continue
                if too_large:
                    raise Refusal(413, f"the body is too large: at most {most} bytes")
                return bytes(data)
        raise Refusal(413 if too_large else 408, f"the body did not come whole within {seconds} s and {most} bytes")

    async def skip_body(self, *, seconds: float) -> None:
        """Read a body that nobody wants: to a client that still sends, an answer may be lost with the connection."""
        with trio.move_on_after(seconds):
            while not self._read:
                message = await self._receive()
                self._read = message["type"] == "http.disconnect" or not message.get("more_body", False)

    async def while_connected(self, answer: Callable[[], Awaitable[None]]) -> None:
        """Run ``answer`` unless and until the client has gone. To be used once the request is read."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._until_gone, nursery.cancel_scope)
            await answer()
            nursery.cancel_scope.cancel()

    async def _until_gone(self, body: trio.CancelScope) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        body.cancel(reason="the client has gone")

    async def reply(self, status: int, content: object, headers: Mapping[str, str] | None = None) -> None:
        """Send a whole JSON answer."""
        data = msgspec.json.encode(content)
        await self._start(status, _JSON, {**(headers or {}), "content-length": str(len(data))})
        await self._send({"type": "http.response.body", "body": data})

    async def begin_events(self) -> None:
        """Send the head of a stream."""
        await self._start(200, _EVENTS, {"cache-control": "no-cache"})

    async def events(self, data: bytes, *, last: bool = False) -> None:
        """Send events of a stream."""
        if data or last:
            await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def _start(self, status: int, content_type: str, headers: Mapping[str, str]) -> None:
        self.started = True
        pairs = [(b"content-type", content_type.encode())]
        pairs += [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})
