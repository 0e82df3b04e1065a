"""Leaving a request without its answer: read on, abort, owe, look, count. From top to bottom, as it happens.

The problem
-----------
A rollout is cancelled (by a deadline, a drain, a weight update) while its request runs on a server. To close the socket would
be simple, and wrong twice: SGLang notices the closed socket of a plain request after three to four seconds, in which the request
holds its place in the batch, and the tokens that it has sampled, which a partial rollout goes on from, come back only in the answer
to that request. So a cancelled request keeps its connection and is **read on**, while an **abort** travels on another one.
SGLang answers every abort with 200 at once, whatever it does; only the answer to the request itself says that the request has
ended. It may also lose an abort that comes between the request's registration and its dispatch, so the abort is repeated.

All of that happens inside the cancelled call, in a shield, because ``Cancelled`` is allowed to go on only when nothing of the
request runs any more, or when that is known and counted:

1. ``leave`` enters an abort into ``server.owed`` and reads on, for all of ``Deadlines.abort`` but a tenth.
2. ``pay``, one task for each server, sends what is due, at most every 0.5 s for each request and over a few reserved
   connections: an abort never waits behind a generation, and 8,000 requests that are cancelled at once do not need 8,000
   connections.
3. If the answer comes, complete or cut short, all is well: the connection goes back to its pool.
   An answer that breaks off, or that is none, cannot be read on: then each abort is followed by a **look** at ``/v1/loads``, until
   one shows that the server runs nothing that is not waited for.
4. If none comes in time, the connection is closed, the server is doubted (another client may have paused it, and then it parks
   requests without a word), and a last look tells if the request still runs. If so, it is an **orphan**: counted
   and logged, and no longer waited for.
5. A server that is paused acknowledges nothing. The pause lets go of all that is being read on, the connection is closed, and the
   abort stays in ``server.owed`` as an entry that no one waits for: a **debt**. ``pay`` holds debts back while the server is
   paused or lost, then sends them until a look finds that the server runs none of them; after ``ServerSettings.abort`` what is
   left is counted as orphans.

Numbers, and the alternatives that were tried, are in docs/decisions/0012-what-leaving-a-request-costs.md and
0034-what-is-owed-is-one-dict.md.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Final

import trio

from .._core.server import Event, State, Told
from .._http import BadResponse, ConnectionBroken, Exchange, NotConnected, post_request
from .._util.time import wait_s
from ..errors import ServerError
from ._calls import Unreachable, load
from ._fleet import Fleet
from ._server import OwedAbort, Server
from ._wire import abort_body

_log: Final = logging.getLogger("trio_rollout.sglang")

REPEAT_S: Final = 0.5
"""A server may lose an abort, so it is repeated, but not more often than this."""
# A server that has not answered an abort by then will not; the connection is better used for the next one.
_ONE_ABORT_S: Final = 1.0
# The part of the abort budget that is kept for the look at the server's load.
_LOOK_SHARE: Final = 0.1
LOOK_S: Final = 0.5


# --- in the cancelled call


async def leave(fleet: Fleet, server: Server, rid: str, exchange: Exchange, *, abort_s: float) -> None:
    """End a request that was sent and that no call waits for any more; ``exchange.response`` is its answer, if one came.

    Blocks until the answer is complete, a look shows that the request has ended, or the server is paused, at most ``abort_s``,
    whatever is cancelled. An abort that is under way then goes on: to cancel it would cost its connection.
    """
    look_s = min(LOOK_S, abort_s * _LOOK_SHARE)
    owed, ended = server.owed.add(rid, now=trio.current_time()), False
    # One scope after the other, never one around both: after a stall of the loop that outlasts both limits, Cancelled would
    # go to the outer one, and what follows the inner one would be left out.
    if not server.standing.may_be_paused:
        with trio.move_on_after(abort_s - look_s, shield=True), owed.waiter:
            ended = await _read_on(server, rid, exchange) or await _until_none_is_left(server, owed, exchange)
    if ended or exchange.response is not None:
        server.owed.end(owed)
        return
    exchange.close()
    if server.standing.may_be_paused:
        server.owed.let_stand(owed)
        return
    server.owed.end(owed)
    server.tell(Told(Event.DOUBTED))
    with trio.CancelScope(shield=True):
        await _look_for_one(fleet, server, seconds=look_s)


async def _read_on(server: Server, rid: str, exchange: Exchange) -> bool:
    """Read the answer to its end and return True; False if that is not possible."""
    try:
        await exchange.receive()
    except (ConnectionBroken, BadResponse) as error:
        _log.info("POST %s %s: left, and its answer cannot be read on: %s", server.url, rid, error)
    return exchange.response is not None


async def _until_none_is_left(server: Server, owed: OwedAbort, exchange: Exchange) -> bool:
    """Wait until an abort was sent and the server runs no request that is not waited for; a server that is down runs none."""
    exchange.close()
    server.closed += 1  # so it is not taken for one of the requests that are still waited for
    tries = 0
    try:
        while True:
            await server.owed.changed.wait_until(partial(_was_tried, server, owed, tries))
            tries = owed.tries
            if server.standing.state is State.OUTSIDE:
                return False
            if server.standing.state is State.DOWN or await _is_idle(server):
                return True
    finally:
        server.closed -= 1


def _was_tried(server: Server, owed: OwedAbort, tries: int) -> bool:
    """Return True if an abort was tried once more, or will not be because the servers were left."""
    return owed.tries > tries or server.standing.state is State.OUTSIDE


async def _look_for_one(fleet: Fleet, server: Server, *, seconds: float) -> None:
    server.closed += 1  # so it is not taken for one of the requests that are still waited for
    try:
        with trio.move_on_after(seconds):
            await count_orphans(fleet, server, most=1)
    finally:
        server.closed -= 1


async def abort_once(server: Server, rid: str, *, abort_s: float) -> None:
    """Abort a request whose connection broke: half an answer and then a reset does not mean that it has ended.

    Blocks until the abort was tried once, at most ``abort_s``, whatever is cancelled. A server that is being paused will get it
    after its resume.
    """
    owed = server.owed.add(rid, now=trio.current_time(), once=True)
    with trio.move_on_after(abort_s, shield=True):
        with owed.waiter:
            await trio.sleep_forever()
        if not owed.tries and server.standing.may_be_paused:
            server.owed.let_stand(owed)
            return
    server.owed.end(owed)


# --- looks and orphans


async def count_orphans(fleet: Fleet, server: Server, *, most: int) -> None:
    """Look at the server's load and count what runs there and is not ours any more, up to ``most``.

    A server that can't be reached runs nothing. One that does not say, or not before this is cancelled, counts as running
    it: an orphan must not go unseen.
    """
    unexplained = most
    try:
        others = await _others(server)
        unexplained = min(most, others - server.known_orphans(trio.current_time(), running=others))
    except Unreachable as error:
        unexplained = 0
        server.tell(Told(Event.UNREACHABLE, why=str(error)))
    except (ServerError, RuntimeError) as error:  # RuntimeError: the servers are being left, its connections are closed
        _log.info("cannot tell what %s runs: %s", server.url, error)
    finally:
        server.note_orphans(trio.current_time(), unexplained)
        fleet.orphans += unexplained
        if unexplained:
            _log.warning("%s still runs %d of our requests after the time for their abort", server.url, unexplained)


async def _others(server: Server) -> int:
    """Return how many requests a server runs beyond those that are waited for here.

    Many may ask at once; they share an answer to a question that was sent after all of them had asked.
    """
    running = await server.look.fresh(partial(load, server))
    return max(0, running - (server.sent - server.closed))


async def _is_idle(server: Server) -> bool:
    """Return True if a server runs nothing but requests that are waited for and known orphans; unknown is not idle."""
    try:
        others = await _others(server)
    except (ServerError, RuntimeError):  # RuntimeError: the servers were left
        return False
    return others <= server.known_orphans(trio.current_time(), running=others)


# --- the task that pays what is owed


async def pay(fleet: Fleet, server: Server) -> None:
    """Send the aborts that are owed to a server, and see that its debts come to an end. Runs until cancelled."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_settle_debts, fleet, server)
        while True:
            owed = await _next_due(server)
            nursery.start_soon(_send, server, owed)


