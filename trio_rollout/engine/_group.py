"""Running one attempt: n rollouts in one nursery, their rewards, the group's reward, the filter.

The first failure ends the attempt and so cancels the siblings. Nothing of an attempt outlives its scope.
"""

import math

import attrs
import trio

from .._core.enums import Cause, Status
from .._core.events import SampleFinished
from .._core.values import Group, Prompt, Trajectory, copied
from ..abc import Drop
from ..errors import GenerateError
from ._attempt import Attempt, Dropped, Finished, Outcome, Result, Unfinished, log_overdue_tasks
from ._context import RolloutContext, fresh_copy
from ._gate import deadline_after, limit_of
from ._rollout import RolloutHandle
from ._scoring import group_scored, reward_of, verdict_on
from ._slots import SlotLease


async def run_attempt(attempt: Attempt, context: RolloutContext, slots: SlotLease) -> Outcome:
    """Run the attempt to its single outcome.

    Blocks until everything that it started is over. Each rollout gives its slot back when it ends. Cancelled from outside,
    the attempt is wrapped up before Cancelled goes on, and there is no outcome.
    """
    outcome: Outcome | None = None
    try:
        with attempt.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(
                    log_overdue_tasks, attempt, context.show_tasks, name=f"deadline of group {attempt.id}"
                )
                outcome = await _ended(attempt, context, slots)
                nursery.cancel_scope.cancel()
    except Exception as error:  # noqa: BLE001  the boundary of user code: what its nurseries raised while being cancelled
        attempt.fail(error)
    return attempt.unfinished() if outcome is None else outcome


async def _ended(attempt: Attempt, context: RolloutContext, slots: SlotLease) -> Outcome | None:
    """Return the outcome; None if user code failed: caught here, the exception is not yet in a group of the nursery."""
    try:
        return attempt.claim(await _group_of(attempt, context, slots))
    except Exception as error:  # noqa: BLE001  the boundary of user code
        attempt.fail(error)
    return None


async def _group_of(attempt: Attempt, context: RolloutContext, slots: SlotLease) -> Result:
    rows: dict[int, Trajectory] = {}
    rollouts = attempt.generating
    name = f"rollout {attempt.id} attempt {attempt.number} index"
    async with trio.open_nursery() as nursery:
        for index in range(rollouts):
            nursery.start_soon(_one_rollout, attempt, context, slots, index, rows, name=f"{name} {index}")
    group = Group(
        id=attempt.id,
        attempt=attempt.number,
        prompt=attempt.prompt,
        trajectories=[rows[index] for index in sorted(rows)],
    )
    group = await group_scored(group, context)
    verdict = await verdict_on(group, context)
    return Dropped(group, verdict.reason) if isinstance(verdict, Drop) else Finished(group)


async def _one_rollout(
    attempt: Attempt, context: RolloutContext, slots: SlotLease, index: int, rows: dict[int, Trajectory]
) -> None:
    seconds = context.settings.deadlines.rollout
    deadline = deadline_after(seconds)
    try:
        if deadline == math.inf:  # a scope costs a fiftieth of a small rollout
            rows[index] = await _scored_rollout(attempt, context, index, deadline)
        else:
            with trio.CancelScope(deadline=deadline) as scope:
                rows[index] = await _scored_rollout(attempt, context, index, deadline)
            if scope.cancelled_caught:
                attempt.cancel(Cause.DEADLINE, f"rollout {index}: its deadline of {seconds} s passed", sample=index)
        if context.instruments and index in rows:
            context.instruments.emit(SampleFinished(id=attempt.id, attempt=attempt.number, trajectory=rows[index]))
    except Exception as error:  # noqa: BLE001  the boundary of user code: its failure becomes the attempt's
        attempt.fail(error, index)
    finally:
        if index not in rows:
            attempt.leave_unclaimed(index)
        slots.release_one()


async def _scored_rollout(attempt: Attempt, context: RolloutContext, index: int, deadline: float) -> Trajectory:
    prompt = fresh_copy(attempt.prompt)
    rollout = RolloutHandle(attempt, context, prompt, index, min(deadline, attempt.deadline))
    try:
        if limit_of(context.settings.deadlines.no_progress) == math.inf:
            made: object = await context.generate(prompt, rollout)
        else:
            made = await _watched(attempt, context, prompt, rollout)
        trajectory = _accepted(made, attempt, index)
    finally:
        attempt.generating -= 1
        rollout.is_over = True
        if rollout.opened_tools is not None:
            await rollout.opened_tools.aclose()  # noqa: ASYNC102  it shields and bounds itself
    # The trainer gets the source's own prompt, whatever user code did to the copy it was given.
    return copied(trajectory, Trajectory, {"prompt": attempt.prompt, "reward": await reward_of(trajectory, context)})


async def _watched(attempt: Attempt, context: RolloutContext, prompt: Prompt, rollout: RolloutHandle) -> object:
    limit = context.settings.deadlines.no_progress
    with context.gate.clock(limit) as rollout.progress:
        return await context.generate(prompt, rollout)
    raise await attempt.give_up(Cause.NO_PROGRESS, f"rollout {rollout.index}: nothing new for {limit} s")


def _accepted(trajectory: object, attempt: Attempt, index: int) -> Trajectory:
    if not isinstance(trajectory, Trajectory):
        why = f"a Trajectory wanted, got {type(trajectory).__name__}"
    elif trajectory.status is Status.ABORTED or trajectory.status is Status.FAILED:
        reason = f": {trajectory.error}" if trajectory.error else ""
        why = f"returned a trajectory that is {trajectory.status.value}{reason}"
    elif not any(segment.response_length for segment in trajectory.segments):
        why = "returned a trajectory without one token"
    else:
        return trajectory if trajectory.index == index else attrs.evolve(trajectory, index=index)
    raise GenerateError(f"generate function, group {attempt.id}, rollout {index}: {why}")


__all__ = ["Unfinished", "run_attempt"]
