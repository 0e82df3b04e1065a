"""Scoring what a ledger has stored again, without sampling: a pass over its groups, each written in one transaction.

A killed or cancelled pass goes on where it was, and what becomes of a group follows from its state:
docs/decisions/0053-rescoring-is-a-pass-over-what-is-stored.md.
"""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar, final

import attrs
import trio

from .._core.failures import cause_of, failure_of
from .._core.ledger_events import Filtered, LedgerEvent, Ready, Rescored, Rescoring, Retried, Stored
from .._core.lifecycle import State
from .._core.samples import tokens_of
from .._core.settings import EngineSettings
from .._core.values import Failure, Group, GroupId, Prompt, QuarantineReport, Trajectory, copied
from .._util.ports import Ports
from .._util.user_code import ends_the_process, logging_failures
from ..abc import Drop, GroupFilter, GroupReward, Keep, Reward
from ..errors import DataRefused, LedgerError
from ._context import Scoring, fresh_copy
from ._scoring import group_scored, reward_of, verdict_on

T = TypeVar("T")
_LOGGER = logging.getLogger("trio_rollout")
_PAGE = 8
"""Groups that are read at once: with long answers a group has megabytes."""
_UNFINISHED = frozenset({State.WAITING, State.QUARANTINED})
_ALL = (State.WAITING, State.QUARANTINED, State.READY, State.DELIVERED, State.ACKED)


class ScoredLedger(Protocol):
    """A ledger whose groups can be scored again: the one of ``open_ledger``."""

    async def begin_rescoring(self, reward: str, states: Sequence[State] = ..., *, again: bool = False) -> Rescoring:
        """Begin a pass, or go on with one that was interrupted."""
        ...

    async def stored_after(self, place: int, number: int, states: Sequence[State], limit: int) -> Sequence[Stored]:
        """Return the next groups that the pass has not been through."""
        ...

    async def finish_rescoring(self, number: int) -> None:
        """Note that the pass is through."""
        ...

    async def record(self, events: Sequence[LedgerEvent]) -> None:
        """Write events in one transaction."""
        ...


@attrs.frozen(kw_only=True)
class RescoredGroup:
    """A group that was scored again: its state before and after, and its trajectories with their new rewards.

    ``error`` is the first failure of its scorers, None if there was none. ``trajectories`` are those that were written; a
    report has none.
    """

    id: GroupId
    before: State
    after: State
    trajectories: tuple[Trajectory, ...]
    error: Failure | None = None


@attrs.frozen(kw_only=True)
class RescoreReport:
    """The result of a pass over a ledger, in groups.

    ``scored`` have a new reward for each stored trajectory; of them ``ready`` were quarantined and are ready now, and
    ``unfinished`` still miss samples. ``failed`` are those for which a scorer failed. ``skipped`` counts others by the
    reason. ``went_on``: an interrupted pass was taken up.
    """

    scored: int
    ready: int
    filtered: int
    unfinished: int
    failed: tuple[RescoredGroup, ...]
    skipped: Mapping[str, int]
    went_on: bool


