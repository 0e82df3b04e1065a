"""Tool calls and reasoning in an answer's text, found by the parsers of the inference servers. None of them is ours."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol, final, runtime_checkable

import attrs
import httpx  # noqa: ASYNC127  the client users have
import msgspec
import trio

from ..abc import InferenceServers
from ..errors import ServerError
from ._settings import GatewaySettings
from ._values import ContextLimits, Tool

_WINDOW_S: Final = (
    300.0  # a weight update pauses the servers, and an answer that was sampled before it has to be parsed
)


@final
class Call(msgspec.Struct):
    """One call of a tool, as SGLang's parser gives it."""

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
    has_image_understanding: bool | None = None


class _ServerInfo(msgspec.Struct):
    max_req_input_len: int | None = None


class _Card(msgspec.Struct):
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card] = []


@attrs.frozen(kw_only=True)
class Parsed:
    """An answer, split into its text, its reasoning and its tool calls."""

    text: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


class Parser(Protocol):
    """Splits an answer into text, reasoning and tool calls. Users may write their own."""

    @property
    def finds_thoughts(self) -> bool:
        """True if any part of an answer may turn out to be reasoning."""
        ...

    def parses_markup(self, tools: Sequence[Tool]) -> bool:
        """Return True if the answer to a request with these tools can be anything but its own text."""
        ...

    async def parse(self, text: str, tools: Sequence[Tool]) -> Parsed:
        """Split an answer.

        Raises:
          ServerError: no server could.
        """
        ...


@final
@attrs.define(eq=False)
class ServerParser:
    """Parses with SGLang's ``/separate_reasoning`` and ``/parse_function_call``, on any usable server."""

    servers: InferenceServers
    client: httpx.AsyncClient
    """See ``client_of``."""
    tool_parser: str | None
    reasoning_parser: str | None
    _turn: Iterator[int] = attrs.field(factory=itertools.count, init=False)

    @property
    def finds_thoughts(self) -> bool:
        """True if there is a reasoning parser."""
        return self.reasoning_parser is not None

    def parses_markup(self, tools: Sequence[Tool]) -> bool:
        """Return True if there is a parser for what such an answer may hold."""
        return self.finds_thoughts or bool(tools and self.tool_parser)

    async def parse(self, text: str, tools: Sequence[Tool]) -> Parsed:
        """Ask for the reasoning first, then for the calls in the rest. See ``Parser.parse``."""
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
        if not found.calls:
            return Parsed(text=text, reasoning=reasoning)  # SGLang's parsers leave a malformed call out of the text
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
        raise ServerError(f"POST {path}: no server parsed the answer: {'; '.join(tried) or 'none is usable'}")

    def _urls(self) -> list[str]:
        """Return the usable servers, each time with another one first."""
        every = self.servers.statistics().servers
        urls = [server.url for server in every if server.usable] or [server.url for server in every]
        first = next(self._turn) % len(urls) if urls else 0
        return urls[first:] + urls[:first]


@runtime_checkable
class _Reachable(Protocol):
    """Servers that can be reached over their client's own connections, as ``SGLangServers`` can."""

    def httpx_transport(self) -> httpx.AsyncBaseTransport: ...


def client_of(servers: InferenceServers) -> httpx.AsyncClient:
    """Return a client for calls to the servers' parsers: over the servers' own connections, with their key.

    No proxy that the environment names is used. A call waits for a server that is paused.
    """
    transport = servers.httpx_transport() if isinstance(servers, _Reachable) else None
    return httpx.AsyncClient(timeout=httpx.Timeout(30.0, pool=_WINDOW_S), transport=transport, trust_env=False)


async def parser_of(
    servers: InferenceServers, client: httpx.AsyncClient, settings: GatewaySettings
) -> tuple[ServerParser, ContextLimits]:
    """Return the servers' parser and context limits; the settings take precedence where they name them.

    Raises:
      ServerError: a server does not say.
    """
    url = next(server.url for server in servers.statistics().servers)
    names: _ModelInfo = await _read(client, f"{url}/model_info", _ModelInfo)
    cards: _Cards = await _read(client, f"{url}/v1/models", _Cards)
    info: _ServerInfo = await _read(client, f"{url}/server_info", _ServerInfo)
    parser = ServerParser(
        servers,
        client,
        settings.tool_parser or names.tool_call_parser,
        settings.reasoning_parser or names.reasoning_parser,
    )
    known = min((card.max_model_len for card in cards.data if card.max_model_len), default=None)
    return parser, ContextLimits(
        sees=bool(names.has_image_understanding),
        length=known if settings.context_length is None else settings.context_length,
        longest_prompt=None if info.max_req_input_len is None else info.max_req_input_len - 1,
    )


async def _read(client: httpx.AsyncClient, url: str, kind: type[Any]) -> Any:
    try:
        answer = await client.get(url)
        answer.raise_for_status()
        return msgspec.json.decode(answer.content, type=kind)
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        raise ServerError(f"GET {url}: {error!r}") from error
