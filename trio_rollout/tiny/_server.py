"""A tiny server in the current Trio run, over TCP or over streams that are handed to it; and ``run_tiny`` for the command line.

Owns: the nursery of the connections and of the step loop, and the scope around it. When that scope is cancelled, the server
ends as a killed process does: connections break, the port closes, nothing is answered.
"""

import logging
import os
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import final

import attrs
import trio

from .._http.server import ServerConnection
from .._util.arguments import require_trio
from .._util.ports import Ports
from .._util.service import open_service
from ..errors import ServerLost, SettingsError
from ._app import App
from ._call import Submission
from ._frontend import Frontend
from ._generate import Answers, Generate
from ._model.model import TinyModel, write_config
from ._model.tokenizer import DATA, TinyTokenizer
from ._scheduler.prefix_cache import PrefixCache
from ._scheduler.scheduler import OutOfVocabulary, Scheduler
from ._script import Script
from ._settings import TinySettings

_LOGGER = logging.getLogger("trio_rollout.tiny")


@attrs.frozen(kw_only=True)
class TinyStatistics:
    """Counts of a tiny server."""

    running: int
    waiting: int
    active: int
    """Registered rids: running, waiting, or parked by a pause."""
    connections: int
    weight_version: str
    paused: bool


@final
@attrs.define(eq=False, repr=False, kw_only=True)
class TinyServer:
    """A running tiny server. ``url`` is empty if it has no port; ``dead`` is set when the server has died or been killed."""

    app: App
    frontend: Frontend
    url: str = ""
    dead: trio.Event = attrs.field(factory=trio.Event)
    failure: Exception | None = None
    """The error that the server died of, unless it was killed."""
    _nursery: trio.Nursery = attrs.field(alias="nursery")
    _scope: trio.CancelScope = attrs.field(alias="scope")
    _connections: set[ServerConnection] = attrs.field(factory=set, init=False)

    def __repr__(self) -> str:
        state = "dead" if self.dead.is_set() else "alive"
        return f"<TinyServer {self.url} {state}, {len(self._connections)} connections | {self.frontend!r}>"

    @property
    def model(self) -> TinyModel:
        """The weights in use."""
        return self.frontend.scheduler.model

    def statistics(self) -> TinyStatistics:
        """Return the counts of this moment."""
        scheduler = self.frontend.scheduler
        return TinyStatistics(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            active=len(self.frontend.registry),
            connections=len(self._connections),
            weight_version=scheduler.version,
            paused=self.frontend.paused,
        )

    def kill(self) -> None:
        """End as a killed process does: every connection closes at once, and nothing more is answered."""
        self.dead.set()
        self._scope.cancel("the tiny server was killed")

    def accept(self, stream: trio.abc.Stream) -> None:
        """Serve a client on ``stream``, which the server takes over.

        Raises:
          BrokenResourceError: the server is dead.
        """
        if self.dead.is_set():
            raise trio.BrokenResourceError("the tiny server is dead")
        self._nursery.start_soon(self.serve, stream)

    async def listen(self, host: str, port: int) -> None:
        """Accept clients on ``host:port`` (0: a free port); sets ``url``.

        Raises:
          OSError: the port is taken.
        """
        listeners = await trio.open_tcp_listeners(port, host=host)
        bound = listeners[0].socket.getsockname()
        self.url = f"http://{f'[{bound[0]}]' if ':' in bound[0] else bound[0]}:{bound[1]}"
        await self._nursery.start(trio.serve_listeners, self.serve, listeners)

    async def serve(self, stream: trio.abc.Stream) -> None:
        """Serve one client until its connection ends; for a caller that has a nursery for it."""
        connection = ServerConnection(stream)
        self._connections.add(connection)
        try:
            async with stream:
                await connection.serve(self.app.answer)
        except Exception:
            _LOGGER.exception("a connection ended with an error")
        finally:
            self._connections.discard(connection)

    async def _step(self) -> None:
        try:
            await self.frontend.run()
        except OutOfVocabulary as error:
            _LOGGER.exception("the tiny server dies of a token id outside its vocabulary, as a real one would")
            self.failure = error
            self.kill()


def _model(settings: TinySettings, vocab: int) -> TinyModel:
    if settings.weights is not None:
        try:
            return TinyModel.load(settings.weights, context_tokens=settings.context_tokens)
        except (OSError, ValueError) as error:
            raise SettingsError(f"TinySettings.weights: cannot use {settings.weights}: {error}") from error
    return TinyModel.random(
        vocab=settings.vocab or vocab,
        context_tokens=settings.context_tokens,
        rows=settings.rows,
        scale=settings.scale,
        seed=settings.seed,
    )


