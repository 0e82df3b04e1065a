"""``SGLangServers`` and ``open_sglang_servers``: the client as users and the engine see it.

Also the transport for a user's ``httpx`` client, whose requests go to one of the servers over the connections of generation.
"""

import logging
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, final

import attrs
import httpx  # noqa: ASYNC127  the client users have
import trio

from .._core.enums import PauseMode
from .._core.sampling import SamplingParams
from .._core.settings import Deadlines
from .._core.statistics import ServerStatistics
from .._core.values import Prompt, Turn
from .._http import Connector, carry, library_of, limits_of, parse_url, socket_connector
from .._util.arguments import refuse, require, require_trio
from .._util.ports import Ports
from .._util.service import open_service
from .._util.threads import RunSync, run_in_thread
from ..abc import ModelInput, OnTokens
from ..errors import RequestRejected
from ..tokenizer import Tokenizer, load_tokenizer
from ..tokenizer._messages import continues, normalized, normalized_tools
from . import _control as control
from ._cancellation import pay
from ._fleet import Fleet
from ._generate import Generation
from ._probe import probe
from ._server import Roster, Server
from ._settings import ServerSettings
from ._startup import context_length_of, discover, meet, proxy_of, servers_of, vocab_size_of
from ._wire import RequestEncoder

_log: Final = logging.getLogger("trio_rollout.sglang")
_NOTHING: Final[Mapping[str, object]] = MappingProxyType({})
# Leaving must not wait for servers that do not answer. Enough for a resume of the probe that is under way, and one more.
_LAST_RESUME_S: Final = 2 * control.LOST_RESUME_S


