"""Batching: the decision to form a batch, to wait, or to say that none will come. Pure."""

import enum

import attrs


class Answer(enum.Enum):
    """The answer of ``decide`` to a call of ``next_batch``."""

    TAKE = "take"
    """Take ``count`` groups now."""
    WAIT = "wait"
    """More may come."""
    FAILED = "failed"
    """The engine has failed: raise its error."""
    BLOCKED = "blocked"
    """Nothing more can come before the consumer has updated the weights: raise the reason."""
    END = "end"
    """The data has ended and everything is settled."""
    CLOSED = "closed"
    """The engine is drained and nothing deliverable is left."""


@attrs.frozen(kw_only=True)
class Supply:
    """The groups that a consumer can hope for.

    ``unfinished``: waiting and running groups. ``due``: running groups that must be in this batch. ``drained``: nothing
    more will become ready. ``failed`` and ``failure_told``: the engine has failed, and a caller was told. ``blocked``:
    nothing goes on before a weight update.
    """

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
    """An answer; with TAKE, ``count`` is the number of groups to take."""

    answer: Answer
    count: int = 0


def decide(size: int, supply: Supply) -> Decision:
    """Decide on a consumer's wish for ``size`` groups.

    A failure is told at once. Afterwards the ready groups can still be had, in partial batches, too, so that an error does
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
