"""Leaving a request without its answer, so that nothing of it goes on running unseen.

The connection stays readable while an abort goes out on another one; the answer that then comes says that the request has
ended on the server. If none comes in time the socket is closed, and a look at the server's load tells whether the request is
an orphan. Every function here runs inside its caller's shield and is bounded by a part of the abort budget.

The reaper: pays the aborts that fell due while their server was paused, once it runs again.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Final

import trio

from .._core.enums import Stop
from .._core.server import Event, Told
from .._http import BadResponse, ConnectionBroken, Exchange, NotConnected
from .._util.time import wait_s
from ..errors import ServerError
from ._call import Call
from ._calls import Unreachable, load
from ._fleet import Fleet
from ._owed_aborts import REPEAT_S
from ._server import Server
from ._wire import says_abort

_log: Final = logging.getLogger("trio_rollout.sglang")

# The part of the abort budget that is kept for the look at the server's load.
_LOOK_SHARE: Final = 0.1
_LOOK_S: Final = 0.5


def look_s(abort_s: float) -> float:
    """Seconds of an abort budget that the last look may take."""
    return min(_LOOK_S, abort_s * _LOOK_SHARE)


async def abort_once(server: Server, rid: str) -> bool:
    """Send one abort; whether the server answered it. A server that can't be reached is lost, not an error."""
    try:
        return await server.aborts.send(rid)
    except NotConnected as error:
        if not error.ours:
            server.tell(Told(Event.UNREACHABLE, why=str(error)))
    except (ConnectionBroken, BadResponse) as error:
        _log.warning("POST %s abort of %s: %s", server.url, rid, error)
    return False


async def read_on(call: Call, exchange: Exchange) -> None:
    """Have the request aborted and read until its answer is complete or its connection ends.

    Blocks until then, until its server is paused (a paused server acknowledges nothing), or until it is cancelled. An abort
    that is under way at the end is not cancelled: that would cost its connection, and it is answered at once.
    """
    server = call.server
    if server.standing.may_be_paused:
        return
    leaving = server.leaving.begin(call.rid)
    try:
        with leaving.scope:
            await exchange.receive()
    except (ConnectionBroken, BadResponse) as error:
        _log.info("%s: cancelled, and then %s", call.attempted, error)
    finally:
        server.leaving.end(leaving)


async def close_unanswered(fleet: Fleet, call: Call, exchange: Exchange) -> None:
    """Close the connection of a request that did not end in time; then look, or leave a debt if its server is paused."""
    exchange.close()
    if call.server.standing.may_be_paused:
        fleet.owe_abort(call.server, call.rid)
    else:
        call.server.tell(Told(Event.DOUBTED))
        await count_orphans(fleet, call.server, most=1)


async def count_orphans(fleet: Fleet, server: Server, *, most: int) -> None:
    """Look at the server's load and count what runs there and is not ours any more, up to ``most``.

    A server that can't be reached runs nothing. One that doesn't say, or not before this is cancelled, counts as running
    it: an orphan must not go unseen.
    """
    unexplained = most
    try:
        running = await server.look.fresh(partial(load, server))
        others = max(0, running - server.sent)
        unexplained = min(most, others - server.known_orphans(trio.current_time(), running=others))
    except Unreachable as error:
        unexplained = 0
        server.tell(Told(Event.UNREACHABLE, why=str(error)))
    except ServerError as error:
        _log.info("cannot tell what %s runs: %s", server.url, error)
    finally:
        server.note_orphans(trio.current_time(), unexplained)
        fleet.orphans += unexplained
        if unexplained:
            _log.warning("%s still runs %d of our requests after the time for their abort", server.url, unexplained)


def count_late(fleet: Fleet, call: Call, exchange: Exchange) -> None:
    """Count an answer that came after all: complete, although nobody waits for it any more."""
    if exchange.response is None:
        return
    try:
        turn = fleet.decoding.turn_now(call, exchange.response)
    except ServerError:
        return
    if turn is not None:
        fleet.late += turn.stop is not Stop.ABORT
    else:  # nobody wants its tokens, so no thread decodes it
        fleet.late += not says_abort(call.undecoded(exchange.response))


async def _idle(server: Server) -> bool:
    """Whether the server runs nothing but our present requests and known orphans; unknown is not idle."""
    try:
        others = max(0, await load(server) - server.sent)
        return others <= server.known_orphans(trio.current_time(), running=others)
    except ServerError:
        return False


async def _pay(fleet: Fleet, server: Server) -> None:
    """Abort what is owed until the server runs none of it, at most for the abort budget; the rest are orphans."""
    rids = list(fleet.debts[server])
    settled = False
    with trio.move_on_after(fleet.settings.abort):
        settled = await _aborted(server, rids)
    if not settled:
        if not server.standing.samples:
            return  # again: they are still owed
        with trio.move_on_after(fleet.settings.control):
            await count_orphans(fleet, server, most=len(rids))
    fleet.debts[server] = [rid for rid in fleet.debts.get(server, ()) if rid not in set(rids)]
    if not fleet.debts[server]:
        del fleet.debts[server]


async def _aborted(server: Server, rids: Sequence[str]) -> bool:
    """Abort these again and again until the server runs none of them, which is True; False: it is paused or lost again."""
    while server.standing.samples:
        async with trio.open_nursery() as nursery:
            for rid in rids:
                nursery.start_soon(abort_once, server, rid)
        await wait_s(REPEAT_S)
        if await _idle(server):
            return True
    return False


async def _pay_when_due(fleet: Fleet, server: Server) -> None:
    while True:
        await server.changed.wait_until(lambda: server in fleet.debts and server.standing.samples)
        await _pay(fleet, server)


async def reap(fleet: Fleet) -> None:
    """Pay debts as soon as their server is no longer paused, each server's by themselves. Runs until cancelled."""
    async with trio.open_nursery() as nursery:
        for server in fleet.servers:
            nursery.start_soon(_pay_when_due, fleet, server)
