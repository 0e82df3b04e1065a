"""The tasks of one session, from its start to its burial: a nursery of its own inside that of the sessions.

``live`` is started with ``nursery.start``, which gives "store before wait" for nothing: cancelled before it has reported,
the process dies with its call; afterwards it lives in the nursery of the sessions.
"""

import logging
from collections.abc import Callable

import trio

from ..errors import ToolError
from ._child import Child, Spawn
from ._session import Session

_log = logging.getLogger("trio_rollout.tools")


async def live(
    session: Session,
    spawn: Spawn,
    store: Callable[[Session], None],
    on_gone: Callable[[Session, bool], None],
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    """Start the process, watch it until the session is let go, then kill and reap it; ``on_gone`` hears if that is proven.

    Reports once it runs and has either outlived ``limits.early_exit``, and is stored then, or has not.

    Raises:
      SpawnError, ToolError: before it has reported: it could not be started.

    """
    child = await _spawned(session, spawn)
    try:
        session.report.begin()
        async with trio.open_nursery() as nursery:
            await _settle_in(session, child, nursery)
            task_status.started()
            if not session.ended:
                store(session)
                nursery.start_soon(_watch_end, session)
            await session.until(lambda: session.let_go)
            nursery.cancel_scope.cancel("the session was let go")
    except* Exception as group:  # ruff: ignore[blind-except]  a bug in one session must not end the others
        _log.exception("a task of session %d failed", session.process_id)
        session.lose(ToolError(f"session {session.process_id}: {group.exceptions[0]!r}"))
    finally:
        proven = False
        with trio.move_on_after(session.limits.teardown, shield=True):
            proven = await child.release()
        child.close()
        session.bury()
        on_gone(session, proven)


async def _spawned(session: Session, spawn: Spawn) -> Child:
    try:
        session.child = child = await spawn(session.command)
    except BaseException:
        session.finish_denial()
        raise
    return child


async def _settle_in(session: Session, child: Child, nursery: trio.Nursery) -> None:
    """Start to watch the process, and give it the time to exit at once."""
    nursery.start_soon(_read_output, session, child)
    nursery.start_soon(_watch_exit, session, child)
    nursery.start_soon(_watch_denial, session)
    with trio.move_on_after(session.limits.early_exit):
        await session.until(lambda: session.ended)
    await trio.lowlevel.checkpoint()  # the last moment at which a cancelled call takes the process with it


async def _read_output(session: Session, child: Child) -> None:
    """Always runs: a process that nobody reads would wait for us."""
    try:
        while chunk := await child.stdout.receive_some(session.limits.delta_bytes):
            session.take(chunk)
    finally:
        session.close_output()


async def _watch_exit(session: Session, child: Child) -> None:
    await trio.lowlevel.checkpoint()
    try:
        session.status = await child.wait_exited()
    except ToolError as error:
        session.lose(error)
    session.changed()


async def _watch_denial(session: Session) -> None:
    """The first denial ends the session; one that comes just after its exit still counts."""
    await trio.lowlevel.checkpoint()
    denial = session.denial
    if denial is not None:

        async def grace(scope: trio.CancelScope) -> None:
            await session.until(lambda: session.ended)
            scope.deadline = trio.current_time() + session.limits.late_denial

        async with trio.open_nursery() as race:
            race.start_soon(grace, race.cancel_scope)
            await denial.wait()
            race.cancel_scope.cancel()
        message = denial.finish()
        if message is not None:
            session.fail_and_terminate(message)
    session.denial_settled = True
    session.changed()


async def _watch_end(session: Session) -> None:
    """Tell the end of a stored session: its output first, then a late denial, then whoever is using it."""
    await session.until(lambda: session.ended)
    with trio.move_on_after(session.limits.trailing_output):
        await session.until(lambda: session.output_closed)
    await session.until(lambda: session.denial_settled)
    async with session.lock:
        session.tell_end()
