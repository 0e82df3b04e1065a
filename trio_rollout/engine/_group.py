"""Running one attempt: the samples that are missing, in one nursery, then the group's reward and the filter.

A sample that fails is tried again alone; its siblings go on. Nothing of an attempt outlives its scope.
See docs/decisions/0049-the-grain-is-the-sample.md.
"""

import attrs
import trio

from .._core.enums import Cause
from .._core.settings import Retry
from .._core.values import Group, MissingSample
from .._util.user_code import ends_the_process
from ..abc import Drop
from ..errors import GenerateError
from ._attempt import Attempt, Dropped, Finished, Outcome, Result, Unfinished
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
            outcome = attempt.claim(await _group_of(attempt, context, lease))
    except BaseException as error:  # noqa: ASYNC103  the boundary of user code: the group's reward, its filter
        if ends_the_process(error):
            raise
        attempt.fail(error, retry)
    if outcome is None:
        outcome = attempt.unfinished()
    return _with_samples_stopped(attempt, outcome, retry) if isinstance(outcome, Unfinished) else outcome


def _with_samples_stopped(attempt: Attempt, outcome: Unfinished, retry: Retry) -> Unfinished:
    """End the samples with their attempt. Where all were finished, the scorers of the group had the time: they are bounded too."""
    samples = attempt.samples
    only_scoring = not samples.unfinished() and not samples.missing()
    attempt.stop_samples(outcome.cause, outcome.failure, retry)
    used_up = only_scoring and outcome.cause.uses_attempt and attempt.number >= retry.max_attempts
    return attrs.evolve(outcome, permanent=True) if used_up else outcome


async def _group_of(attempt: Attempt, context: RolloutContext, lease: SlotLease) -> Result:
    with lease:
        while missing := _to_run(attempt, context):
            await _require_unended(attempt)
            async with trio.open_nursery() as nursery:
                name = f"rollout {attempt.id} attempt {attempt.number} index "
                for index in missing:
                    nursery.start_soon(run_sample, attempt, context, lease, index, name=f"{name}{index}")
            await _require_unended(attempt)
    samples = attempt.samples
    if not samples.can_complete(attempt.min_samples):  # of a group that a ledger remembers
        raise GenerateError(f"group {attempt.id}: {len(list(samples.failures()))} of its samples had failed for good")
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
    stale = attempt.samples.stale(context.settings.staleness, context.gate.version)
    attempt.drop(stale)
    most = context.settings.retry.max_free
    if any(attempt.samples[index].unpenalized > most for index in stale):
        why = f"a sample was too old for Staleness more than {most} times: it takes longer than its weights are in use"
        attempt.cancel(Cause.STALE, why, permanent=True)
    return attempt.samples.missing()


async def _require_unended(attempt: Attempt) -> None:
    """Raise Cancelled if the attempt has ended: what is missing then is the next attempt's."""
    if attempt.has_ended:
        await trio.lowlevel.checkpoint()
