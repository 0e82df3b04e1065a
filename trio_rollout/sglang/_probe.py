"""The probe: the only place that asks servers at intervals. It asks those in question, and nobody else."""

import logging
from typing import Final

import trio

from .._backoff import wait_s
from ..errors import ServerError
from ._calls import is_ready, model_info
from ._control import continue_once
from ._fleet import Fleet
from ._server import Server

_log: Final = logging.getLogger("trio_rollout.sglang")


async def _recover(fleet: Fleet, server: Server) -> None:
    """Ask a lost server; give it work again once it is ready, not paused, and has said which weights it has.

    A window that begins meanwhile pauses it after this, and not before.
    """
    async with server.pausing:
        if server.paused and not fleet.window:  # in a window, its resume belongs to the window's end
            await continue_once(fleet, server)
        if server.paused:
            return
        if not await is_ready(server):
            # If it owed us a pause, that was carried out only now: resume it with the next look.
            server.paused = server.pause_unanswered
            return
        server.pause_unanswered = False
        await _learn_version(fleet, server)
        if server.lost is not None:
            _log.warning("server %s is back (it was lost: %s)", server.url, server.lost)
        server.lost = None
        server.down = False
    fleet.notify()


async def _learn_version(fleet: Fleet, server: Server) -> None:
    """Ask a server which weights it has; again with the next look if others are required by then, for they may have come since."""
    required = fleet.required
    server.naming.observe((await model_info(server)).weight_version)
    server.suspect = fleet.required != required


async def _verify(fleet: Fleet, server: Server) -> None:
    """Ask a server that is in doubt whether it samples, and with which weights: what it says decides whether it gets work.

    One that we have paused is asked after its resume.
    """
    async with server.pausing:
        if server.paused:
            return
        if not await is_ready(server):
            fleet.lose(server, "it is not ready: paused by another client, or ill")
            return
        await _learn_version(fleet, server)
    if not fleet.has_weights(server) and not server.suspect:
        _log.warning(
            "server %s has weights %r, not version %s: no work until a weight update has brought it there",
            server.url,
            server.naming.now.name,
            fleet.required,
        )
    fleet.notify()


async def _ask(fleet: Fleet, server: Server) -> None:
    with trio.move_on_after(fleet.settings.control):
        try:
            if server.lost is not None or server.paused:
                await _recover(fleet, server)
            else:
                await _verify(fleet, server)
        except ServerError as error:
            if server.lost is None:
                fleet.lose(server, str(error))


def _in_question(fleet: Fleet) -> list[Server]:
    """Servers that are lost, that named an odd version, or whose resume was cut short."""
    return [
        server
        for server in fleet.servers
        if server.lost is not None or server.suspect or (server.paused and not fleet.window)
    ]


async def probe(fleet: Fleet) -> None:
    """Ask every server in question, wait an interval, ask again; sleep while there is none. Runs until cancelled."""
    while True:
        questionable = _in_question(fleet)
        if not questionable:
            await fleet.changed()
            continue
        async with trio.open_nursery() as nursery:
            for server in questionable:
                nursery.start_soon(_ask, fleet, server)
        await wait_s(fleet.settings.probe)  # also if all is well again: what comes and goes is not asked in a hurry
