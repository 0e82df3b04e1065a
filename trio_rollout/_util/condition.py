"""Waiting for a condition over shared state: level-triggered, so that no wake-up can be lost.

The one wake-up primitive of the package. ``trio.Event`` fits what happens once; swapping one Event for the next, which is
what everything else would need, is this class written by hand.
"""

from collections.abc import Callable
from typing import TypeVar, final

import attrs
import trio

T = TypeVar("T")


@final
@attrs.define(eq=False, repr=False)
class Condition:
    """Wakes the tasks that wait for a condition; the code that changes the state calls ``notify``.

    A waiter whose condition does not hold stays asleep: the engine has two that look at every slot that becomes free, and
    a look costs a tenth of a wake-up.
    """

    _waiting: dict[trio.lowlevel.Task, Callable[[], object]] = attrs.field(factory=dict, init=False)

    def notify(self) -> None:
        """Wake every waiter whose condition holds now. The waiter evaluates its condition again before it goes on."""
        if not self._waiting:
            return
        for task, condition in tuple(self._waiting.items()):
            if _may_hold(condition):
                del self._waiting[task]
                trio.lowlevel.reschedule(task)

    async def wait_until(self, condition: Callable[[], T]) -> T:
        """Wait until ``condition()`` is true and return its value.

        ``condition`` must only look at state: ``notify`` calls it too, in the notifier's task. The call is always a
        checkpoint, and there is no checkpoint between the last evaluation and the return: what the condition saw still
        holds. Cancelled, nothing has changed.
        """
        if condition():  # if it does not hold, the wait below is the checkpoint: two or three fewer for each group
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
    except Exception:  # noqa: BLE001  the waiter raises it again, in its own task
        return True
