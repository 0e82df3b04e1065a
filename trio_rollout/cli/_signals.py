"""What signals do to a run: the first SIGINT or SIGTERM drains, the second cancels, SIGUSR1 shows the task tree.

While a watcher listens, Python's own KeyboardInterrupt is off: nothing is interrupted between two of its steps. Once the
second signal has been seen the old handlers are back, so a third one ends a run whose wrap-up hangs.
"""

import signal
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import trio

from .._service import open_service

Say = Callable[[str], Awaitable[None]]


async def stop_on_interrupt(
    drain: Callable[[], Awaitable[None]],
    cancel: Callable[[], None],
    *,
    say: Say,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Wait for an interrupt, then drain; at the next one, cancel. Runs until then or until it is cancelled.

    ``drain`` is awaited in a child: a second interrupt does not have to wait for it.
    """
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        await anext(signals)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(say, "draining: no new groups; the running ones may finish. Ctrl-C again cancels them")
            nursery.start_soon(drain)
            await anext(signals)
            nursery.start_soon(say, "cancelling the running groups")
            cancel()


def open_tree_on_usr1(tree: Callable[[], str], *, say: Say) -> AbstractAsyncContextManager[None]:
    """Say what every task is doing each time SIGUSR1 comes: while the body runs, and while it is left."""

    async def show(*, task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(signal.SIGUSR1) as signals:
            task_status.started()
            async for _ in signals:
                await say(tree())

    return open_service(show, _leave_at_once)


async def _leave_at_once(_value: None, _error: BaseException | None) -> None:
    await trio.lowlevel.checkpoint()
