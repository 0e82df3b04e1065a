"""Running one attempt: the samples that are missing, in one nursery, then the group's reward and the filter.

A sample that fails is tried again alone; its siblings go on. Nothing of an attempt outlives its scope.
See docs/decisions/0049-the-grain-is-the-sample.md.
"""

import trio

from .._core.values import Group, MissingSample
from .._util.user_code import ends_the_process
from ..abc import Drop
from ._attempt import Attempt, Dropped, Finished, Outcome, Result, Unfinished, log_overdue_tasks
from ._context import RolloutContext
from ._sample import run_sample
from ._scoring import group_scored, verdict_on
from ._slots import SlotLease


async def run_attempt(attempt: Attempt, context: RolloutContext, lease: SlotLease) -> Outcome:
    """Run the attempt to its single outcome.

    Blocks until everything it started is over. Each try gives its slot back at its end. Cancelled from outside, all of it
    is cleaned up before Cancelled goes on, and there is no outcome.
    """
    outcome: Outcome | None = None
    retry = context.settings.retry
    try:
        with attempt.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(
                    log_overdue_tasks, attempt, context.show_tasks, name=f"deadline of group {attempt.id}"
                )
                outcome = await _ended(attempt, context, lease)
                nursery.cancel_scope.cancel()
    except BaseException as error:  # noqa: ASYNC103  what user code raised while it was being cancelled
        if ends_the_process(error):
            raise
        attempt.fail(error, retry)
    if outcome is None:
        outcome = attempt.unfinished()
    if isinstance(outcome, Unfinished):
        attempt.stop_samples(outcome.cause, outcome.failure, retry)
    return outcome


async def _ended(attempt: Attempt, context: RolloutContext, lease: SlotLease) -> Outcome | None:
    """Return the outcome; None if it failed: caught here, the failure is the exception itself and no nursery's group."""
    try:
        return attempt.claim(await _group_of(attempt, context, lease))
    except BaseException as error:  # noqa: ASYNC103  the boundary of user code: the group's reward, its filter
        if ends_the_process(error):
            raise
        attempt.fail(error, context.settings.retry)
    return None


async def _group_of(attempt: Attempt, context: RolloutContext, lease: SlotLease) -> Result:
    with lease:
        while missing := _to_run(attempt, context):
            async with trio.open_nursery() as nursery:
                for index in missing:
                    name = f"rollout {attempt.id} attempt {attempt.number} index {index}"
                    nursery.start_soon(run_sample, attempt, context, lease, index, name=name)
            if attempt.has_ended:
                await trio.lowlevel.checkpoint()  # raises Cancelled: what is missing now is the next attempt's
    samples = attempt.samples
    group = Group(
        id=attempt.id,
        attempt=attempt.number,
        prompt=attempt.prompt,
        trajectories=samples.kept(),
        missing=[MissingSample(index=index, failure=failure) for index, failure in samples.failures()],
    )
    group = await group_scored(group, context)
    verdict = await verdict_on(group, context)
    return Dropped(group, verdict.reason) if isinstance(verdict, Drop) else Finished(group)


def _to_run(attempt: Attempt, context: RolloutContext) -> tuple[int, ...]:
    """Return the samples that are missing now; finished ones that are too old for their group are missing again."""
    attempt.drop(attempt.samples.stale(context.settings.staleness, context.gate.version))
    return attempt.samples.missing()
