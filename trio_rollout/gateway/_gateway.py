"""Closed sessions that are still remembered, bounded in number and in time. Time comes in as a float.

The gateway: one HTTP server for all sessions, in a service scope around the engine's.
"""

import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import final

import attrs
import httpx  # noqa: ASYNC127  the client users have
import trio

from .._core.sampling import SamplingParams
from .._core.values import Prompt
from .._util.service import open_service
from .._util.threads import RunSync, run_in_thread
from ..abc import InferenceServers, Rollout
from ..tokenizer._tokenizer import Tokenizer, load_tokenizer
from ._app import App
from ._conversation import Conversation
from ._http_server import bind, serve_app, url_of
from ._parsers import Parser, ServerParser, context_of, parsers_of
from ._sampling import Sampler
from ._session import GatewaySession
from ._settings import GatewaySettings
from ._values import Context


@final
@attrs.define(eq=False)
class Tombstones:
    """Ids and keys of sessions that were closed lately, oldest first."""

    most: int
    seconds: float
    _keys: OrderedDict[str, tuple[str, float]] = attrs.field(factory=OrderedDict, init=False)

    def __len__(self) -> int:
        return len(self._keys)

    def bury(self, session: str, key: str, now: float) -> None:
        """Remember a closed session; forget the oldest of too many."""
        self._forget(now)
        self._keys[session] = (key, now + self.seconds)
        while len(self._keys) > self.most:
            self._keys.popitem(last=False)

    def key_of(self, session: str, now: float) -> str | None:
        """The key of a session that is remembered as closed."""
        self._forget(now)
        found = self._keys.get(session)
        return None if found is None else found[0]

    def _forget(self, now: float) -> None:
        while self._keys and next(iter(self._keys.values()))[1] <= now:
            self._keys.popitem(last=False)


def _new_secret() -> str:
    """Not from ``Ports``: what a seed determines can be guessed."""
    return secrets.token_hex(16)


@attrs.frozen(kw_only=True)
class GatewayStatistics:
    """Counts of one gateway."""

    sessions: int
    opened: int
    tombstones: int
    requests: int


@final
@attrs.define(eq=False, repr=False, kw_only=True)
class AgentGateway:
    """Where agents reach their sessions (``trio_rollout.abc.Gateway``). Made by ``open_gateway``."""

    url: str
    _tokenizer: Tokenizer = attrs.field(alias="tokenizer")
    _parser: Parser = attrs.field(alias="parser")
    _settings: GatewaySettings = attrs.field(alias="settings")
    _context: Context = attrs.field(alias="context")
    _run_sync: RunSync = attrs.field(alias="run_sync")
    _new_secret: Callable[[], str] = attrs.field(alias="new_secret")
    _open: dict[str, GatewaySession] = attrs.field(factory=dict, init=False)
    _opened: int = attrs.field(default=0, init=False)
    _tombstones: Tombstones = attrs.field(init=False)
    app: App = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._tombstones = Tombstones(self._settings.tombstones, self._settings.tombstone_seconds)
        self.app = App(self, self._settings)

    def __repr__(self) -> str:
        return f"<AgentGateway {self.url} {len(self._open)} sessions, {self.app.requests} requests>"

    def statistics(self) -> GatewayStatistics:
        """Counts of this moment."""
        return GatewayStatistics(
            sessions=len(self._open),
            opened=self._opened,
            tombstones=len(self._tombstones),
            requests=self.app.requests,
        )

    def find(self, session: str) -> GatewaySession | None:
        """The open session of this id."""
        return self._open.get(session)

    def key_of(self, session: str) -> str | None:
        """The key of a session that is open or was closed lately."""
        found = self._open.get(session)
        return self._tombstones.key_of(session, trio.current_time()) if found is None else found.api_key

    @asynccontextmanager
    async def open_session(
        self, rollout: Rollout, *, prompt: Prompt, sampling: SamplingParams
    ) -> AsyncGenerator[GatewaySession]:
        """A session whose turns are sampled by ``rollout.generate``.

        Entering does not wait for anybody. Leaving closes it: with the drain time if the block ended well, with none if
        it raised or was cancelled; then it blocks until running requests were aborted.
        """

        async def serve_turns(*, task_status: trio.TaskStatus[GatewaySession]) -> None:
            async with trio.open_nursery() as nursery:
                session = self._session(rollout, prompt, sampling, nursery)
                with self._reachable(session):
                    task_status.started(session)
                    await trio.sleep_forever()

        async def leave(session: GatewaySession, error: BaseException | None) -> None:
            await (session.close() if error is None else session.close_now())

        async with open_service(serve_turns, leave) as session:
            yield session

    def _session(
        self, rollout: Rollout, prompt: Prompt, sampling: SamplingParams, nursery: trio.Nursery
    ) -> GatewaySession:
        name = self._new_secret()
        sampler = Sampler(
            conversation=Conversation(self._tokenizer),
            parser=self._parser,
            settings=self._settings,
            sampling=sampling,
            context=self._context,
            run_sync=self._run_sync,
        )
        return GatewaySession(
            id=name,
            base_url=f"{self.url}/s/{name}",
            api_key=f"sk-{self._new_secret()}",
            rollout=rollout,
            prompt=prompt,
            sampler=sampler,
            settings=self._settings,
            nursery=nursery,
            new_id=self._new_secret,
        )

    @contextmanager
    def _reachable(self, session: GatewaySession) -> Generator[None]:
        self._open[session.id] = session
        self._opened += 1
        try:
            yield
        finally:
            del self._open[session.id]
            self._tombstones.bury(session.id, session.api_key, trio.current_time())


