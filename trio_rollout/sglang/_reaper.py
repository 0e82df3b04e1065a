"""The reaper: pays the aborts that fell due while their server was paused, once it runs again."""

from collections.abc import Sequence

import trio

from .._backoff import wait_s
from ..errors import ServerError
from ._calls import load
from ._fleet import Fleet
from ._leave import abort_once, count_orphans
from ._leaving import REPEAT_S
from ._server import Server


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
        settled = await _aborted(fleet, server, rids)
    if not settled:
        if server.paused or _is_away(server):
            return  # again: they are still owed
        with trio.move_on_after(fleet.settings.control):
            await count_orphans(fleet, server, most=len(rids))
    fleet.debts[server] = [rid for rid in fleet.debts.get(server, ()) if rid not in set(rids)]
    if not fleet.debts[server]:
        del fleet.debts[server]
    fleet.notify()


async def _aborted(fleet: Fleet, server: Server, rids: Sequence[str]) -> bool:
    """Abort these again and again until the server runs none of them, which is True; False: it is paused or lost again."""
    while not server.paused and server.lost is None:
        async with trio.open_nursery() as nursery:
            for rid in rids:
                nursery.start_soon(abort_once, fleet, server, rid)
        await wait_s(REPEAT_S)
        if await _idle(server):
            return True
    return False


def _is_away(server: Server) -> bool:
    """It may still run what it was given, and can't be told to stop. One that is down runs nothing."""
    return server.lost is not None and not server.down


async def _pay_when_due(fleet: Fleet, server: Server) -> None:
    while True:
        if server in fleet.debts and not server.paused and not _is_away(server):
            await _pay(fleet, server)
        else:
            await fleet.changed()


async def reap(fleet: Fleet) -> None:
    """Pay debts as soon as their server is no longer paused, each server's by themselves. Runs until cancelled."""
    async with trio.open_nursery() as nursery:
        for server in fleet.servers:
            nursery.start_soon(_pay_when_due, fleet, server)
