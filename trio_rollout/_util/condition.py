"""Waiting for a condition over shared state: level-triggered, so that no wake-up can be lost."""

from collections.abc import Callable
from typing import TypeVar, final

import attrs
import trio

T = TypeVar("T")


@final
@attrs.define(eq=False, repr=False)
class StateChange:
    """Wakes those who wait for a condition; whoever changes the state calls ``notify``.

    A waiter whose condition does not hold is left asleep: two of them look at every slot that becomes free, and a look costs
    a tenth of a wake-up.
    """

    _waiting: dict[trio.lowlevel.Task, Callable[[], object]] = attrs.field(factory=dict, init=False)

    def notify(self) -> None:
        """Let every waiter whose condition holds look at it again."""
        if not self._waiting:
            return
        for task, condition in tuple(self._waiting.items()):
            if _may_hold(condition):
                del self._waiting[task]
                trio.lowlevel.reschedule(task)

    async def wait_until(self, condition: Callable[[], T]) -> T:
        """Wait until ``condition()`` is true, and return what it was; whoever notifies calls it too, so it must only look.

        Always a checkpoint, and none lies between the condition's last evaluation and the return: what it saw still
        holds. Cancelled, nothing has changed.
        """
        if condition():  # where it is not, waiting is the checkpoint: one less, two or three times for each group
            await trio.lowlevel.checkpoint()
        task = trio.lowlevel.current_task()

        def abort(_raise_cancel: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
            del self._waiting[task]
            return trio.lowlevel.Abort.SUCCEEDED

        while not (found := condition()):
            self._waiting[task] = condition
            await trio.lowlevel.wait_task_rescheduled(abort)
        return found


def _may_hold(condition: Callable[[], object]) -> bool:
    try:
        return bool(condition())
    except Exception:  # noqa: BLE001  the waiter's, not the notifier's: it will raise it where it waits
        return True
