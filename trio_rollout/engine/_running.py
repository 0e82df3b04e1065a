"""The attempts under way, those of production or those of evaluations: counted, cancelled together, logged when overdue."""

import logging
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import final

import attrs
import trio

from .._core.enums import Cause
from .._core.failures import words_of
from .._util.condition import Condition
from ._attempt import Attempt, SampleTry

_LOGGER = logging.getLogger("trio_rollout")


@final
@attrs.define(eq=False, repr=False)
class RunningAttempts:
    """The attempts between their start and the end of their settlement; ``changed`` is notified when one leaves."""

    changed: Condition = attrs.field(factory=Condition)
    _started: Condition = attrs.field(factory=Condition, init=False)
    _attempts: dict[Attempt, trio.lowlevel.Task] = attrs.field(factory=dict, init=False)
    """With the task of each."""

    def __len__(self) -> int:
        return len(self._attempts)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self._attempts)

    @contextmanager
    def holding(self, attempt: Attempt) -> Generator[None]:
        """Count this attempt as running, in the current task, for the block."""
        self._attempts[attempt] = trio.lowlevel.current_task()
        self._started.notify()
        try:
            yield
        finally:
            del self._attempts[attempt]
            self.changed.notify()

    async def until_none(self) -> None:
        """Wait until no attempt is running. Cancelled, nothing has changed."""
        await self.changed.wait_until(lambda: not self._attempts)

    def cancel_all(self, cause: Cause, why: str) -> None:
        """Cancel every attempt that has no outcome yet."""
        for attempt in list(self._attempts):
            attempt.cancel(cause, why)

    async def log_overdue(self, show: Callable[[trio.lowlevel.Task], str]) -> None:
        """Log the task tree of each attempt whose deadline expires, as ``show`` renders it. Runs until cancelled.

        One task looks after all attempts. All are given the same time, so none that starts later is due earlier, and the
        task sleeps until the deadline of the oldest. Trio delivers the cancellations of all deadlines that have expired
        before any task runs again, so an abort function sees every await as it was when they expired.
        """
        taken_until = -math.inf
        taken: list[str] = []

        def take_texts(_: object) -> trio.lowlevel.Abort:  # an exception of an abort function is a defect to Trio
            nonlocal taken_until
            for attempt, task in self._attempts.items():
                if attempt.deadline > taken_until and attempt.is_out_of_time:
                    head = f"group {attempt.id}: the deadline of attempt {attempt.number} has passed. Its tasks:"
                    try:
                        tasks = show(task)
                    except Exception as error:  # noqa: BLE001  the tree shows objects of user code
                        tasks = f"(they can't be shown: {type(error).__name__}: {words_of(error)})"
                    taken.append(f"{head}\n{tasks}")
            taken_until = trio.current_time()
            return trio.lowlevel.Abort.SUCCEEDED

        def next_deadline() -> float:
            return min((each.deadline for each in self._attempts if each.deadline > taken_until), default=0.0)

        while True:
            with trio.CancelScope(deadline=await self._started.wait_until(next_deadline)):
                await trio.lowlevel.wait_task_rescheduled(take_texts)
            while taken:
                with suppress(Exception):  # a log handler that fails must not end the engine
                    _LOGGER.warning("%s", taken.pop(0))

    def tries(self) -> Sequence[SampleTry]:
        """Return the tries under way."""
        return [this for attempt in self._attempts for this in attempt.tries.values()]

    def cancel_sampling(self, cause: Cause, why: str) -> Sequence[SampleTry]:
        """Cancel and return the tries that still sample and have sent a request.

        A try that is only being scored has all its tokens; one that has sent nothing yet waits at the gate.
        """
        sampling = [this for this in self.tries() if this.generating and this.begun is not None]
        for this in sampling:
            this.cancel(cause, why)
        return sampling