def _build(
    settings: TinySettings,
    model: TinyModel | None,
    ports: Ports,
    paths: ExitStack,
    nursery: trio.Nursery,
    scope: trio.CancelScope,
) -> TinyServer:
    tokenizer = TinyTokenizer.load()
    model = model or _model(settings, tokenizer.vocab)
    wanted_eos = tokenizer.end_id if settings.eos_id is None else settings.eos_id
    eos_id = wanted_eos if 0 <= wanted_eos < model.vocab else None
    scheduler = Scheduler(
        model=model,
        piece=tokenizer.piece,
        max_running=settings.max_running,
        max_queued=settings.max_queued,
        cache=PrefixCache(settings.cache_tokens),
    )
    script = None if settings.script is None else Script.load(settings.script)
    submission = Submission(settings=settings, tokenizer=tokenizer, eos_id=eos_id, script=script, new_rid=ports.new_rid)
    frontend = Frontend(settings=settings, scheduler=scheduler, submission=submission)
    folder = DATA
    if model.vocab != tokenizer.vocab:
        folder = Path(paths.enter_context(tempfile.TemporaryDirectory(prefix="trio-rollout-tiny-")))
        longest = settings.context_length
        write_config(folder, vocab_size=model.vocab, eos_token_id=eos_id, max_position_embeddings=longest)
    generate = Generate(frontend=frontend, answers=Answers(scheduler=scheduler, tokenizer=tokenizer))
    app = App(generate=generate, frontend=frontend, model_path=str(folder))
    return TinyServer(app=app, frontend=frontend, nursery=nursery, scope=scope)


@asynccontextmanager
async def open_tiny(
    settings: TinySettings | None = None, *, model: TinyModel | None = None, ports: Ports | None = None
) -> AsyncGenerator[TinyServer]:
    """Run a tiny server without a port: clients are handed to ``server.accept(stream)``.

    Entering does not block. Leaving kills the server and breaks its connections. If it dies before that, of a token id
    outside its vocabulary, the body is not disturbed: ``server.dead`` is set, and ``server.failure`` is the error.
    """
    settings = settings or TinySettings()
    ports = ports or Ports()

    async def serve(*, task_status: trio.TaskStatus[TinyServer]) -> None:
        with ExitStack() as paths, trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                server = _build(settings, model, ports, paths, nursery, scope)
                nursery.start_soon(server._step)
                task_status.started(server)

    async def leave(server: TinyServer, _error: BaseException | None) -> None:
        server.kill()
        await trio.lowlevel.checkpoint()

    async with open_service(serve, leave) as server:
        yield server


@asynccontextmanager
async def open_tiny_server(
    settings: TinySettings | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    model: TinyModel | None = None,
    ports: Ports | None = None,
) -> AsyncGenerator[TinyServer]:
    """Run a tiny server on ``host:port`` (0: a free port, see ``server.url``) in the current Trio run.

    Entering blocks until the server answers. Leaving kills it, as in ``open_tiny``.

    Raises:
      OSError: the port is taken.
    """
    require_trio("open_tiny_server")
    async with open_tiny(settings, model=model, ports=ports) as server:
        await server.listen(host, port)
        yield server


_STDIN = 0


async def _killed_at_end_of_stdin(server: TinyServer) -> None:
    async with trio.lowlevel.FdStream(os.dup(_STDIN)) as stdin:
        while await stdin.receive_some(4096):
            pass
    server.kill()


async def _serve(
    settings: TinySettings, host: str, port: int, announce: Callable[[str], None], *, until_stdin_closes: bool
) -> None:
    async with open_tiny_server(settings, host=host, port=port) as server:
        announce(server.url)
        async with trio.open_nursery() as nursery:
            if until_stdin_closes:
                nursery.start_soon(_killed_at_end_of_stdin, server)
            await server.dead.wait()
            nursery.cancel_scope.cancel()
        if server.failure is not None:
            raise ServerLost(f"the tiny server died: {server.failure}") from server.failure


def run_tiny(
    settings: TinySettings, host: str, port: int, announce: Callable[[str], None], *, until_stdin_closes: bool = False
) -> None:
    """Serve on ``host:port`` (0: a free port); ``announce`` is called with the URL once the server answers.

    With ``until_stdin_closes``, return when the process at the other end of stdin has ended; otherwise never return.

    Raises:
      ServerLost: a token id outside the vocabulary came in, and the server died of that as a real one does.
      OSError: the port is taken.
    """
    trio.run(partial(_serve, until_stdin_closes=until_stdin_closes), settings, host, port, announce)