async def _next_due(server: Server) -> OwedAbort:
    """Wait until an abort is due and a connection is free for it."""
    line = server.owed
    while True:  # noqa: ASYNC913  each round waits or takes one entry out
        while (due_at := line.next_time()) > trio.current_time():
            with trio.move_on_at(due_at):
                await line.changed.wait_until(partial(line.is_due_before, due_at))
        owed = line.take(debts=server.standing.samples)
        if owed is not None:
            return owed


async def _send(server: Server, owed: OwedAbort) -> None:
    next_time = trio.current_time() + REPEAT_S
    try:
        with trio.move_on_after(_ONE_ABORT_S):
            data = post_request(server.abort_head, abort_body(owed.rid))
            _ = await _sent(server, data, fresh=False) or await _sent(server, data, fresh=True)
    except NotConnected as error:
        if not error.ours:
            server.tell(Told(Event.UNREACHABLE, why=str(error)))
    except (ConnectionBroken, BadResponse) as error:
        _log.warning("POST %s abort of %s: %s", server.url, owed.rid, error)
    finally:
        server.owed.note_try(owed, next_time=next_time)


async def _sent(server: Server, data: bytes, *, fresh: bool) -> bool:
    """Send one abort; False if a reused connection had been closed by the server meanwhile."""
    with await server.aborts.take(fresh=fresh) as exchange:
        try:
            await exchange.send(data)
            await exchange.receive()
        except ConnectionBroken as error:
            if exchange.reused and not error.answered:
                return False
            raise
    return True


async def _settle_debts(fleet: Fleet, server: Server) -> None:
    """Whenever a server can be told to abort again, have its debts sent until it runs none of them; the rest are orphans."""
    while True:
        await server.changed.wait_until(lambda: server.owed.debts and server.standing.samples)
        debts, settled = server.owed.all_debts(), False
        with trio.move_on_after(fleet.settings.abort):
            settled = await _until_none_runs(server, debts)
        if not settled:
            if not server.standing.samples:
                continue  # they are still owed
            with trio.move_on_after(fleet.settings.control):
                await count_orphans(fleet, server, most=len(debts))
        for owed in debts:
            server.owed.end(owed)


async def _until_none_runs(server: Server, debts: Sequence[OwedAbort]) -> bool:
    """Abort these until the server runs none of them, and return True; False: it is paused or lost again."""
    while server.standing.samples:
        server.owed.call_in(debts, now=trio.current_time())
        await server.owed.changed.wait_until(server.owed.has_tried_debts)
        await wait_s(REPEAT_S)
        if await _is_idle(server):
            return server.standing.samples
    return False
