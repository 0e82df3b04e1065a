"""The attempts under way: who can be cancelled, by whom, and when the last one is over."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import final

import attrs

from .._core.enums import Cause
from .._util.condition import Condition
from ._attempt import Attempt


@final
@attrs.define(eq=False, repr=False)
class RunningAttempts:
    """Attempts between their start and the end of their settlement. ``changed`` is notified when one leaves."""

    changed: Condition = attrs.field(factory=Condition, init=False)
    _attempts: dict[Attempt, None] = attrs.field(factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._attempts)

    @contextmanager
    def holding(self, attempt: Attempt) -> Generator[None]:
        """Count this attempt as under way for the block."""
        self._attempts[attempt] = None
        try:
            yield
        finally:
            del self._attempts[attempt]
            self.changed.notify()

    def cancel_all(self, cause: Cause, why: str) -> None:
        """Cancel every attempt that has no outcome yet."""
        for attempt in list(self._attempts):
            attempt.cancel(cause, why)

    def all(self) -> list[Attempt]:
        """The attempts under way."""
        return list(self._attempts)

    def cancel_sampling(self, cause: Cause, why: str) -> None:
        """Cancel the attempts that still sample; those that are only being scored have all their tokens."""
        for attempt in list(self._attempts):
            if attempt.generating:
                attempt.cancel(cause, why)
