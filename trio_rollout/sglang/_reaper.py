"""The reaper: pays the aborts that fell due while their server was paused, once it runs again."""

import logging
from typing import Final

import trio

from .._backoff import wait_s
from ..errors import ServerError
from ._calls import load
from ._fleet import Fleet
from ._leave import REPEAT_S, abort_once, count_orphans
from ._server import Server

_log: Final = logging.getLogger("trio_rollout.sglang")


async def _idle(server: Server) -> bool:
    """Whether the server runs nothing but our present requests and known orphans; unknown is not idle."""
    try:
        return await load(server) <= server.sent + server.orphans
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
            left = await count_orphans(fleet, server, most=len(rids))
            if left:
                _log.warning(
                    "%s: %d aborts that fell due while it was paused did not end their requests", server.url, left
                )
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
