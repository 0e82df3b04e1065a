"""Control calls to all servers: pause, resume, versions, flush, abort until idle, health.

Each is concurrent over the servers and bounded for each of them, so one silent server never holds up the others.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final

import trio

from .._core.enums import PauseMode
from .._util.time import wait_s
from ..errors import ServerError
from ._calls import Unreachable, call, is_ready, learn_version, load, on_each
from ._fleet import Fleet
from ._owed_aborts import REPEAT_S
from ._server import Server
from ._wire import ABORT, CONTINUE, FLUSH, PAUSE, abort_all_body, flushed, pause_body

_log: Final = logging.getLogger("trio_rollout.sglang")
# A server that was lost before it could be resumed gets one short try here; the probe goes on after that.
LOST_RESUME_S: Final = 2.0


def _answering(fleet: Fleet) -> list[Server]:
    return [server for server in fleet.servers if server.lost is None]


async def _pause_one(fleet: Fleet, server: Server, mode: PauseMode, *, until: float) -> None:
    """Pause one server, once it has answered the resumes that are on their way to it; one that does not is lost."""
    with trio.move_on_at(until):
        while server.resumes:
            await fleet.changed()
    if server.resumes:
        fleet.lose(server, "a resume of it is unanswered, and no pause may overtake it")
    if server.lost is not None:
        return
    server.paused = server.pause_unanswered = True
    try:
        await _ask_to_pause(server, mode, until=until)
    except ServerError as error:
        fleet.lose(server, f"could not be paused: {error}")
        raise


async def _ask_to_pause(server: Server, mode: PauseMode, *, until: float) -> None:
    """Shielded: left without its answer, it might be carried out after the resume, which comes on another connection."""
    seconds = until - trio.current_time()
    with trio.move_on_at(until, shield=True):
        reply = await call(server, "POST", PAUSE, pause_body(mode))
        server.pause_unanswered = False
        if not reply.ok:
            raise reply.error()
        return
    raise ServerError(f"no answer within {seconds:g} s")


async def pause(fleet: Fleet, mode: PauseMode, *, seconds: float) -> None:
    """Pause every server that is not lost; see ``InferenceServers.pause``."""
    servers, until = _answering(fleet), trio.current_time() + seconds
    fleet.pausing(servers)
    outcome = await on_each(
        servers,
        lambda server: _pause_one(fleet, server, mode, until=until),
        seconds=seconds,
        what=f"POST {PAUSE} ({mode.value}) to",
    )
    if not outcome.failures:
        return
    with trio.move_on_after(seconds, shield=True):
        await resume(fleet, seconds=seconds)
    raise ServerError(f"{len(outcome.failures)} of {len(servers)} servers could not be paused: {outcome}")


async def continue_once(fleet: Fleet, server: Server, *, until: float) -> None:
    """Ask a server to continue, and note what it says; one that is down isn't paused any more.

    Blocks until it answers, at most until then, shielded: a pause that followed might be overtaken by a resume that was left alone.
    One that does not answer is lost.
    """
    server.resumes += 1
    try:
        with trio.move_on_at(until, shield=True) as limit:
            reply = await call(server, "POST", CONTINUE, {})
            if not reply.ok:
                raise reply.error()
            fleet.resumed(server)
        server.down = False
        if limit.cancelled_caught:
            fleet.lose(server, "a resume was left without its answer")
    except Unreachable as error:
        fleet.lose(server, str(error))
        server.down = True
    except ServerError as error:
        _log.warning("POST %s%s: %s", server.url, CONTINUE, error)
        server.down = False
    finally:
        server.resumes -= 1
        fleet.notify()


async def _continue(fleet: Fleet, server: Server, *, until: float) -> None:
    """Ask a server to continue until it says that it does, is down, or the time is over."""
    while trio.current_time() < until:
        next_try = trio.current_time() + REPEAT_S
        await continue_once(fleet, server, until=until)
        if not server.paused or server.down:
            return
        await wait_s(max(0.0, min(next_try, until) - trio.current_time()))


async def resume(fleet: Fleet, *, seconds: float) -> None:
    """Resume every server that may have been paused; see ``SGLangServers.resume``."""
    maybe_paused = [server for server in fleet.servers if server.paused]
    began = trio.current_time()

    async def ask(server: Server) -> bool:
        limit = seconds if server.lost is None else min(seconds, LOST_RESUME_S)
        await _continue(fleet, server, until=began + limit)
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


async def resume_quietly(fleet: Fleet, *, seconds: float) -> None:
    """A last try to resume what could not be resumed in its time; whoever does not answer was named before."""
    until = trio.current_time() + seconds
    async with trio.open_nursery() as nursery:
        for server in fleet.servers:
            if server.paused and not server.down:
                nursery.start_soon(partial(_continue, fleet, server, until=until))


async def versions(fleet: Fleet, *, seconds: float) -> Mapping[str, int | None]:
    """Each answering server's weight version; one that does not answer is lost and left out."""
    outcome = await on_each(_answering(fleet), learn_version, seconds=seconds, what="GET model info of")
    for server, error in outcome.failures.items():
        fleet.lose(server, f"does not name its version: {error}")
    fleet.notify()
    return {server.url: version for server, version in outcome.answers.items()}


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
