"""When a batch can be formed, and when none will ever come: pure decisions."""

import enum

import attrs


class Answer(enum.Enum):
    """What ``next_batch`` is to do."""

    TAKE = "take"
    """Take ``count`` groups now."""
    WAIT = "wait"
    """More may come."""
    FAILED = "failed"
    """The engine has failed: raise its error."""
    BLOCKED = "blocked"
    """Nothing more can come before the consumer has done something."""
    END = "end"
    """The data has ended and everything is settled."""
    CLOSED = "closed"
    """The engine is drained and nothing deliverable is left."""


@attrs.frozen(kw_only=True)
class Supply:
    """What a consumer can hope for, in groups. ``unfinished``: waiting and running; ``due``: running, and to be in this batch."""

    ready: int
    unfinished: int
    exhausted: bool
    drained: bool
    failed: bool
    failure_told: bool
    due: int = 0
    blocked: bool = False


@attrs.frozen
class Decision:
    """An answer, and how many groups to take where it is TAKE."""

    answer: Answer
    count: int = 0


def decide(size: int, supply: Supply) -> Decision:
    """What a consumer that wants ``size`` groups gets.

    A failure is told at once; afterwards what is ready can still be had, in partial batches too, so that an error does
    not lose good work.
    """
    if supply.failed and not supply.failure_told:
        return Decision(Answer.FAILED)
    if supply.ready >= size and not supply.due:
        return Decision(Answer.TAKE, size)
    over = supply.failed or supply.drained or (supply.exhausted and not supply.unfinished)
    if not over:
        return Decision(Answer.BLOCKED if supply.blocked else Answer.WAIT)
    if supply.ready:
        return Decision(Answer.TAKE, min(size, supply.ready))
    if supply.failed:
        return Decision(Answer.FAILED)
    return Decision(Answer.CLOSED if supply.drained else Answer.END)
