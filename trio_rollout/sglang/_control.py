"""Control calls to all servers: pause, resume, versions, flush, abort until idle, health.

Each is concurrent over the servers and bounded for each of them, so one silent server never holds up the others.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import trio

from .._backoff import wait_s
from .._core.enums import PauseMode
from ..errors import ServerError
from ._calls import Reply, Unreachable, call, is_ready, load, model_info, on_each
from ._fleet import Fleet
from ._leaving import REPEAT_S
from ._server import Server
from ._wire import ABORT, CONTINUE, FLUSH, PAUSE, abort_all_body, flushed, pause_body

_log: Final = logging.getLogger("trio_rollout.sglang")
# A server that was lost before it could be resumed gets one short try here; the probe goes on after that.
_LOST_RESUME_S: Final = 2.0


def _answering(fleet: Fleet) -> list[Server]:
    return [server for server in fleet.servers if server.lost is None]


async def pause(fleet: Fleet, mode: PauseMode, *, seconds: float) -> None:
    """Pause every server that is not lost; see ``InferenceServers.pause``."""

    give_up = trio.current_time() + seconds

    async def ask(server: Server) -> None:
        async with server.pausing:
            if server.lost is not None:
                return  # meanwhile: as those that were lost before
            server.paused = True  # a resume may have been answered since
            # Left without its answer, it might be carried out after the resume: that comes on another connection.
            reply: Reply | None = None
            with trio.move_on_at(give_up, shield=True):
                reply = await call(server, "POST", PAUSE, pause_body(mode))
        if reply is None:
            server.pause_unanswered = True
            raise ServerError(f"no answer within {seconds:g} s")
        if not reply.ok:
            raise reply.error()

    servers = _answering(fleet)
    fleet.pausing(servers)
    outcome = await on_each(servers, ask, seconds=seconds, what=f"POST {PAUSE} ({mode.value}) to")
    if not outcome.failures:
        return
    for server, error in outcome.failures.items():
        fleet.lose(server, f"could not be paused: {error}")
    with trio.move_on_after(seconds, shield=True):
        await resume(fleet, seconds=seconds)
    raise ServerError(f"{len(outcome.failures)} of {len(servers)} servers could not be paused: {outcome}")


async def continue_once(fleet: Fleet, server: Server) -> None:
    """Ask a server to continue, and note what it says; one that is down isn't paused any more. The caller holds ``server.pausing``.

    Cancelled, the server is lost: the call may still be carried out, and no pause must go to it until it has answered another.
    """
    try:
        reply = await call(server, "POST", CONTINUE, {})
    except trio.Cancelled:
        fleet.lose(server, "a resume was left without its answer")
        raise
    except Unreachable as error:
        fleet.lose(server, str(error))
        server.down = True
        return
    except ServerError as error:
        _log.warning("POST %s%s: %s", server.url, CONTINUE, error)
    else:
        if reply.ok:
            fleet.resumed(server)
        else:
            _log.warning("%s", reply.error())
    server.down = False


async def _continue(fleet: Fleet, server: Server) -> None:
    """Ask a server to continue until it says that it does, or is down. Blocks until then: the caller bounds it."""
    while True:
        next_try = trio.current_time() + REPEAT_S
        async with server.pausing:
            if server.paused:
                await continue_once(fleet, server)
        if not server.paused or server.down:
            return
        await wait_s(max(0.0, next_try - trio.current_time()))


async def resume(fleet: Fleet, *, seconds: float) -> None:
    """Resume every server that may have been paused; see ``SGLangServers.resume``."""
    maybe_paused = [server for server in fleet.servers if server.paused]

    async def ask(server: Server) -> bool:
        with trio.move_on_after(seconds if server.lost is None else min(seconds, _LOST_RESUME_S)):
            await _continue(fleet, server)
        return server.paused and not server.down

    try:
        outcome = await on_each(maybe_paused, ask, seconds=seconds, what=f"POST {CONTINUE} to")
    finally:
        fleet.window_over()  # what is still paused is the probe's from here on
    stuck = [server for server in maybe_paused if outcome.answers.get(server, True)]
    for server in stuck:
        fleet.lose(server, f"could not be resumed within {seconds:g} s")
    if stuck:
        message = f"{len(stuck)} of {len(maybe_paused)} servers could not be resumed: " + ", ".join(
            f"{server.url} ({server.lost})" for server in stuck
        )
        _log.error("%s; the probe goes on trying", message)
        raise ServerError(message)


async def resume_quietly(fleet: Fleet) -> None:
    """A last try to resume what could not be resumed in its time; whoever does not answer was named before."""
    async with trio.open_nursery() as nursery:
        for server in fleet.servers:
            if server.paused and not server.down:
                nursery.start_soon(_continue, fleet, server)


async def versions(fleet: Fleet, *, seconds: float) -> Mapping[str, int | None]:
    """Each answering server's weight version; one that does not answer is lost and left out."""
    outcome = await on_each(_answering(fleet), model_info, seconds=seconds, what="GET model info of")
    named: dict[str, int | None] = {}
    for server, error in outcome.failures.items():
        fleet.lose(server, f"does not name its version: {error}")
    for server, info in outcome.answers.items():
        named[server.url] = server.naming.observe(info.weight_version)
    fleet.notify()
    return named


async def _all_or_error(fleet: Fleet, ask: Callable[[Server], Awaitable[None]], *, seconds: float, what: str) -> None:
    servers = _answering(fleet)
    outcome = await on_each(servers, ask, seconds=seconds, what=what)
    if outcome.failures:
        raise ServerError(f"{what}: failed on {len(outcome.failures)} of {len(servers)} servers: {outcome}")


async def _flush(server: Server) -> None:
    """Flush one server's cache, again and again while it refuses because requests are still leaving."""
    while True:
        reply = await call(server, "POST", FLUSH)
        if flushed(reply.status, reply.words):
            return
        _log.info("%s", reply.error())
        await wait_s(REPEAT_S)


async def flush_cache(fleet: Fleet, *, seconds: float) -> None:
    """Empty every answering server's prefix cache; see ``InferenceServers.flush_cache``."""
    await _all_or_error(fleet, _flush, seconds=seconds, what="flush")


async def _abort_until_idle(server: Server) -> None:
    while True:
        next_try = trio.current_time() + REPEAT_S
        reply = await call(server, "POST", ABORT, abort_all_body())
        if not reply.ok:
            raise reply.error()
        if await load(server) == 0:
            return
        await wait_s(max(0.0, next_try - trio.current_time()))


async def abort_until_idle(fleet: Fleet, *, seconds: float) -> None:
    """Abort everything on every answering server until none runs anything."""
    await _all_or_error(fleet, _abort_until_idle, seconds=seconds, what="abort until idle")


async def health(fleet: Fleet, *, seconds: float) -> Mapping[str, bool]:
    """Whether each server says that it is ready."""
    outcome = await on_each(fleet.servers, is_ready, seconds=seconds, what="GET /ready of")
    return {server.url: outcome.answers.get(server, False) for server in fleet.servers}
