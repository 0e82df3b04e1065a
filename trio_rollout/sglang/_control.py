"""Control calls to all servers: pause, resume, versions, flush, abort until idle, health.

Each goes to all servers at once and is bounded for each of them, so a silent server never holds up the others. Pauses, resumes
and questions about a server's state go through the server's queue, and their answers to its table. The other calls do not
change what is known about a server, and wait for nothing.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final

import attrs
import trio

from .._core.enums import PauseMode
from .._core.server import Event, State, Told
from .._util.time import try_every
from ..errors import ServerError
from ._calls import Unanswered, Unreachable, call, is_ready, load, model_info, on_each
from ._cancellation import LOOK_S, count_orphans
from ._fleet import Fleet
from ._server import Server
from ._wire import ABORT, CONTINUE, FLUSH, PAUSE, abort_all_body, flushed, pause_body

_REPEAT_S: Final = 0.5
"""A call that a server refuses for now is repeated, but not more often than this."""
_log: Final = logging.getLogger("trio_rollout.sglang")
# A server that was lost before it could be resumed gets one short try here; the probe goes on after that.
LOST_RESUME_S: Final = 2.0


async def converse(
    server: Server, opens: Event, talk: Callable[[], Awaitable[Told]], *, until: float, failing: str = ""
) -> Told:
    """Make one call of the server's queue, and tell its table that the call is sent and how it ended.

    Returns the answer that ``talk`` makes of it, or its failure; ``failing`` begins the reason. Blocks at most until then.
    Cancelled, the question stays unanswered.
    """
    question, seconds = server.opens(opens), until - trio.current_time()
    told = Told(Event.TIMED_OUT, why=f"{failing}no answer within {seconds:.3g} s")
    with trio.move_on_at(until):
        try:
            told = await talk()
        except Unreachable as error:
            told = Told(Event.UNREACHABLE, why=f"{failing}{error}")
        except Unanswered as error:
            told = Told(Event.BROKEN, why=f"{failing}{error}")
        except ServerError as error:
            told = Told(Event.REFUSED, why=f"{failing}{error}")
    server.tell(attrs.evolve(told, question=question))
    return told


# --- pause


async def _ask_to_pause(server: Server, mode: PauseMode) -> Told:
    reply = await call(server, "POST", PAUSE, pause_body(mode))
    if not reply.ok:
        raise reply.error()
    return Told(Event.PAUSE_ANSWERED)


async def _pause_one(fleet: Fleet, server: Server, mode: PauseMode, *, until: float, abort_s: float) -> None:
    """Pause one server, unless it is lost when its turn comes. Paused in mode ABORT, it runs nothing, or that is counted.

    Raises:
      ServerError: it did not say that it is paused; it is lost.
    """

    async def pause_it() -> Told | None:
        if not server.standing.joins_windows:
            return None
        talk = partial(_ask_to_pause, server, mode)
        return await converse(server, Event.PAUSE_SENT, talk, until=until, failing="could not be paused: ")

    told = await server.calls.command(pause_it, until=until)
    if told is None and not server.standing.lost:
        server.tell(Told(Event.GIVEN_UP, why="the call before its pause is unanswered, and no pause may overtake it"))
    if told is not None and told.event is not Event.PAUSE_ANSWERED:
        raise ServerError(told.why)
    if told is not None and mode is PauseMode.ABORT:
        await _until_quiet(fleet, server, until=min(until, trio.current_time() + abort_s))


async def _until_quiet(fleet: Fleet, server: Server, *, until: float) -> None:
    """See that a server that has said it is paused has ended everything, as mode ABORT means.

    One that still runs something is told to abort everything, until it runs nothing. Blocks at most until then, and for a last
    look; what runs then and is not waited for counts as orphans. A server that does not say what it runs is believed.
    """
    running = 0
    try:
        with trio.move_on_at(until):
            running = await load(server)
            if not running or await try_every(_REPEAT_S, partial(_abort_all, server)):
                return
    except ServerError as error:
        _log.info("%s says that it is paused, and does not say what it runs: %s", server.url, error)
        return
    with trio.move_on_after(LOOK_S):
        await count_orphans(fleet, server, most=max(0, running - server.sent))


async def pause(fleet: Fleet, mode: PauseMode, *, view: object, seconds: float, abort_s: float) -> None:
    """Pause every server that is not lost; see ``InferenceServers.pause``. Raises RuntimeError if the servers were left.

    A server that was lost before because it was found paused is taken over. If that fails it stays lost, and the window goes on.
    """
    fleet.roster.check()
    fleet.require_window_of(view, f"pause({mode})")
    servers, until = fleet.in_windows(), trio.current_time() + seconds
    found = {server for server in servers if server.standing.found_paused}
    fleet.begin_window(view)
    outcome = await on_each(
        servers,
        lambda server: _pause_one(fleet, server, mode, until=until, abort_s=abort_s),
        what=f"POST {PAUSE} ({mode.value}) to",
    )
    fleet.roster.check()
    if outcome.failures.keys() <= found:
        return
    with trio.move_on_after(seconds, shield=True):
        await resume(fleet, view=view, seconds=seconds)
    raise ServerError(f"{len(outcome.failures)} of {len(servers)} servers could not be paused: {outcome}")


# --- resume


async def _ask_to_continue(server: Server) -> Told:
    reply = await call(server, "POST", CONTINUE, {})
    if not reply.ok:
        raise reply.error()
    return Told(Event.RESUME_ANSWERED)


async def continue_once(server: Server, *, until: float) -> None:
    """Ask a server to continue, unless it has said so when its turn comes. Blocks until its answer, at most until then."""

    async def resume_it() -> None:
        if not server.standing.may_be_paused:
            return
        talk = partial(_ask_to_continue, server)
        told = await converse(server, Event.RESUME_SENT, talk, until=until, failing="could not be resumed: ")
        if told.event in {Event.REFUSED, Event.BROKEN}:
            _log.warning("server %s %s", server.url, told.why)

    await server.calls.command(resume_it, until=until)


def _is_stuck(server: Server) -> bool:
    """Return True if it may be paused; a server that is down runs nothing, paused or not."""
    return server.standing.may_be_paused and server.standing.state is not State.DOWN


async def _continue(server: Server, *, until: float) -> bool:
    """Ask a server to continue until it says that it does or is down; return False once the time is over."""

    async def attempt() -> bool:
        await continue_once(server, until=until)
        return not _is_stuck(server)

    return await try_every(_REPEAT_S, attempt, until=until)


async def resume(fleet: Fleet, *, view: object, seconds: float) -> None:
    """Resume every server that may have been paused; see ``SGLangServers.resume``."""
    fleet.require_window_of(view, "resume()")
    maybe_paused = [server for server in fleet.servers if server.standing.may_be_paused]
    began = trio.current_time()

    async def ask(server: Server) -> bool:
        limit = min(seconds, LOST_RESUME_S) if server.standing.lost else seconds
        return await _continue(server, until=began + limit)

    try:
        outcome = await on_each(maybe_paused, ask, what=f"POST {CONTINUE} to")
    finally:
        fleet.end_window()  # what is still paused is the probe's from here on
    stuck = [server for server in maybe_paused if not outcome.answers.get(server)]
    for server in stuck:
        server.tell(Told(Event.GIVEN_UP, why=f"could not be resumed within {seconds:g} s"))
    if stuck:
        message = f"{len(stuck)} of {len(maybe_paused)} servers could not be resumed: " + ", ".join(
            f"{server.url} ({server.standing.why})" for server in stuck
        )
        _log.error("%s; the probe goes on trying", message)
        raise ServerError(message)


async def resume_quietly(fleet: Fleet, *, seconds: float) -> None:
    """Try for the last time to resume what could not be resumed in its time. Errors were reported before."""
    until = trio.current_time() + seconds
    async with trio.open_nursery() as nursery:
        for server in fleet.servers:
            if _is_stuck(server):
                nursery.start_soon(partial(_continue, server, until=until))


# --- versions


async def _ask_for_version(server: Server) -> Told:
    return Told(Event.VERSION_NAMED, name=(await model_info(server)).weight_version)


async def _learn_version(server: Server, *, until: float) -> int | None:
    """Ask a server which weights it has: the number, or None if it does not name one.

    Raises:
      ServerError: it does not say, and is lost; or its turn to be asked did not come in time, or it was lost before.
    """

    async def ask_it() -> Told | None:
        if not server.standing.joins_windows:
            return None
        talk = partial(_ask_for_version, server)
        return await converse(server, Event.ASKED, talk, until=until, failing="does not name its version: ")

    told = await server.calls.ask(ask_it, until=until)
    if told is None or told.event is not Event.VERSION_NAMED:
        raise ServerError("was not asked" if told is None else str(told.why))
    return server.weights.number


async def versions(fleet: Fleet, *, seconds: float) -> Mapping[str, int | None]:
    """Each answering server's weight version; one that does not answer is lost and left out.

    Raises:
      RuntimeError: the servers were left.
    """
    fleet.roster.check()
    learn = partial(_learn_version, until=trio.current_time() + seconds)
    outcome = await on_each(fleet.in_windows(), learn, what="GET model info of")
    fleet.roster.check()
    return {server.url: version for server, version in outcome.answers.items()}


# --- the rest


async def _all_or_error(fleet: Fleet, ask: Callable[[Server], Awaitable[object]], *, seconds: float, what: str) -> None:
    servers = fleet.answering()
    outcome = await on_each(servers, ask, seconds=seconds, what=what)
    if outcome.failures:
        raise ServerError(f"{what}: failed on {len(outcome.failures)} of {len(servers)} servers: {outcome}")


async def _flush(server: Server) -> bool:
    """Flush one server's cache once; False: it refuses, because requests are still leaving."""
    reply = await call(server, "POST", FLUSH)
    if not (done := flushed(reply.status, reply.words)):
        _log.info("%s", reply.error())
    return done


async def flush_cache(fleet: Fleet, *, seconds: float) -> None:
    """Empty every answering server's prefix cache; see ``ServerControl.flush_cache``."""
    await _all_or_error(
        fleet, lambda server: try_every(_REPEAT_S, partial(_flush, server)), seconds=seconds, what="flush"
    )


async def _abort_all(server: Server) -> bool:
    """Abort everything on one server once; return True if it runs nothing any more."""
    reply = await call(server, "POST", ABORT, abort_all_body())
    if not reply.ok:
        raise reply.error()
    return await load(server) == 0


async def abort_until_idle(fleet: Fleet, *, seconds: float) -> None:
    """Abort everything on every answering server until none runs anything."""
    await _all_or_error(
        fleet,
        lambda server: try_every(_REPEAT_S, partial(_abort_all, server)),
        seconds=seconds,
        what="abort until idle",
    )


async def health(fleet: Fleet, *, seconds: float) -> Mapping[str, bool]:
    """Return for each server, by URL, if it says that it is ready."""
    outcome = await on_each(fleet.servers, is_ready, seconds=seconds, what="GET /ready of")
    return {server.url: outcome.answers.get(server, False) for server in fleet.servers}
