"""The attempts under way, those of production or those of evaluations: how many, their end, and their cancellation."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import attrs

from .._core.enums import Cause
from .._util.condition import Condition
from ._attempt import Attempt, SampleTry


@final
@attrs.define(eq=False, repr=False)
class RunningAttempts:
    """The attempts between their start and the end of their settlement; ``changed`` is notified when one leaves."""

    changed: Condition = attrs.field(factory=Condition)
    _attempts: dict[Attempt, None] = attrs.field(factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._attempts)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self._attempts)

    @contextmanager
    def holding(self, attempt: Attempt) -> Generator[None]:
        """Count this attempt as running for the block."""
        self._attempts[attempt] = None
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
