"""Clients of /generate: httpx as slime and miles use it, and aiohttp. A cancelled request is aborted on its server."""

import asyncio
import contextlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import aiohttp
import httpx

from .codecs import Codec
from .values import Prompt, Sample

ABORT_S = 5.0
# Aborts must not queue behind the requests that they abort.
SPARE = 64
_JSON = {"Content-Type": "application/json"}


class Client(ABC):
    """One server. ``async with`` it."""

    def __init__(self, url: str, codec: Codec) -> None:
        self.url = url
        self._codec = codec
        self._aborts: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def _post(self, path: str, body: bytes) -> bytes:
        """POST and read the answer; raises on any status but 200."""

    @abstractmethod
    async def _close(self) -> None:
        """Close the connections."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*self._aborts, return_exceptions=True)
        await self._close()

    async def generate(self, prompt: Prompt) -> Sample:
        """One answer. Cancelled, or when the connection fails, the request is aborted first, for a bounded time."""
        rid = uuid.uuid4().hex
        body = self._codec.encode(prompt, rid)
        try:
            answer = await self._post("/generate", body)
        except (asyncio.CancelledError, OSError, aiohttp.ClientError, httpx.TransportError):
            await self._leave(rid)
            raise
        return self._codec.decode(answer, prompt, rid)

    async def _leave(self, rid: str) -> None:
        """Abort on the server. A second cancellation ends the waiting, not the abort."""
        task = asyncio.create_task(self._abort(rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(task), ABORT_S)

    async def _abort(self, rid: str) -> None:
        with contextlib.suppress(OSError, TimeoutError, aiohttp.ClientError, httpx.HTTPError):
            async with asyncio.timeout(ABORT_S):
                await self.control("/abort_request", {"rid": rid, "abort_all": False})

    @abstractmethod
    async def control(self, path: str, payload: Mapping[str, Any]) -> None:
        """Make a control call; raises on any status but 200."""


class HttpxClient(Client):
    """One ``httpx.AsyncClient`` for everything, with room for every request and some more."""

    def __init__(self, url: str, codec: Codec, *, slots: int) -> None:
        super().__init__(url, codec)
        self._client = httpx.AsyncClient(
            limits=httpx.Limits(max_connections=slots + SPARE), timeout=httpx.Timeout(None), trust_env=False
        )

    async def _post(self, path: str, body: bytes) -> bytes:
        response = await self._client.post(self.url + path, content=body, headers=_JSON)
        response.raise_for_status()
        return response.content

    async def control(self, path: str, payload: Mapping[str, Any]) -> None:
        """See ``Client``."""
        (await self._client.post(self.url + path, json=payload)).raise_for_status()

    async def _close(self) -> None:
        await self._client.aclose()


class AiohttpClient(Client):
    """One ``aiohttp.ClientSession`` for everything, its connector without a limit."""

    def __init__(self, url: str, codec: Codec) -> None:
        super().__init__(url, codec)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0), timeout=aiohttp.ClientTimeout(total=None)
        )

    async def _post(self, path: str, body: bytes) -> bytes:
        async with self._session.post(self.url + path, data=body, headers=_JSON) as response:
            response.raise_for_status()
            return await response.read()

    async def control(self, path: str, payload: Mapping[str, Any]) -> None:
        """See ``Client``."""
        async with self._session.post(self.url + path, json=payload) as response:
            response.raise_for_status()
            await response.read()

    async def _close(self) -> None:
        await self._session.close()
