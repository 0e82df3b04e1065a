"""The questions that servers answer about themselves, each as one call through httpx, to one server or to many at once."""

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import attrs
import httpx  # noqa: ASYNC127  the client users have
import trio

from ..errors import ServerError, ServerLost
from ._server import Server
from ._wire import (
    LOADS,
    MODEL_INFO,
    READY,
    SERVER_INFO,
    WORKERS,
    ModelInfo,
    decode_context_length,
    decode_load,
    decode_model_info,
    decode_workers,
    error_of,
    words_of,
)

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class Reply:
    """A control call's answer."""

    attempted: str
    status: int
    body: bytes

    @property
    def ok(self) -> bool:
        """True if the status says success."""
        return self.status == httpx.codes.OK

    @property
    def words(self) -> str:
        """The answer's message, for people."""
        return words_of(self.body)

    def error(self) -> ServerError:
        """Return the exception for an answer that was not expected."""
        return error_of(self.attempted, self.status, self.words)


class Unanswered(ServerLost):
    """The connection ended without an answer, or the answer is not HTTP: the server may or may not have done what it was asked."""


class Unreachable(Unanswered):
    """No connection could be opened: the server is down and was not asked."""


async def call(server: Server, method: str, path: str, body: Mapping[str, object] | None = None) -> Reply:
    """Make one control call; any status is an answer.

    Blocks until the answer is there; the caller bounds it.

    Raises:
      Unreachable: no connection could be opened.
      Unanswered: the connection broke, or the answer is not HTTP.
    """
    attempted = f"{method} {server.url}{path}"
    try:
        response = await server.client.request(method, path, json=body)
    except httpx.ConnectError as error:
        raise Unreachable(str(error)) from error
    except httpx.TransportError as error:
        raise Unanswered(f"{attempted}: {error}") from error
    return Reply(attempted=attempted, status=response.status_code, body=response.content)


async def _ask(server: Server, routes: tuple[str, ...]) -> Reply:
    """Return the answer of the first of these routes that the server has; older builds have the others.

    Raises:
      ServerError: none of them answers with success; the message has the words of the first.
    """
    first: Reply | None = None
    for route in routes:
        reply = await call(server, "GET", route)
        if reply.ok:
            return reply
        first = first or reply
        if reply.status not in {httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED}:
            break
    if first is None:
        raise AssertionError("there is no route to ask")
    raise first.error()


async def model_info(server: Server) -> ModelInfo:
    """Ask a server for its model and weight version.

    Raises:
      ServerError: it can't be reached or does not speak SGLang; the message has its words.
    """
    reply = await _ask(server, MODEL_INFO)
    return decode_model_info(reply.attempted, reply.body)


async def context_length(server: Server) -> int | None:
    """Ask a server how long prompt and output may be together; None if it does not say.

    Raises:
      ServerError: it can't be reached.
    """
    reply = await _ask(server, SERVER_INFO)
    return decode_context_length(reply.attempted, reply.body)


async def is_ready(server: Server) -> bool:
    """Return True if a server says that it is up and not paused. Builds without that route are taken to be.

    Raises:
      ServerError: it can't be reached.
    """
    reply = await call(server, "GET", READY)
    return reply.ok or reply.status in {httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED}


async def workers(router: Server) -> Sequence[str]:
    """Ask a router for the URLs of its workers.

    Raises:
      ServerError: it can't be reached or is not a router.
    """
    reply = await _ask(router, WORKERS)
    return decode_workers(reply.attempted, reply.body)


async def load(server: Server) -> int:
    """Return how many requests a server runs or holds, those of other clients too.

    Raises:
      ServerError: it does not say.
    """
    reply = await call(server, "GET", LOADS)
    if not reply.ok:
        raise reply.error()
    return decode_load(reply.attempted, reply.body)


@attrs.frozen
class Outcome(Generic[T]):
    """The answers and the failures of the same call to several servers."""

    answers: dict[Server, T] = attrs.field(factory=dict)
    failures: dict[Server, ServerError] = attrs.field(factory=dict)

    def __str__(self) -> str:
        return "; ".join(f"{server.url}: {error}" for server, error in self.failures.items())


async def on_each(
    servers: Iterable[Server], ask: Callable[[Server], Awaitable[T]], *, what: str, seconds: float = math.inf
) -> Outcome[T]:
    """Make the same call to several servers at once, each within ``seconds``, unless ``ask`` bounds itself.

    Blocks at most so long. Cancelled, some servers may have been asked.
    """
    outcome: Outcome[T] = Outcome()

    async def one(server: Server) -> None:
        with trio.move_on_after(seconds) as limit:
            try:
                outcome.answers[server] = await ask(server)
            except ServerError as error:
                outcome.failures[server] = error
        if limit.cancelled_caught:
            outcome.failures[server] = ServerError(f"{what} {server.url}: no answer within {seconds:g} s")

    async with trio.open_nursery() as nursery:
        for server in servers:
            nursery.start_soon(one, server)
    return outcome
