"""One sample of an attempt: tries, one after the other, until it is finished or has failed for good.

The loop is the retry: each try is a scope of its sample, and a try that ends without a result is followed by a rest, which
holds no slot, and by the next try. Siblings are not told. ``Attempt.settle_try`` decides what a failure costs.
"""

import logging

import attrs
import trio

from .._core.enums import Cause, Status
from .._core.events import SampleFinished, SampleRetried
from .._core.values import Prompt, Trajectory, copied
from .._util.time import retry_wait_s, wait_s
from .._util.user_code import ends_the_process
from ..errors import GenerateError
from ._attempt import Attempt, SampleTry
from ._context import RolloutContext, fresh_copy
from ._gate import is_limit
from ._replay import replay_of
from ._rollout import RolloutHandle
from ._scoring import reward_of
from ._slots import SlotLease

_LOGGER = logging.getLogger("trio_rollout")


async def run_sample(attempt: Attempt, context: RolloutContext, lease: SlotLease, index: int) -> None:
    """Run tries at one sample until it is finished, has failed for good, or its attempt ends.

    Blocks for slots, for the tries and for the rests between them. Cancelled, the try's requests are aborted and its tools
    are closed first; what becomes of the sample is the attempt's to say.
    """
    settings = context.settings
    while True:
        await lease.take()
        this = attempt.begin_try(index, settings.deadlines.rollout)
        try:
            try:
                with this.scope:
                    await _scored_rollout(this, context)
            except BaseException as error:  # noqa: ASYNC103  the boundary of user code, whatever class it raises
                if ends_the_process(error):
                    raise
                this.fail(error, settings.retry)
            if this.is_kept:
                return
            if attempt.has_ended:
                await trio.lowlevel.checkpoint()  # raises Cancelled: the attempt's end is this sample's too
            rest = _rest_after(this, context)
        finally:
            attempt.end_try(this)
            lease.release_one()
        if rest is None:
            return
        context.gate.wake.consumers.notify()  # a batch may have waited for a group that is held up now
        await wait_s(rest)


def _rest_after(this: SampleTry, context: RolloutContext) -> float | None:
    """Settle a try that failed. Return the seconds to rest before the next one; None if there is none."""
    failed, attempt, retry = this.failed(), this.attempt, context.settings.retry
    verdict = attempt.settle_try(this, failed, retry)
    if verdict is None:
        return None
    if context.instruments.working:
        context.instruments.emit(
            SampleRetried(
                id=this.id,
                attempt=attempt.number,
                index=this.index,
                tries=this.number,
                cause=failed.cause,
                error=failed.failure,
            )
        )
    if failed.cause in {Cause.ERROR, Cause.INFRASTRUCTURE}:  # their author should not have to look for them
        text = context.failures.text_for("rollout", failed.failure)
        if text is not None:
            _LOGGER.warning("group %s: sample %d runs again, try %d failed: %s", this.id, this.index, this.number, text)
    return retry_wait_s(verdict.backoff, retry=retry, rng=context.ports.random)


async def _scored_rollout(this: SampleTry, context: RolloutContext) -> None:
    this.sampled = trajectory = _unscored(this) or await _generated(this, context)
    try:
        reward = await reward_of(trajectory, context)
    except BaseException as error:  # noqa: ASYNC103  the boundary of the scorer: the sampled tokens are kept
        if ends_the_process(error):
            raise
        this.fail(error, context.settings.retry, unscored=trajectory)
        return  # noqa: ASYNC104  a real cancellation was raised again above
    # The trainer gets the source's own prompt, whatever user code did to the copy it was given.
    trajectory = copied(trajectory, Trajectory, {"prompt": this.attempt.prompt, "reward": reward})
    if this.claim(trajectory) and context.instruments.working:
        context.instruments.emit(SampleFinished(id=this.id, attempt=this.attempt.number, trajectory=trajectory))


def _unscored(this: SampleTry) -> Trajectory | None:
    """Return what an earlier try sampled, with a fresh prompt, if only a reward is missing."""
    found = this.take_unscored()
    return None if found is None else copied(found, Trajectory, {"prompt": fresh_copy(this.attempt.prompt)})


async def _generated(this: SampleTry, context: RolloutContext) -> Trajectory:
    prompt = fresh_copy(this.attempt.prompt)
    rollout = RolloutHandle(this, context, prompt)
    if this.attempt.turns is not None:
        rollout.replay = replay_of(this, context, this.attempt.turns)
    try:
        if not is_limit(context.settings.deadlines.no_progress):
            made: object = await context.generate(prompt, rollout)
        else:
            made = await _watched(this, context, prompt, rollout)
        return _accepted(made, this)
    finally:
        this.generating = False
        rollout.is_over = True
        if rollout.opened_tools is not None:
            await rollout.opened_tools.aclose()  # noqa: ASYNC102  it shields and bounds itself


async def _watched(this: SampleTry, context: RolloutContext, prompt: Prompt, rollout: RolloutHandle) -> object:
    limit = context.settings.deadlines.no_progress
    with context.gate.clock(limit) as rollout.progress:
        return await context.generate(prompt, rollout)
    raise await this.give_up(Cause.NO_PROGRESS, f"nothing new for {limit} s")


def _accepted(trajectory: object, this: SampleTry) -> Trajectory:
    if not isinstance(trajectory, Trajectory):
        why = f"a Trajectory wanted, got {type(trajectory).__name__}"
    elif trajectory.status is Status.ABORTED or trajectory.status is Status.FAILED:
        reason = f": {trajectory.error}" if trajectory.error else ""
        why = f"returned a trajectory that is {trajectory.status.value}{reason}"
    elif not any(segment.response_length for segment in trajectory.segments):
        why = "returned a trajectory without one token"
    else:
        return trajectory if trajectory.index == this.index else attrs.evolve(trajectory, index=this.index)
    raise GenerateError(f"generate function: {why}")
