"""The probe: the only place that asks servers at intervals. It asks the servers for which something is due, and no others.

The table in ``_core/server.py`` says what is due: a resume, for a server that may be paused although no window is open, or a
look, for one that is lost or suspect. Nothing is due in a window. Separate because control calls
are made for a caller, and these are not.
"""

from functools import partial

import trio

from .._core.server import Effect, Event, Told, due
from .._util.time import wait_s
from ._calls import is_ready, model_info
from ._control import LOST_RESUME_S, continue_once, converse
from ._fleet import Fleet
from ._server import Server


async def _ask_for_all(server: Server) -> Told:
    """Ask if a server is ready, and then for its weights: the answer says what they are when it gets requests again."""
    if not await is_ready(server):
        return Told(Event.NOT_READY, why="it is not ready: paused by another client, or ill")
    return Told(Event.PROBED, name=(await model_info(server)).weight_version)


async def _look(server: Server, *, seconds: float) -> None:
    until = trio.current_time() + seconds

    async def look_at_it() -> None:
        if due(server.standing) is Effect.LOOK:  # not if a window began while it waited for its turn
            await converse(server, Event.ASKED, partial(_ask_for_all, server), until=until)

    await server.calls.ask(look_at_it, until=until)


async def _watch(fleet: Fleet, server: Server) -> None:
    while True:
        if await server.changed.wait_until(lambda: due(server.standing)) is Effect.RESUME:
            await continue_once(server, until=trio.current_time() + LOST_RESUME_S)
        if due(server.standing) is Effect.LOOK:
            await _look(server, seconds=fleet.settings.control)
        await wait_s(fleet.settings.probe)  # also if all is well again: what comes and goes is not asked in a hurry


async def probe(fleet: Fleet) -> None:
    """Resume or ask each server while that is due, an interval between two tries. Runs until cancelled.

    Each server has its own task, so that one that does not answer does not hold up the others.
    """
    async with trio.open_nursery() as nursery:
        for server in fleet.servers:
            nursery.start_soon(_watch, fleet, server)