@asynccontextmanager
async def open_gateway(
    servers: InferenceServers,
    *,
    tokenizer: str | Path | Tokenizer,
    settings: GatewaySettings = GatewaySettings(),  # noqa: B008  frozen
    parser: Parser | None = None,
    new_secret: Callable[[], str] = _new_secret,
    run_sync: RunSync = run_in_thread,
) -> AsyncGenerator[AgentGateway]:
    """Serve agents over HTTP; give it to ``open_rollout_engine(gateway=...)``.

    ``tokenizer``: the model's folder, for its chat template. ``parser`` None: the servers' own parsers.
    Entering blocks until the servers have said which they have. Leaving ends it at once: engines are opened inside of it.

    Raises:
      SettingsError: the tokenizer can't be loaded.
      ServerError: no server says which parsers it has, or how long its context is.
      OSError: the port is taken.

    """
    loaded = await run_sync(load_tokenizer, tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    async with httpx.AsyncClient(timeout=30.0) as client:
        context = Context(length=settings.context_length)
        if parser is None:
            parser, context = await _of_servers(servers, client, settings)
        with bind(settings) as bound:
            gateway = AgentGateway(
                url=url_of(settings, bound),
                tokenizer=loaded,
                parser=parser,
                settings=settings,
                context=context,
                run_sync=run_sync,
                new_secret=new_secret,
            )

            async with open_service(partial(serve_app, gateway.app, settings, bound), _leave_at_once):
                yield gateway


async def _leave_at_once(_binds: object, _error: BaseException | None) -> None:
    await trio.lowlevel.checkpoint()


async def _of_servers(
    servers: InferenceServers, client: httpx.AsyncClient, settings: GatewaySettings
) -> tuple[ServerParser, Context]:
    """The servers' parsers and context, unless the settings name them."""
    url = next(server.url for server in servers.statistics().servers)
    calls, reasoning = await parsers_of(client, url)
    context = await context_of(client, url)
    if settings.context_length is not None:
        context = attrs.evolve(context, length=settings.context_length)
    parser = ServerParser(servers, client, settings.tool_parser or calls, settings.reasoning_parser or reasoning)
    return parser, context
