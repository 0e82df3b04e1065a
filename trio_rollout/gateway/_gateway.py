"""The gateway: one HTTP server for the sessions of all rollouts, in a scope around the engine's.

``run_agent`` runs a command-line agent against its session, in any sandbox.
"""

import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar, final

import attrs
import trio

from .._core.sampling import SamplingParams
from .._core.values import Prompt
from .._util.arguments import require, require_trio
from .._util.service import open_service
from .._util.threads import RunSync, run_in_thread
from ..abc import InferenceServers, Rollout, Session
from ..tokenizer import Tokenizer, load_tokenizer
from ._app import App
from ._conversation import Conversation
from ._http_server import bind, serve_app, url_of
from ._parsers import Parser, client_of, parser_of
from ._sampling import Sampler
from ._session import GatewaySession, SessionDirectory, Tombstones
from ._settings import GatewaySettings
from ._turn import TurnIds
from ._values import ContextLimits

R_co = TypeVar("R_co", covariant=True)


def _new_secret() -> str:
    """Return an unguessable id. Not from ``Ports``: a secret that follows from a seed can be guessed."""
    return secrets.token_hex(16)


@asynccontextmanager
async def open_gateway(
    servers: InferenceServers,
    *,
    tokenizer: str | Path | Tokenizer,
    settings: GatewaySettings = GatewaySettings(),  # noqa: B008  frozen
    parser: Parser | None = None,
) -> AsyncGenerator["AgentGateway"]:
    """Serve agents over HTTP; give the gateway to ``open_rollout_engine(gateway=...)``.

    ``tokenizer`` is the model's folder, for its chat template, or a loaded one. ``parser`` finds tool calls and reasoning
    in answers; None uses the parsers of the inference servers. Entering blocks until the servers have named their parsers
    and their context length. Leaving closes every connection at once: open the engine inside the gateway.

    Raises:
      SettingsError: the tokenizer can't be loaded.
      ServerError: no server names its parsers or the length of its context.
      OSError: the port is taken.
    """
    require_trio("open_gateway")
    require("settings", settings, GatewaySettings, "GatewaySettings")
    require("tokenizer", tokenizer, (str, Path, Tokenizer), "a folder's path, or what load_tokenizer() gives")
    loaded = await run_in_thread(load_tokenizer, tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    async with client_of(servers) as client:
        limits = ContextLimits(length=settings.context_length)
        if parser is None:
            parser, limits = await parser_of(servers, client, settings)
        with bind(settings) as bound:
            gateway = AgentGateway(
                url=url_of(settings, bound), tokenizer=loaded, parser=parser, settings=settings, limits=limits
            )
            async with open_service(partial(serve_app, gateway.app, settings, bound)):
                yield gateway


@attrs.frozen(kw_only=True)
class GatewayStatistics:
    """Counts of one gateway."""

    sessions: int
    """Sessions that are open now."""
    opened: int
    """Sessions that were opened so far."""
    tombstones: int
    """Closed sessions that are still remembered."""
    requests: int
    """HTTP requests that are being answered."""


@final
@attrs.define(eq=False, repr=False, kw_only=True)
class AgentGateway:
    """A running gateway (``trio_rollout.abc.Gateway``). Made by ``open_gateway``."""

    url: str
    _tokenizer: Tokenizer = attrs.field(alias="tokenizer")
    _parser: Parser = attrs.field(alias="parser")
    _settings: GatewaySettings = attrs.field(alias="settings")
    _limits: ContextLimits = attrs.field(alias="limits")
    _run_sync: RunSync = attrs.field(alias="run_sync", default=run_in_thread)
    _new_secret: Callable[[], str] = attrs.field(alias="new_secret", default=_new_secret)
    directory: SessionDirectory = attrs.field(init=False)
    app: App = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        tombstones = Tombstones(self._settings.tombstones, self._settings.tombstone_seconds)
        self.directory = SessionDirectory(tombstones)
        self.app = App(self.directory, self._settings, self._run_sync)

    def __repr__(self) -> str:
        return f"<AgentGateway {self.url} {len(self.directory)} sessions, {self.app.requests} requests>"

    def statistics(self) -> GatewayStatistics:
        """Return the current counts."""
        return GatewayStatistics(
            sessions=len(self.directory),
            opened=self.directory.opened,
            tombstones=len(self.directory.tombstones),
            requests=self.app.requests,
        )

    @asynccontextmanager
    async def open_session(
        self, rollout: Rollout, *, prompt: Prompt, sampling: SamplingParams
    ) -> AsyncGenerator[GatewaySession]:
        """Open a session whose turns are sampled by ``rollout.generate``.

        Entering does not wait. Leaving closes the session and blocks until its running requests have ended: they get the
        drain time if the block ended well, and are aborted at once if the block raised or was cancelled.
        """

        async def serve_turns(*, task_status: trio.TaskStatus[GatewaySession]) -> None:
            async with trio.open_nursery() as nursery:
                session = self._session(rollout, prompt, sampling, nursery)
                with self.directory.listed(session):
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
            limits=self._limits,
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
            ids=TurnIds(f"{prompt.group_id}#{rollout.index}"),
        )


class AgentSandbox(Protocol[R_co]):
    """The part of a sandbox that ``run_agent`` uses; ``trio_rollout.tools.Sandbox`` has it."""

    async def exec(
        self,
        argv: list[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  expiry is a result here, unlike a cancelled scope
    ) -> R_co:
        """Run a command until it exits. After ``timeout`` seconds it is killed with all it started; that is a result."""
        ...


def agent_environment(session: Session) -> dict[str, str]:
    """Return the environment in which OpenAI's and Anthropic's clients, and agents built on them, find this session."""
    return {
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_BASE": session.base_url,
        "OPENAI_API_KEY": session.api_key,
        "ANTHROPIC_BASE_URL": session.base_url,
        "ANTHROPIC_API_KEY": session.api_key,
        "NO_PROXY": "*",
    }


async def run_agent(
    command: list[str],
    session: Session,
    sandbox: AgentSandbox[R_co],
    *,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    seconds: float | None = None,
) -> R_co:
    """Run a command-line agent in the sandbox, in the environment ``agent_environment(session)``, then ``env``.

    Blocks until the agent has exited, or for ``seconds``, and never longer than the rollout has left. The agent's process
    tree is dead when this returns; cancelled, it is killed first. Call this inside the session's block, so that the agent
    is gone before its session closes. The result says how the agent exited; the reward may judge it.

    Raises:
      ToolError: the sandbox failed.
    """
    return await sandbox.exec(command, cwd=cwd, env={**agent_environment(session), **(env or {})}, timeout=seconds)