@final
@attrs.frozen(kw_only=True, eq=False, repr=False)
class SGLangServers:
    """SGLang servers, or a view of them with other budgets. Made by ``open_sglang_servers``."""

    _fleet: Fleet = attrs.field(alias="fleet")
    _tokenizer: Tokenizer | None = attrs.field(alias="tokenizer")
    _abort_s: float = attrs.field(alias="abort_s")
    _control_s: float = attrs.field(alias="control_s")

    def __repr__(self) -> str:
        now = self.statistics()
        usable = sum(server.usable for server in now.servers)
        in_flight = sum(server.in_flight for server in now.servers)
        return f"<SGLangServers {usable} of {len(now.servers)} usable, {in_flight} requests, {now.connections} connections>"

    def under(self, deadlines: Deadlines) -> "SGLangServers":
        """Return the same servers, with these budgets for aborts and control calls. Everything else is shared.

        See docs/decisions/0005-servers-are-viewed-under-deadlines.md.
        """
        return attrs.evolve(self, abort_s=deadlines.abort, control_s=deadlines.control)

    def encode(self, prompt: Prompt) -> ModelInput:
        """Return the prompt as ``generate`` takes it: its ids, else its text or messages through the tokenizer.

        Without a tokenizer text stays text: the server turns it into ids, and returns them with its answer.

        Raises:
          RequestRejected: messages without a tokenizer, messages that can't be read, or a token id outside the vocabulary.
        """
        requests, tokenizer = self._fleet.requests, self._tokenizer
        if prompt.input_ids is not None:
            return requests.checked(prompt.input_ids)
        if prompt.text is not None:
            return prompt.text if tokenizer is None else requests.checked(tokenizer.encode(prompt.text))
        if tokenizer is None:
            raise RequestRejected(
                f"prompt {prompt.id!r} has messages, but there is no tokenizer to turn them into ids: "
                "give open_sglang_servers(tokenizer=...)"
            )
        try:
            messages, tools = normalized(prompt.messages or ()), normalized_tools(prompt.tools)
        except (TypeError, ValueError) as error:
            raise RequestRejected(f"prompt {prompt.id!r}: {error}") from error
        going_on = continues(messages)
        ids = tokenizer.apply_chat_template(messages, tools or None, continue_final_message=going_on)
        return requests.checked(ids)

    def generate(  # returns the coroutine: one frame less for each request in flight
        self,
        input_ids: ModelInput,
        sampling: SamplingParams,
        *,
        affinity: str | None = None,
        extra: Mapping[str, object] = _NOTHING,
        on_progress: Callable[[], None] | None = None,
        on_tokens: OnTokens | None = None,
        while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Coroutine[Any, Any, Turn]:
        """Sample one turn on one server; an aborted one returns with stop ABORT and the tokens it has.

        The server is the one that last had this ``affinity`` if it can be used, else the least loaded one. A busy server
        (503, 429, …) is asked again later, another server at once, under a fresh request id each time. With ``on_progress`` the
        answer is streamed and ``on_progress()`` called for every piece of it; it must not block or raise. ``on_tokens``
        streams it too, and is called with the tokens so far. While every server is lost or busy, the call waits inside a
        ``while_waiting()`` block.

        Blocks until the answer is there; waits while no server is usable. **Without a deadline of the caller it may wait for
        ever.** Cancelled, the request is aborted on its server and its answer awaited, within the abort budget, before
        Cancelled goes on; its tokens are lost.

        Raises:
          RequestRejected: no server will take this request; in the server's words.
          ServerLost: the connection broke with the request on it; ``tokens`` has what a stream had brought until then.
          ServerError: any other failure.
        """
        return Generation(
            self._fleet, input_ids, sampling, extra, affinity, self._abort_s, on_progress, on_tokens, while_waiting
        ).run()

    async def pause(self, mode: PauseMode) -> None:
        """Pause every server that is not lost; nothing is sent to any of them until ``resume``.

        A server that was paused already when the client was opened is taken over: it is paused and resumed with the others.
        Blocks until they say that they are paused. Cancelled, it waits for the pauses that were sent; call ``resume`` then.

        Raises:
          trio.BusyResourceError: another engine on these servers, or another user of them, has paused them. Nothing was done.
          ServerError: names the servers that could not be paused in time. They count as lost, and every server has been
            resumed as far as it answers. The next pauses go on without them, until another version is required.
        """
        await control.pause(self._fleet, mode, view=self, seconds=self._control_s, abort_s=self._abort_s)

    async def resume(self) -> None:
        """Resume every server that may have been paused; then the aborts that are owed are paid in the background.

        Blocks until they say that they continue, within the control budget. Cancelled, or if one does not answer, the probe
        goes on resuming it.

        Raises:
          trio.BusyResourceError: another engine on these servers, or another user of them, has paused them. Nothing was done.
          ServerError: names the servers that could not be resumed. They count as lost; the others are resumed.
        """
        await control.resume(self._fleet, view=self, seconds=self._control_s)

    async def versions(self) -> Mapping[str, int | None]:
        """Return the weight version that each answering server names, by URL; None if it does not name a number.

        ``default`` is not a number, except from a server that had named numbers before: it has restarted, which is 0.
        A server that does not answer within the control budget counts as lost and is left out.
        """
        return await control.versions(self._fleet, seconds=self._control_s)

    @property
    def required_version(self) -> int | None:
        """The weight version that requests are sent to; None if none was required yet. All engines on these servers share it."""
        return self._fleet.required

    def require_version(self, version: int, *, named_by: Collection[str] = ()) -> None:
        """From now on send requests only to servers that name this version (those that never named one excepted).

        ``named_by``: the URLs of the servers that named a number in an earlier run. If there are any, a server that names none
        now has restarted with other weights, and gets no requests before a weight update.
        """
        self._fleet.require_version(version, named_by)

    async def blocked_reason_after(self, known: str | None) -> str | None:
        """Wait until the reason that blocks all requests is another than ``known``, and return it; None if nothing blocks them.

        Requests are blocked when servers have answered for as long as a control call may take, and none of them names the
        required version, or when the servers were paused when the client was opened: only a weight update ends that.
        Cancelled, nothing has changed.
        """
        return await self._fleet.blocked_reason_after(known, patience_s=self._control_s)

    async def flush_cache(self) -> None:
        """Empty every server's prefix cache; asked again while a server refuses because requests are still leaving it.

        Raises:
          ServerError: names the servers that did not flush within the control budget.
        """
        await control.flush_cache(self._fleet, seconds=self._control_s)

    async def abort_until_idle(self) -> None:
        """Abort everything on every server, other clients' requests too, until none runs anything.

        Raises:
          ServerError: names the servers that were not idle within the control budget.
        """
        await control.abort_until_idle(self._fleet, seconds=self._control_s)

    async def health(self) -> Mapping[str, bool]:
        """Return for each server, by URL, if it answers that it is ready. A paused one is not."""
        return await control.health(self._fleet, seconds=self._control_s)

    def statistics(self) -> ServerStatistics:
        """Return the counts of this moment."""
        return self._fleet.statistics()

    def httpx_transport(self) -> httpx.AsyncBaseTransport:
        """Return a transport for ``httpx`` and ``httpx2`` clients over these servers' connections.

        Libraries that take such a client then run on Trio:

        ``openai.AsyncOpenAI(base_url="http://servers/v1", http_client=httpx2.AsyncClient(transport=...))``. The host
        ``servers`` stands for the least loaded of them, a server's own URL for itself; everything else is refused. Nothing is
        sent to a paused or lost server: a request waits. A stream of events comes as it is sent, every other answer is read
        whole first. ``ServerSettings.api_key`` is sent unless the request has its own. The connection of a request or a stream that is cancelled or left is closed: only ``generate`` knows
        how to abort.
        """
        return ServersTransport(self._fleet)


async def _serve(fleet: Fleet, *, task_status: trio.TaskStatus[None]) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(probe, fleet)
        for server in fleet.servers:
            nursery.start_soon(server.calls.serve)
            nursery.start_soon(pay, fleet, server)
            for pool in server.pools:
                nursery.start_soon(pool.tend)
        task_status.started()


async def _leave(fleet: Fleet) -> None:
    """Try to resume what the probe could not, and log what is still owed. Does not wait for servers of an open window."""
    if fleet.window is None:
        await control.resume_quietly(fleet, seconds=_LAST_RESUME_S)
    owed = {server.url: server.owed.debts for server in fleet.servers if server.owed.debts}
    if owed:
        _log.warning("left with aborts owed to servers that are still paused: %s", owed)


def _require_arguments(urls: object, router: str | None, tokenizer: object, settings: object) -> None:
    """Refuse arguments of another type, and what is no URL."""
    require_trio("open_sglang_servers")
    if isinstance(urls, str) or not isinstance(urls, Sequence):  # a string is a sequence of one-letter URLs
        raise refuse("urls", urls, "a sequence of URLs")
    for url in urls if router is None else (*urls, router):
        parse_url(url)
    require("settings", settings, ServerSettings, "ServerSettings")
    require(
        "tokenizer", tokenizer, (str, Path, Tokenizer, type(None)), "a folder's path, or what load_tokenizer() gives"
    )


@asynccontextmanager
async def open_sglang_servers(
    urls: Sequence[str] = (),
    *,
    router: str | None = None,
    tokenizer: str | Path | Tokenizer | None = None,
    settings: ServerSettings = ServerSettings(),  # noqa: B008  frozen
    ports: Ports | None = None,
    connect: Connector | None = None,
    run_sync: RunSync = run_in_thread,
) -> AsyncGenerator[SGLangServers]:
    """Reach SGLang servers by URL (``http://host:port``, ``https://host``, ``unix:/path``), or the workers of a router.

    ``tokenizer``: a model's folder, for prompts that are text or messages. ``ports``, ``connect`` and ``run_sync`` are what
    a simulation replaces: randomness, connections, threads.

    Entering blocks until every server has described itself. Leaving closes all connections; it blocks at most a few seconds
    for servers that could not be resumed, and never for paused ones.

    Raises:
      SettingsError: no or malformed URLs, or the tokenizer can't be loaded.
      ServerError: names each server that can't be reached or does not speak SGLang, with its answer.
    """
    _require_arguments(urls, router, tokenizer, settings)
    if connect is None:
        connect = socket_connector(settings.ca_file, proxy_of(settings))
    if router is not None:
        urls = [*urls, *await discover(router, settings, connect)]
    loaded = await run_sync(load_tokenizer, tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    roster = Roster()
    servers = servers_of(urls, settings, connect, roster)
    try:
        vocab_size = await vocab_size_of(await meet(servers, settings), settings, run_sync)
        encoder = RequestEncoder(vocab_size, await context_length_of(servers, settings))
        fleet = Fleet(roster, settings, ports or Ports(), encoder, run_sync)
        async with open_service(partial(_serve, fleet), lambda _value, _error: _leave(fleet)):
            yield SGLangServers(fleet=fleet, tokenizer=loaded, abort_s=settings.abort, control_s=settings.control)
    finally:
        roster.leave()


ANY: Final = "servers"
"""The host that stands for the least loaded server."""


def _is_at(server: Server, url: httpx.URL) -> bool:
    address = server.address
    port = url.port if url.port is not None else (443 if url.scheme == "https" else 80)
    same = (url.scheme == "https", url.host, port) == (address.tls, address.host, address.port)
    return same and address.unix_path is None


@final
class ServersTransport(httpx.AsyncBaseTransport):
    """The transport of ``SGLangServers.httpx_transport``. Closing a client that uses it closes no connection."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request to one server and read its answer, whole unless it is a stream of events.

        Blocks while no server can be used, at most the client's pool timeout, and then until the answer is there, or the
        head of the stream, at most its read timeout. Cancelled, the connection is closed; so it is if a stream is not read
        to its end.

        Raises:
          UnsupportedProtocol: the URL is not one of these servers'.
          PoolTimeout, ReadTimeout, ConnectError, ReadError, RemoteProtocolError: as the library's own transport would.
        """
        server = await self._server_for(request)
        if key := server.client.headers.get("authorization"):
            request.headers.setdefault("authorization", key)
        # Counted like a generation: the next choice sees it, and a look for orphans does not take it for one.
        server.in_flight += 1
        server.sent += 1

        def ended() -> None:
            server.sent -= 1
            server.in_flight -= 1

        prefix = server.address.prefix if request.url.host == ANY else ""
        return await carry(
            request, server.work, prefix=prefix, ended=ended, may_send=partial(self._fleet.until_usable, server)
        )

    async def _server_for(self, request: httpx.Request) -> Server:
        fleet, library, url = self._fleet, library_of(request), request.url
        limit = limits_of(request).get("pool")
        named = [server for server in fleet.servers if _is_at(server, url)]
        if url.host != ANY and not named:
            known = ", ".join(server.url for server in fleet.servers)
            raise library.UnsupportedProtocol(
                f"{url} is not one of these servers; allowed: http://{ANY} for any of them, {known}", request=request
            )
        with trio.move_on_after(float("inf") if limit is None else limit):
            if url.host == ANY:
                return await fleet.choose(None)
            await fleet.until_usable(named[0])
            return named[0]
        raise library.PoolTimeout(f"none of the servers could be used within {limit} s", request=request)
