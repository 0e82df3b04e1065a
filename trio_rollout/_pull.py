"""Writing a pull down. Bad input must not cost a run's work: a prompt that can't be stored is given up, the others go on."""

from collections.abc import Mapping, Sequence

from ._core.enums import Cause
from ._core.events import Pulled, Quarantined
from ._core.failures import failure_of
from ._core.values import GroupId, Prompt, QuarantineReport
from ._record import Record
from .abc import Source
from .errors import DataRefused


async def record_pull(record: Record, prompts: Sequence[Prompt], source: Source) -> Mapping[GroupId, QuarantineReport]:
    """Write down that these prompts left the source, and the end of those that can't be stored; returns their reports.

    Blocks until it is on disk, in one transaction; without a ledger this returns at once. Cancelled before the write was
    accepted, nothing is written.

    Raises:
      DataRefused: it is not a prompt that can't be stored, but the source's state.
      LedgerError: the write failed; the engine fails with it.
    """
    refused: dict[GroupId, QuarantineReport] = {}
    if record.ledger is None:
        return refused
    state = source.state()
    while True:  # noqa: ASYNC913  each round refuses one prompt more, so it ends; writing is a cancel point
        stored = tuple(_without_data(prompt) if prompt.group_id in refused else prompt for prompt in prompts)
        ends = (Quarantined(report=report) for report in refused.values())
        try:
            await record.write(Pulled(prompts=stored, source_state=state), *ends)
        except DataRefused as error:
            if error.group is None or error.group in refused:
                raise
            failure = failure_of(error, group=error.group)
            refused[error.group] = QuarantineReport(id=error.group, cause=Cause.ERROR, attempts=0, error=failure)
        else:
            return refused


def _without_data(prompt: Prompt) -> Prompt:
    """What stands in the ledger for a prompt that can't."""
    return Prompt(id=prompt.id, epoch=prompt.epoch, text="(it could not be stored)")
