"""Tool calls and reasoning in an answer's text, found by the parsers of the servers that sampled it. None of them is ours."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, final

import attrs
import httpx  # noqa: ASYNC127  the client users have
import msgspec
import trio

from ..abc import InferenceServers
from ..errors import ServerError
from ._values import Context, Tool


@final
class Call(msgspec.Struct):
    """A call as SGLang's parser gives it."""

    name: str | None = None
    parameters: str = "{}"


class _Calls(msgspec.Struct):
    normal_text: str = ""
    calls: list[Call] = []


class _Separated(msgspec.Struct):
    text: str | None = None
    reasoning_text: str | None = None


class _ModelInfo(msgspec.Struct):
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None


class _ServerInfo(msgspec.Struct):
    max_req_input_len: int | None = None


class _Card(msgspec.Struct):
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card] = []


@attrs.frozen(kw_only=True)
class Parsed:
    """An answer's text, taken apart."""

    text: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


class Parser(Protocol):
    """Takes answers apart."""

    @property
    def finds_thoughts(self) -> bool:
        """Whether any part of an answer may turn out to be thoughts."""
        ...

    def takes_apart(self, tools: Sequence[Tool]) -> bool:
        """Whether an answer to a request with these tools can come out as anything but its own text."""
        ...

    async def parse(self, text: str, tools: Sequence[Tool]) -> Parsed:
        """Take an answer apart.

        Raises:
          ServerError: no server did.

        """
        ...


@final
@attrs.define(eq=False)
class ServerParser:
    """SGLang's ``/parse_function_call`` and ``/separate_reasoning``, on any server that can be used."""

    servers: InferenceServers
    client: httpx.AsyncClient
    tool_parser: str | None
    reasoning_parser: str | None
    _turn: Iterator[int] = attrs.field(factory=itertools.count, init=False)

    @property
    def finds_thoughts(self) -> bool:
        """If there is a parser for them."""
        return self.reasoning_parser is not None

    def takes_apart(self, tools: Sequence[Tool]) -> bool:
        """If there is a parser for what such an answer may hold."""
        return self.finds_thoughts or bool(tools and self.tool_parser)

    async def parse(self, text: str, tools: Sequence[Tool]) -> Parsed:
        """Ask for the reasoning first, then for the calls in what is left. See ``Parser.parse``."""
        await trio.lowlevel.checkpoint()
        reasoning = ""
        if self.reasoning_parser is not None:
            body = {"text": text, "reasoning_parser": self.reasoning_parser}
            separated = await self._ask("/separate_reasoning", body, _Separated)
            text, reasoning = separated.text or "", separated.reasoning_text or ""
        if not (tools and self.tool_parser):
            return Parsed(text=text, reasoning=reasoning)
        found = await self._ask(
            "/parse_function_call", {"text": text, "tools": tools, "tool_call_parser": self.tool_parser}, _Calls
        )
        return Parsed(text=found.normal_text, reasoning=reasoning, calls=tuple(found.calls))

    async def _ask(self, path: str, body: object, kind: type[Any]) -> Any:
        tried: list[str] = []
        for url in self._urls():
            try:
                answer = await self.client.post(
                    url + path, content=msgspec.json.encode(body), headers={"content-type": "application/json"}
                )
                answer.raise_for_status()
                return msgspec.json.decode(answer.content, type=kind)
            except (httpx.HTTPError, msgspec.DecodeError) as error:
                tried.append(f"{url}: {error!r}")
        raise ServerError(f"POST {path}: no server took the answer apart: {'; '.join(tried) or 'none is usable'}")

    def _urls(self) -> list[str]:
        """Usable servers, beginning with another one each time."""
        urls = [server.url for server in self.servers.statistics().servers if server.usable]
        first = next(self._turn) % len(urls) if urls else 0
        return urls[first:] + urls[:first]


async def parsers_of(client: httpx.AsyncClient, url: str) -> tuple[str | None, str | None]:
    """The names of the tool parser and the reasoning parser that a server was started with.

    Raises:
      ServerError: it does not say.

    """
    info: _ModelInfo = await _read(client, f"{url}/model_info", _ModelInfo)
    return info.tool_call_parser, info.reasoning_parser


async def context_of(client: httpx.AsyncClient, url: str) -> Context:
    """How many tokens a server takes.

    Raises:
      ServerError: it says neither.

    """
    cards: _Cards = await _read(client, f"{url}/v1/models", _Cards)
    known = [card.max_model_len for card in cards.data if card.max_model_len]
    info: _ServerInfo = await _read(client, f"{url}/server_info", _ServerInfo)
    most = info.max_req_input_len
    return Context(length=min(known, default=None), longest_prompt=None if most is None else most - 1)


async def _read(client: httpx.AsyncClient, url: str, kind: type[Any]) -> Any:
    try:
        answer = await client.get(url)
        answer.raise_for_status()
        return msgspec.json.decode(answer.content, type=kind)
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        raise ServerError(f"GET {url}: {error!r}") from error