@final
@attrs.define(eq=False)
class _Pass:
    """One pass: the groups scored by their states before and after, those that failed, and the error that ended it."""

    ledger: ScoredLedger
    scoring: Scoring
    begun: Rescoring
    tell: Callable[[RescoredGroup], None]
    rollouts: trio.CapacityLimiter
    scored: Counter[tuple[State, State]] = attrs.field(factory=Counter, init=False)
    failed: list[RescoredGroup] = attrs.field(factory=list, init=False)
    broken: LedgerError | None = attrs.field(default=None, init=False)

    async def run(self, states: Sequence[State]) -> RescoreReport:
        """Score the groups in these states, in the order in which they were pulled, several at once."""
        async with trio.open_nursery() as nursery:
            try:
                await self._start_all(states, nursery)
            except LedgerError as error:
                self._break(error, nursery.cancel_scope)
        if self.broken is not None:
            raise self.broken
        if all(group.after in _UNFINISHED for group in self.failed):
            await self.ledger.finish_rescoring(self.begun.number)
        return self._report()

    async def _start_all(self, states: Sequence[State], nursery: trio.Nursery) -> None:
        groups = trio.CapacityLimiter(max(1, int(self.rollouts.total_tokens) // self.begun.samples_per_prompt))
        place = -1
        while page := await self.ledger.stored_after(place, self.begun.number, states, _PAGE):
            for stored in page:
                place = stored.place
                await groups.acquire_on_behalf_of(place)
                nursery.start_soon(self._score, stored, groups, nursery.cancel_scope)

    def _break(self, error: LedgerError, everything: trio.CancelScope) -> None:
        self.broken = self.broken or error
        everything.cancel(reason="the ledger failed")

    async def _score(self, stored: Stored, groups: trio.CapacityLimiter, everything: trio.CancelScope) -> None:
        try:
            found = await self._written(stored)
        except LedgerError as error:
            self._break(error, everything)
            return
        finally:
            groups.release_on_behalf_of(stored.place)
        self._note(found)

    async def _written(self, stored: Stored) -> RescoredGroup:
        rows = await self._scored(stored)
        try:
            if stored.group is not None:
                return await self._finished(stored, stored.group, rows)
            return await self._with_samples(stored, rows)
        except DataRefused as error:  # a scorer put something into the group that can't be stored
            return _left_alone(stored, failure_of(error, group=stored.prompt.group_id, attempt=stored.attempt))

    async def _scored(self, stored: Stored) -> list[Trajectory | Failure]:
        """Return each trajectory with its new reward, or the failure of its scorer."""
        found: dict[int, Trajectory | Failure] = {}

        async def score(place: int, trajectory: Trajectory) -> None:
            async with self.rollouts:
                found[place] = await self._or_failure(stored, partial(self._with_reward, stored.prompt, trajectory))

        async with trio.open_nursery() as nursery:
            for place, trajectory in enumerate(stored.trajectories):
                nursery.start_soon(score, place, trajectory)
        return [found[place] for place in sorted(found)]

    async def _with_reward(self, prompt: Prompt, trajectory: Trajectory) -> Trajectory:
        shown = copied(trajectory, Trajectory, {"prompt": fresh_copy(prompt)})
        return copied(trajectory, Trajectory, {"reward": await reward_of(shown, self.scoring)})

    async def _or_failure(self, stored: Stored, call: Callable[[], Awaitable[T]]) -> T | Failure:
        try:
            return await call()
        except BaseException as error:  # noqa: ASYNC103  the boundary of user code, whatever class it raises
            if ends_the_process(error):
                raise
            cause = cause_of(error, self.scoring.settings.retry.infrastructure)
            return failure_of(error, cause, group=stored.prompt.group_id, attempt=stored.attempt)  # noqa: ASYNC104

    async def _finished(self, stored: Stored, body: Group, rows: Sequence[Trajectory | Failure]) -> RescoredGroup:
        """Give a group that is ready, delivered or acked its new rewards: all of them, or none."""
        scored = [row for row in rows if isinstance(row, Trajectory)]
        if len(scored) < len(rows):
            return _left_alone(stored, next(row for row in rows if isinstance(row, Failure)))
        whole = attrs.evolve(body, trajectories=scored)
        group = await self._or_failure(stored, partial(group_scored, whole, self.scoring))
        if isinstance(group, Failure):
            return _left_alone(stored, group)
        await self.ledger.record([Rescored(id=group.id, number=self.begun.number, group=group)])
        return RescoredGroup(id=group.id, before=stored.state, after=stored.state, trajectories=group.trajectories)

    async def _with_samples(self, stored: Stored, rows: Sequence[Trajectory | Failure]) -> RescoredGroup:
        """Give the samples of an unfinished group their new rewards; a quarantined one that misses none is finished."""
        gid = stored.prompt.group_id
        kept = tuple(row for row in rows if isinstance(row, Trajectory))
        error = next((row for row in rows if isinstance(row, Failure)), None)
        if stored.state is State.QUARANTINED and len(kept) == self.begun.samples_per_prompt:
            group = Group(id=gid, attempt=stored.attempt + 1, prompt=stored.prompt, trajectories=kept)
            judged = await self._or_failure(stored, partial(self._judged, group))
            if not isinstance(judged, Failure):
                return await self._settled(stored, *judged)
            error = judged
        unscored = tuple(
            attrs.evolve(trajectory, reward=None)
            for trajectory, row in zip(stored.trajectories, rows, strict=True)
            if isinstance(row, Failure)
        )
        report = None if error is None else _report(stored, error)
        await self.ledger.record([
            Rescored(id=gid, number=self.begun.number, kept=kept, unscored=unscored, report=report)
        ])
        after = stored.state if report is None else State.QUARANTINED
        return RescoredGroup(id=gid, before=stored.state, after=after, trajectories=kept, error=error)

    async def _judged(self, group: Group) -> tuple[Group, Keep | Drop]:
        scored = await group_scored(group, self.scoring)
        return scored, await verdict_on(scored, self.scoring)

    async def _settled(self, stored: Stored, group: Group, verdict: Keep | Drop) -> RescoredGroup:
        """End the quarantine of a group that has all its rewards."""
        tokens, wasted = stored.tokens or sum(map(tokens_of, group.trajectories)), stored.wasted
        end: LedgerEvent = Ready(group=group, tokens=tokens, wasted=wasted)
        if isinstance(verdict, Drop):
            end = Filtered(id=group.id, attempt=group.attempt, reason=verdict.reason, tokens=tokens, wasted=wasted)
        await self.ledger.record([Rescored(id=group.id, number=self.begun.number), Retried(id=group.id), end])
        after = State.READY if isinstance(verdict, Keep) else State.FILTERED
        return RescoredGroup(id=group.id, before=stored.state, after=after, trajectories=group.trajectories)

    def _note(self, found: RescoredGroup) -> None:
        """Count a group, and tell of it; its tokens are not kept."""
        if found.error is None:
            self.scored[found.before, found.after] += 1
        else:
            self.failed.append(attrs.evolve(found, trajectories=()))
        with logging_failures(_LOGGER, "the function that is told of rescored groups failed"):
            self.tell(found)

    def _report(self) -> RescoreReport:
        """Return the counts, once all groups have been scored."""
        return RescoreReport(
            scored=self.scored.total(),
            ready=self.scored[State.QUARANTINED, State.READY],
            filtered=self.scored[State.QUARANTINED, State.FILTERED],
            unfinished=sum(count for (_, after), count in self.scored.items() if after in _UNFINISHED),
            failed=tuple(self.failed),
            skipped=self.begun.skipped,
            went_on=self.begun.goes_on,
        )


def _left_alone(stored: Stored, error: Failure) -> RescoredGroup:
    return RescoredGroup(
        id=stored.prompt.group_id, before=stored.state, after=stored.state, trajectories=(), error=error
    )


def _report(stored: Stored, error: Failure) -> QuarantineReport:
    tries = stored.attempt if stored.report is None else stored.report.attempts
    return QuarantineReport(id=stored.prompt.group_id, cause=error.cause, attempts=max(1, tries), error=error)


def _name_of(function: object) -> str:
    """Return a function as ``module:name``; an object as its type."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{getattr(named, '__qualname__', '')}"


def _names(states: Iterable[State]) -> str:
    return ", ".join(state.value for state in states)


def _ignore(_: RescoredGroup) -> None:
    """Stand in for ``tell``."""


async def rescore(
    ledger: ScoredLedger,
    reward: Reward | None = None,
    *,
    group_reward: GroupReward | None = None,
    group_filter: GroupFilter | None = None,
    name: str | None = None,
    states: Iterable[State] = _ALL,
    again: bool = False,
    settings: EngineSettings | None = None,
    ports: Ports | None = None,
    tell: Callable[[RescoredGroup], None] = _ignore,
) -> RescoreReport:
    """Score what an open ledger has stored again, and write the new rewards; nothing is sampled.

    No engine may use the ledger meanwhile. The three functions are those of ``open_rollout_engine``; ``name`` is the reward's,
    by default that of the function. A quarantined group of which every sample is stored becomes ready; other groups keep
    their state, and none is delivered again. ``settings`` limits the rollouts that are scored at once (``max_running``),
    their time (``deadlines.reward``) and their tries (``retry``). ``tell`` hears of each group once it is written.

    Blocks until every group in these ``states`` was scored. Each group is one transaction: cancelled or killed at any
    moment, what was written stays, and a call with the same name and states goes on (``again`` begins anew).

    Raises:
      ValueError: there is neither a reward nor a group reward, or a state has no trajectories.
      LedgerError: no run has begun, a part of the groups would get other rewards than the ledger names, or a write failed.
    """
    function, chosen, settings = reward or group_reward, tuple(states), settings or EngineSettings()
    if function is None or not set(chosen) <= set(_ALL):
        raise ValueError(
            f"rescore needs a reward or a group_reward, and states out of {_names(_ALL)}; got {_names(chosen)}"
        )
    ports = ports or Ports()
    scoring = Scoring(
        reward=reward, group_reward=group_reward, group_filter=group_filter, settings=settings, ports=ports
    )
    begun = await ledger.begin_rescoring(name or _name_of(function), chosen, again=again)
    return await _Pass(ledger, scoring, begun, tell, trio.CapacityLimiter(settings.max_running)).run(chosen)
