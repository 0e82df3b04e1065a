"""Waiting for a condition over shared state: level-triggered, so that no wake-up can be lost."""

from collections.abc import Callable
from typing import final

import attrs
import trio


@final
@attrs.define(eq=False, repr=False)
class StateChange:
    """Wakes those who wait for a condition; whoever changes the state calls ``notify``.

    A waiter whose condition does not hold is left asleep: two of them look at every slot that becomes free, and a look costs
    a tenth of a wake-up.
    """

    _waiting: dict[trio.lowlevel.Task, Callable[[], bool]] = attrs.field(factory=dict, init=False)

    def notify(self) -> None:
        """Let every waiter whose condition holds look at it again."""
        if not self._waiting:
            return
        for task, condition in tuple(self._waiting.items()):
            if _may_hold(condition):
                del self._waiting[task]
                trio.lowlevel.reschedule(task)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition()`` is true; it is called by whoever notifies, too, so it must only look.

        Always a checkpoint, and none lies between the condition's last evaluation and the return: what it saw still
        holds. Cancelled, nothing has changed.
        """
        await trio.lowlevel.checkpoint()
        task = trio.lowlevel.current_task()

        def abort(_raise_cancel: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
            del self._waiting[task]
            return trio.lowlevel.Abort.SUCCEEDED

        while not condition():
            self._waiting[task] = condition
            await trio.lowlevel.wait_task_rescheduled(abort)


def _may_hold(condition: Callable[[], bool]) -> bool:
    try:
        return condition()
    except Exception:  # noqa: BLE001  the waiter's, not the notifier's: it will raise it where it waits
        return True
