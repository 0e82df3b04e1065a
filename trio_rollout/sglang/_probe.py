"""The probe: the only place that asks servers at intervals. It asks those in question, and nobody else."""

import logging
from typing import Final

import trio

from .._util.time import wait_s
from ..errors import ServerError
from ._calls import is_ready, learn_version
from ._control import LOST_RESUME_S, continue_once
from ._fleet import Fleet
from ._server import Server

_log: Final = logging.getLogger("trio_rollout.sglang")


async def _recover(fleet: Fleet, server: Server) -> None:
    """Ask a lost server; give it work again once it is ready, not paused, and has said which weights it has.

    After every answer it may be paused again, or a window be open: then nothing is concluded from it.
    """
    if server.paused:
        await continue_once(fleet, server, until=trio.current_time() + LOST_RESUME_S)
    if server.paused or not await _samples(fleet, server):
        return
    await _learn_version(fleet, server)
    if not _is_ours_to_judge(fleet, server):
        return
    if server.lost is not None:
        _log.warning("server %s is back (it was lost: %s)", server.url, server.lost)
    server.lost = None
    server.down = False
    fleet.notify()


def _is_ours_to_judge(fleet: Fleet, server: Server) -> bool:
    """Whether the answer that has just come says something about now: no window has begun since."""
    return not (server.paused or fleet.window)


async def _samples(fleet: Fleet, server: Server) -> bool:
    """Whether it is ready; if not, and it owed us a pause, that was carried out only now: it is resumed with the next look."""
    ready = await is_ready(server)
    if not _is_ours_to_judge(fleet, server):
        return False
    if ready:
        server.pause_unanswered = False
    else:
        server.paused = server.pause_unanswered
    return ready


async def _learn_version(fleet: Fleet, server: Server) -> None:
    """Ask a server which weights it has; again with the next look if others are required by then, for they may have come since."""
    required = fleet.required
    await learn_version(server)
    server.suspect = fleet.required != required


async def _verify(fleet: Fleet, server: Server) -> None:
    """Ask a server that is in doubt whether it samples, and with which weights: what it says decides whether it gets work."""
    if not await _samples(fleet, server):
        if _is_ours_to_judge(fleet, server):
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


def _in_question(fleet: Fleet, server: Server) -> bool:
    """It is lost, in doubt, or its resume was cut short. In a window nobody is asked: its end resumes, and nothing is sent before."""
    return not fleet.window and (server.lost is not None or server.suspect or server.paused)


async def _watch(fleet: Fleet, server: Server) -> None:
    while True:
        if _in_question(fleet, server):
            await _ask(fleet, server)
            await wait_s(fleet.settings.probe)  # also if all is well again: what comes and goes is not asked in a hurry
        else:
            await fleet.changed()


async def probe(fleet: Fleet) -> None:
    """Ask each server while it is in question, an interval between two looks. Runs until cancelled.

    Each on its own: a server that answers nothing must not hold up the others.
    """
    async with trio.open_nursery() as nursery:
        for server in fleet.servers:
            nursery.start_soon(_watch, fleet, server)
