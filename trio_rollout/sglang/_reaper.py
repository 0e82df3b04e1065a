"""The reaper: pays the aborts that fell due while their server was paused, once it runs again."""

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
    with trio.move_on_after(fleet.settings.abort):
        while not server.paused and server.lost is None:
            async with trio.open_nursery() as nursery:
                for rid in rids:
                    nursery.start_soon(abort_once, fleet, server, rid)
            await wait_s(REPEAT_S)
            if await _idle(server):
                break
    if server.paused:
        return  # again: they are still owed
    if server.lost is None:
        with trio.move_on_after(fleet.settings.control):
            await count_orphans(fleet, server, most=len(rids))
    fleet.debts[server] = [rid for rid in fleet.debts.get(server, ()) if rid not in set(rids)]
    if not fleet.debts[server]:
        del fleet.debts[server]
    fleet.notify()


async def reap(fleet: Fleet) -> None:
    """Pay debts as soon as their server is no longer paused. Runs until cancelled."""
    while True:
        due = [server for server in fleet.debts if not server.paused]
        if not due:
            await fleet.changed()
            continue
        async with trio.open_nursery() as nursery:
            for server in due:
                nursery.start_soon(_pay, fleet, server)
