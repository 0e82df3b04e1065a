"""What hung when a group's deadline passed: its tasks as they stood at that very moment, in the log."""

import logging
from collections.abc import Callable

import trio

from ._attempt import Attempt

_LOGGER = logging.getLogger("trio_rollout")


async def watch(attempt: Attempt, show: Callable[[trio.lowlevel.Task], str]) -> None:
    """Wait to be cancelled; if that is because the attempt is out of time, log what ``show`` says of its tasks.

    A cancellation is delivered before any task runs again: an abort function sees every await that was overdue.
    """
    nursery = trio.lowlevel.current_task().parent_nursery

    def log_tasks(_: object) -> trio.lowlevel.Abort:
        if nursery is not None and attempt.is_out_of_time:
            _LOGGER.warning(
                "group %s: the deadline of attempt %d has passed. Its tasks:\n%s",
                attempt.id,
                attempt.number,
                show(nursery.parent_task),
            )
        return trio.lowlevel.Abort.SUCCEEDED

    await trio.lowlevel.wait_task_rescheduled(log_tasks)
