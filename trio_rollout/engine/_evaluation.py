"""Evaluation beside production, with separate slots and counts, and never a missing prompt.

The attempts of an evaluation are children of the caller's task. A weight update restarts the tries that it interrupts,
so no trajectory mixes versions. A prompt that failed for good is a group of FAILED trajectories.
"""

from collections.abc import Iterator
from typing import NoReturn, final

import attrs
import trio

from .._core.enums import Cause, Status, Stop
from .._core.samples import Samples
from .._core.settings import Staleness
from .._core.values import Group, GroupId, Prompt, Trajectory
from .._util.time import retry_wait_s, wait_s
from .._util.user_code import ends_the_process
from ..abc import Generate, Source
from ..errors import ServerError, SourceError
from ._attempt import Outcome, Unfinished, new_attempt
from ._context import RolloutContext
from ._group import run_attempt
from ._instruments import Instruments
from ._running import RunningAttempts
from ._slots import SlotLease
from ._state import EngineState, Phase

_AT_ONCE = 64
"""The most prompts that are taken from the source in one call."""


@final
@attrs.define(eq=False, repr=False, kw_only=True)
class Evaluation:
    """One evaluation's groups, by the order of their prompts."""

    state: EngineState
    context: RolloutContext
    samples: int
    _under_way: int = attrs.field(default=0, init=False)
    _groups: dict[GroupId, Group | None] = attrs.field(factory=dict, init=False)
    _running: RunningAttempts = attrs.field(factory=RunningAttempts, init=False)

    async def run(self, source: Source) -> tuple[Group, ...]:
        """Evaluate every prompt of the source; see ``RolloutEngine.evaluate``."""
        source_error: BaseException | None = None
        work = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            with work:
                nursery.start_soon(self._give_up_with_engine, work, name="evaluation: engine failure")
                nursery.start_soon(self._running.log_overdue, self.context.show_tasks, name="log overdue groups")
                source_error = await self._run_all(source)
            nursery.cancel_scope.cancel()
        if source_error is not None:
            raise source_error
        if work.cancelled_caught:
            self._say_why()
        return tuple(group for group in self._groups.values() if group is not None)

    async def _run_all(self, source: Source) -> BaseException | None:
        """Run every prompt, as slots become free. An exception of the source ends all of them, and is returned."""
        failure: BaseException | None = None
        async with trio.open_nursery() as prompts:
            try:
                while taken := await source.take(await self._room()):
                    for prompt in taken:
                        self._enter(prompt)
                        lease = await self._claimed(self.samples)
                        self._under_way += 1
                        prompts.start_soon(self._one, prompt, lease, name=f"evaluate {prompt.group_id}")
            except BaseException as error:  # noqa: ASYNC103  the boundary of the source: raised by the caller, bare
                if ends_the_process(error):
                    raise
                prompts.cancel_scope.cancel(reason="the source of the evaluation failed")
                failure = error
        return failure

    def _enter(self, prompt: Prompt) -> None:
        if prompt.group_id in self._groups:
            raise SourceError(f"evaluate: the source gave prompt {prompt.id!r} of epoch {prompt.epoch} twice")
        self._groups[prompt.group_id] = None

    async def _give_up_with_engine(self, work: trio.CancelScope) -> None:
        await self.state.wake.consumers.wait_until(self._is_in_vain)
        work.cancel(reason="the engine failed, cannot go on before a weight update, or is left")

    def _is_in_vain(self) -> bool:
        state = self.state
        return (
            state.failure.error is not None or state.failure.blocked_reason is not None or state.phase >= Phase.LEAVING
        )

    def _say_why(self) -> NoReturn:
        failure = self.state.failure
        if failure.error is not None:
            failure.tell(failure.error)
        self.state.require_open("evaluate")
        raise ServerError(f"evaluate: {failure.blocked_reason}")

    async def _room(self) -> int:
        """Wait for free slots, and return how many prompts may start. Prompts that back off are bounded by the slots, too."""
        slots = self.state.evaluation_slots
        wanted = min(self.samples, slots.total)
        await slots.changed.wait_until(lambda: slots.free >= wanted and self._under_way < slots.total)
        return max(1, min(_AT_ONCE, slots.free // wanted))

    async def _one(self, prompt: Prompt, lease: SlotLease) -> None:
        try:
            await self._settled(prompt, lease)
        finally:
            self._under_way -= 1
            self.state.evaluation_slots.changed.notify()

    async def _settled(self, prompt: Prompt, lease: SlotLease) -> None:
        samples, tally = Samples.of(self.samples), self.state.evaluated
        try:
            self._groups[prompt.group_id] = await self._whole(prompt, samples, lease)
        except BaseException:
            tally.drop(Cause.CANCELLED, samples.kept_tokens)
            raise
        tally.deliver(samples)

    async def _whole(self, prompt: Prompt, samples: Samples, lease: SlotLease) -> Group:
        """Run attempts, the first one with this lease, until the group is whole or has failed for good."""
        retry, number = self.context.settings.retry, 1
        outcome = await self._attempt(prompt, number, samples, lease)
        while isinstance(outcome, Unfinished) and not outcome.permanent:
            backoff = number if outcome.cause.uses_attempt else 0
            await wait_s(retry_wait_s(backoff, retry=retry, rng=self.context.ports.random))
            number += 1
            outcome = await self._attempt(prompt, number, samples, await self._claimed(len(samples.missing())))
        rows = _rows_of(prompt, samples, outcome)
        return Group(id=prompt.group_id, attempt=number, prompt=prompt, trajectories=rows)

    async def _claimed(self, missing: int) -> SlotLease:
        """Wait for slots and the gate: the group's deadline begins when it can sample. Cancelled, none was taken."""
        slots, gate = self.state.evaluation_slots, self.context.gate
        wanted = min(missing, slots.total)
        await slots.changed.wait_until(lambda: slots.free >= wanted)
        while not gate.is_open:
            await gate.wait()
            await slots.changed.wait_until(lambda: slots.free >= wanted)
        return slots.claim(wanted)

    async def _attempt(self, prompt: Prompt, number: int, samples: Samples, lease: SlotLease) -> Outcome:
        seconds = self.context.settings.deadlines.group
        tally = self.state.evaluated
        attempt = new_attempt(prompt, number, samples, seconds=seconds, min_samples=0, tally=tally)
        with self.state.evaluations.holding(attempt), self._running.holding(attempt):
            return await run_attempt(attempt, self.context, lease)


def _rows_of(prompt: Prompt, samples: Samples, outcome: Outcome) -> Iterator[Trajectory]:
    """Iterate over a row for each sample: the finished one, or one that is FAILED and has the failure.

    If its scorer failed, or the group's, a FAILED row has what was sampled.
    """
    if isinstance(outcome, Unfinished):
        finished = () if outcome.sample is None else samples.kept()  # None: the group reward failed
    else:
        finished = outcome.group.trajectories
    rows = {row.index: row for row in finished}
    nothing = Trajectory(prompt=prompt, index=0, segments=(), stop=Stop.ABORT, turns=0, metadata=prompt.metadata)
    for index, sample in enumerate(samples):
        if index in rows:
            yield rows[index]
        else:
            failure = outcome.failure_for(index) if isinstance(outcome, Unfinished) else None
            made = sample.trajectory or attrs.evolve(nothing, index=index)
            yield attrs.evolve(made, status=Status.FAILED, error=sample.failure or failure)


def evaluation_context(context: RolloutContext, generate: Generate | None, samples: int) -> RolloutContext:
    """Return the context of an evaluation: no filter, no instruments, no continuing across versions, perhaps another generate function."""
    settings = attrs.evolve(
        context.settings,
        samples_per_prompt=samples,
        partial=False,
        min_samples=None,
        staleness=Staleness(),
        max_running=max(context.settings.max_running, samples),
    )
    return attrs.evolve(
        context, generate=generate or context.generate, group_filter=None, settings=settings, instruments=Instruments()
    )
