"""The recorded turns of one group's unfinished samples: their records in the ledger, their tokens in the tally.

A turn that is recorded and not given back yet is a kept one; while a try is under way that has it, its tokens are in flight.
Only user code's own failure ends the record: the same turns would lead to the same failure. A sample that is finished, or
failed for good, has no record any more. See docs/decisions/0052-recorded-turns-are-given-back.md.
"""

from collections.abc import Sequence
from typing import final

import attrs

from .._core.enums import Cause
from .._core.ledger_events import SamplesTried, TurnRecorded, TurnsDropped
from .._core.samples import Samples, SampleState
from .._core.tally import Tally
from .._core.turn_log import RecordedTurn, TurnLog
from .._core.values import GroupId
from ._ledger import SampleRecorder


@final
@attrs.define(eq=False, repr=False)
class TurnKeeper:
    """Keeps the recorded turns of a group's samples, by index."""

    id: GroupId
    samples: Samples
    recorder: SampleRecorder | None
    tally: Tally

    def log_of(self, index: int) -> TurnLog:
        """Return the log of a sample, which may be empty."""
        sample = self.samples[index]
        if sample.turns is None:
            sample.turns = TurnLog()
        return sample.turns

    def note(self, index: int, record: RecordedTurn) -> None:
        """Have a turn written down that was added to its sample's log."""
        if self.recorder is not None:
            self.recorder.note(TurnRecorded(id=self.id, index=index, record=record))

    def drop(self, index: int, dropped: Sequence[RecordedTurn], cause: Cause) -> None:
        """Count turns as wasted that were left and will not be given back, and have their records deleted."""
        if dropped:
            self._lose(cause, sum(record.tokens for record in dropped))
            self._delete(index, dropped)
            if self.recorder is not None:  # the tokens in vain go with the records
                counts = tuple([sample.counts for sample in self.samples])
                self.recorder.note(SamplesTried(id=self.id, samples=counts, wasted=dict(self.samples.wasted)))

    def end_try(self, index: int, cause: Cause) -> int:
        """End a try without a result. Return the tokens of its turns that the next try gets back."""
        log = self.samples[index].turns
        if log is None:
            return 0
        if cause is Cause.ERROR or self.samples[index].state is SampleState.FAILED:
            self.forget(index, cause)
            return 0
        kept = log.tokens_of_try
        self.tally.keep(kept)
        log.rewind(cause)
        return kept

    def finish(self, index: int) -> None:
        """Forget the turns of a finished sample. The event of the sample deletes their records."""
        log, self.samples[index].turns = self.samples[index].turns, None
        if log is not None:
            self._lose(log.cause, log.tokens_left)

    def forget(self, index: int, cause: Cause) -> None:
        """Forget the turns of a sample that failed; count those as wasted that are left."""
        log, self.samples[index].turns = self.samples[index].turns, None
        if log is not None and len(log):
            self._lose(cause, log.tokens_left)
            self._delete(index, log.drop_all())

    def forget_all(self, cause: Cause) -> None:
        """Forget the turns of every sample, for this reason: the group is given up."""
        for index, _ in enumerate(self.samples):
            self.forget(index, cause)

    def _lose(self, cause: Cause, tokens: int) -> None:
        self.tally.drop(cause, tokens)
        self.samples.wasted[cause] += tokens

    def _delete(self, index: int, records: Sequence[RecordedTurn]) -> None:
        numbers = tuple(record.number for record in records)
        if self.recorder is not None:
            self.recorder.note(TurnsDropped(id=self.id, index=index, numbers=numbers))
