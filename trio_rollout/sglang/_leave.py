"""Leaving a request without its answer, so that nothing of it goes on running unseen.

The connection stays readable while an abort goes out on another one; the answer that then comes says that the request has
ended on the server. If none comes in time the socket is closed, and a look at the server's load tells whether the request is
an orphan. Every function here runs inside its caller's shield and is bounded by a part of the abort budget.
"""

import logging
from typing import Final

import trio

from .._backoff import wait_s
from .._core.enums import Stop
from ..errors import ServerError
from ._call import Call
from ._calls import Unreachable, load
from ._fleet import Fleet
from ._http import BadResponse, ConnectionBroken, Exchange, NotConnected
from ._server import Server

_log: Final = logging.getLogger("trio_rollout.sglang")

REPEAT_S: Final = 0.5
"""A server may lose an abort, so it is repeated, but not more often than this."""
# The part of the abort budget that is kept for the look at the server's load.
_LOOK_SHARE: Final = 0.1
_LOOK_S: Final = 0.5


def look_s(abort_s: float) -> float:
    """Seconds of an abort budget that the last look may take."""
    return min(_LOOK_S, abort_s * _LOOK_SHARE)


async def abort_once(fleet: Fleet, server: Server, rid: str) -> bool:
    """Send one abort; whether the server answered it. A server that can't be reached is lost, not an error."""
    try:
        return await server.aborts.send(rid)
    except NotConnected as error:
        if not error.ours:
            fleet.lose(server, str(error))
    except (ConnectionBroken, BadResponse) as error:
        _log.warning("POST %s abort of %s: %s", server.url, rid, error)
    return False


async def _abort_repeatedly(fleet: Fleet, call: Call) -> None:
    while True:
        next_try = trio.current_time() + REPEAT_S
        await abort_once(fleet, call.server, call.rid)
        await wait_s(max(0.0, next_try - trio.current_time()))


async def _cancel_when_paused(server: Server, scope: trio.CancelScope) -> None:
    await server.pausing.wait()
    scope.cancel()


async def read_on(fleet: Fleet, call: Call, exchange: Exchange) -> None:
    """Have the request aborted and read until its answer is complete or its connection ends.

    Blocks until then, until its server is paused (a paused server acknowledges nothing), or until it is cancelled.
    """
    if call.server.paused:
        return
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_abort_repeatedly, fleet, call)
        nursery.start_soon(_cancel_when_paused, call.server, nursery.cancel_scope)
        try:
            await exchange.receive()
        except (ConnectionBroken, BadResponse) as error:
            _log.info("%s: cancelled, and then %s", call.attempted, error)
        nursery.cancel_scope.cancel()


async def close_unanswered(fleet: Fleet, call: Call, exchange: Exchange) -> None:
    """Close the connection of a request that did not end in time; then look, or leave a debt if its server is paused."""
    exchange.close()
    if call.server.paused:
        fleet.owe_abort(call.server, call.rid)
        return
    counted = await count_orphans(fleet, call.server, most=1)
    if counted:
        _log.warning("%s: still running when the time for its abort was over", call.attempted)


async def count_orphans(fleet: Fleet, server: Server, *, most: int) -> int:
    """Look at the server's load and count what runs there and is not ours any more, up to ``most``.

    A server that can't be reached runs nothing. One that doesn't say counts as running it: an orphan must not go unseen.
    Cancelled, it counts ``most`` too.
    """
    unexplained = most
    try:
        running = await load(server)
    except Unreachable as error:
        fleet.lose(server, str(error))
        return 0
    except ServerError as error:
        _log.info("cannot tell what %s runs: %s", server.url, error)
    else:
        others = running - server.sent
        server.orphans = min(server.orphans, max(0, others))  # those that have ended meanwhile
        unexplained = min(most, max(0, others - server.orphans))
    server.orphans += unexplained
    fleet.orphans += unexplained
    return unexplained


def count_late(fleet: Fleet, call: Call, exchange: Exchange) -> None:
    """Count an answer that came after all: complete, although nobody waits for it any more."""
    if exchange.response is None:
        return
    try:
        turn = call.turn_of(exchange.response)
    except ServerError:
        return
    if turn.stop is not Stop.ABORT:
        fleet.late += 1
