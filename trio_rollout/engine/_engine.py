"""The rollout engine: the object that its user holds, and the assembly of its parts. The only module that knows them all."""

import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Self, final

import attrs
import trio

from .._core.batching import Answer, decide
from .._core.checks import is_whole
from .._core.enums import Cause, PauseMode
from .._core.ledger_events import RunIdentity
from .._core.settings import EngineSettings
from .._core.statistics import EngineStatistics
from .._core.values import Group, GroupId, QuarantineReport
from .._util.arguments import require, require_async, require_methods, require_trio
from .._util.exception_groups import is_cancellation
from .._util.ports import Ports
from .._util.service import open_service
from ..abc import Gateway, Generate, GroupFilter, GroupReward, InferenceServers, Instrument, Ledger, Reward, Source
from ..errors import EndOfData, EngineClosed, RolloutError
from ..observe import task_tree
from ..tools._rollout_tools import RolloutTools
from ._context import RolloutContext
from ._delivery import Batch, Delivery
from ._evaluation import Evaluation, evaluation_context
from ._gate import Gate
from ._instruments import Instruments
from ._pool import Pool
from ._state import EngineState, new_state
from ._weights import Weights, WeightUpdate


@final
@attrs.define(eq=False, repr=False)
class RolloutEngine:
    """A running engine; ``open_rollout_engine`` makes one. Its tasks run until the ``async with`` block is left."""

    _state: EngineState
    _pool: Pool
    _delivery: Delivery
    _weights: Weights
    _leave_by: float = attrs.field(default=-math.inf, init=False)

    async def next_batch(self, size: int) -> Batch:
        """Wait for ``size`` finished groups and take them.

        Blocks until so many are ready. The last batch may be smaller: at the end of data, after a drain, or when the
        engine's block is left. Callers are served in the order of their calls. Cancelled, the call has taken nothing. A
        size above ``max_ready`` raises the buffer's bound for this call.

        Raises:
          EndOfData: every group was delivered, filtered or quarantined.
          EngineClosed: the engine was drained and nothing is left, or its block was left.
          RuntimeError: the call would have to wait inside its caller's ``weight_update``.
          ServerError: the call would have to wait for a weight update: no server that answers has the current weights.
          Exception: the engine's failure (SourceError, LedgerError, an exhausted failure budget), at once.
        """
        if not is_whole(size, 1):
            raise ValueError(f"next_batch: size must be an integer >= 1, got {size!r}")
        self._state.require_open("next_batch")
        if decide(size, self._state.supply()).answer is Answer.WAIT:
            self._refuse_inside_window("next_batch")
        return await self._delivery.next_batch(size)

    def batches(self, size: int) -> "Batches":
        """Return an iterator over batches of ``size`` groups, which ends with the data, or when the engine is drained.

        Its ``anext`` raises what ``next_batch`` raises, and a RolloutError at the end of data if no group was delivered and
        some were quarantined.
        """
        if not is_whole(size, 1):
            raise ValueError(f"batches: size must be an integer >= 1, got {size!r}")
        return Batches(self, size)

    def weight_update(
        self, *, version: int | None = None, mode: PauseMode = PauseMode.ABORT
    ) -> AbstractAsyncContextManager[WeightUpdate]:
        """Open a window in which every server is paused, so that the body can give them new weights.

        ``version`` is the new weights' number: above every version that was ever named, by this run or the ones before it on the
        same ledger. None means the next one; the value of the ``with`` block has it as ``version``.

        Entering blocks until every server is paused and, with ABORT, quiet. The body runs with nothing sampling. Leaving
        reads the servers' versions, resumes them whatever was raised, and lets requests through again. It may be left in
        another task. Cancelled, the version stays and the servers are resumed all the same.

        Raises:
          ValueError: the version is not above every earlier one.
          trio.BusyResourceError: another window is open, in this engine or in another one on the same servers.
          ServerError: a server could not be paused (the body does not run), or reports another version afterwards.
        """
        self._state.require_open("weight_update")
        return self._weights.update(version, mode)

    async def note_weight_version(self, version: int) -> None:
        """Note that the servers have these weights now: for hosts that update them without a ``weight_update``.

        Staleness is counted from this version. The version is trusted; servers are not queried. Blocks until the ledger
        has it. Cancelled before that, the version stays.

        Raises:
          ValueError: the version is below 0, or has more digits than a ledger can hold.
          trio.BusyResourceError: a weight update is under way.
        """
        self._state.require_open("note_weight_version")
        await self._weights.note(version)

    async def drain(self, grace: float | None = None) -> None:
        """Stop admitting, let running groups finish for ``grace`` seconds, cancel the rest, wait for their cleanup.

        Waiting and cancelled groups are given back to the source, or stay in the ledger. Ready groups stay deliverable;
        afterwards ``next_batch`` raises EngineClosed. The default of ``grace`` is ``Deadlines.drain`` less ``abort``. Of
        several drains the shortest grace counts. Cancelled, the drain goes on without the call: admission stays closed,
        the running groups may finish, and the others are given back then.

        Raises:
          RuntimeError: it was called inside the caller's ``weight_update``.
        """
        given: object = grace
        if given is not None and (not isinstance(given, int | float) or math.isnan(given)):
            raise ValueError(f"drain: grace must be a number of seconds, or None, got {grace!r}")
        self._refuse_inside_window("drain")
        deadlines = self._state.context.settings.deadlines
        await self._pool.drain(deadlines.drain - deadlines.abort if grace is None else grace)

    async def evaluate(
        self, source: Source, generate: Generate | None = None, samples_per_prompt: int = 1
    ) -> tuple[Group, ...]:
        """Run every prompt of ``source`` once and return its groups, in the source's order.

        Blocks until all are done. Production goes on beside the evaluation, and its counts and instruments know nothing of
        it. A weight update restarts the rollouts that it interrupts. Samples fail alone, as in production; one that failed
        for good is a FAILED trajectory, with its tokens if only its scorer failed. Cancelled, the rollouts are aborted on their servers.

        Raises:
          RuntimeError: it was called inside the caller's ``weight_update``.
          EngineClosed: the engine's block was left.
          ServerError: the evaluation could go on only after a weight update.
          Exception: the engine's failure, or an exception of the source, as it was raised.
        """
        self._state.require_open("evaluate")
        _require_source(source)
        if generate is not None:
            require_async("generate", generate, "write async def, and await rollout.generate(...)")
        if not is_whole(samples_per_prompt, 1):
            raise ValueError(f"evaluate: samples_per_prompt must be an integer >= 1, got {samples_per_prompt!r}")
        self._refuse_inside_window("evaluate")
        state = self._state
        state.failure.check()
        context = evaluation_context(state.context, generate, samples_per_prompt)
        evaluation = Evaluation(state=state, context=context, samples=samples_per_prompt)
        return await evaluation.run(source)

    async def restore(self, step: int) -> None:
        """Go back to a checkpoint: offer every batch again that was delivered after ``step`` and not acked. -1: all of them.

        In a new process, called before the first ``next_batch``, it also acks the batches that an earlier process delivered at
        steps up to ``step``: the checkpoint has them. So a trainer needs to store nothing but its step. Blocks until the ledger
        has it.

        Raises:
          ValueError: ``step`` is not a whole number from -1 to the last step that was delivered.
          RolloutError: a later batch was acked.
          EngineClosed: the engine's block was left.
        """
        self._state.require_open("restore")
        await self._delivery.restore(step)

    @property
    def weight_version(self) -> int:
        """The newest weight version."""
        return self._state.context.gate.version

    def statistics(self) -> EngineStatistics:
        """Return the counts of this moment."""
        return self._state.statistics()

    def ready_ids(self) -> Sequence[GroupId]:
        """Return the ids of the groups that are ready, as they came: finished, and not handed out or handed back."""
        return tuple(entry.id for entry in self._state.ready.entries)

    def quarantined(self) -> Sequence[QuarantineReport]:
        """Return a report for each group that was given up: id, cause, attempts and last error."""
        return self._state.book.reports

    def __repr__(self) -> str:
        now = self.statistics()
        return (
            f"<RolloutEngine {now.running} groups running ({now.running_rollouts} rollouts), {now.waiting} waiting, "
            f"{now.ready} ready, {now.delivered} delivered | weights {now.weight_version}>"
        )

    def _refuse_inside_window(self, what: str) -> None:
        if self._weights.is_inside():
            raise RuntimeError(f"{what} would deadlock: rollouts are paused until this weight_update block exits")

    @asynccontextmanager
    async def _running(self) -> AsyncGenerator[None]:
        """Run the pool until the block is left; then give back what is left, and raise the failure that no call told.

        A failure beside another exception is logged: the body's own exception comes out as itself.
        """
        left_well = False
        try:
            async with open_service(self._pool.serve, self._leave):
                yield
            left_well = True
        finally:
            await self._close()  # noqa: ASYNC102  it shields and bounds itself
            if not left_well:
                self._state.failure.log_untold()
        self._state.failure.check()

    async def _leave(self, _: None, error: BaseException | None) -> None:
        """End every attempt within ``Deadlines.drain``: with no grace if the body failed or the results could not be kept.

        See docs/decisions/0003-leaving-without-a-ledger-has-no-grace.md.
        """
        limits = self._state.context.settings.deadlines
        self._leave_by = trio.current_time() + limits.drain
        grace = limits.drain - limits.abort if error is None and self._state.ledger.keeps_groups else 0.0
        with trio.move_on_at(self._leave_by):
            await self._pool.leave(grace, Cause.CANCELLED if is_cancellation(error) else Cause.SHUTDOWN)

    async def _close(self) -> None:
        """Give back what is left: every task has ended, in time or not (then ``abort`` seconds are left to give back)."""
        limits = self._state.context.settings.deadlines
        left = self._leave_by - trio.current_time()
        await self._pool.close(max(left, min(limits.abort, limits.drain - limits.abort)))


@final
@attrs.define(eq=False)
class Batches:
    """Asynchronous iterator over batches; stops at the end of data, or when the engine is drained.

    A loop over it must not end in silence because everything failed. ``failure_budget`` sees to that only where as many
    groups fail as it allows: docs/decisions/0051-a-loop-that-got-nothing-is-an-error.md.
    """

    _engine: RolloutEngine
    _size: int

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        try:
            return await self._engine.next_batch(self._size)
        except EngineClosed:
            raise StopAsyncIteration from None
        except EndOfData as end:
            if end.quarantined and not end.delivered:
                last = self._engine.quarantined()[-1].error
                raise RolloutError(f"no group was delivered: {end}. Last error: {last}") from end
            raise StopAsyncIteration from None


async def _assembled(state: EngineState) -> RolloutEngine:
    """Put an engine together and restore it to where the ledger's last run was. Start nothing.

    A source that can check its prompts (``check()``) does so before anything else: bad input must not cost a run's work.
    """
    source, context = state.source, state.context
    check = getattr(source, "check", None)
    if check is not None:
        await check()
    past = await state.ledger.begin(identity_of(source, context.settings))
    engine = RolloutEngine(state, Pool(state), Delivery(state), Weights(state))
    if past.source_state is not None:
        source.restore(past.source_state)
    state.recover(past)
    engine._delivery.recover(past)
    await engine._weights.begin(past)
    return engine


def identity_of(source: Source, settings: EngineSettings) -> RunIdentity:
    """Return the identity of a run: the source's attribute ``identity``, or its type if it has none."""
    name = getattr(source, "identity", None)
    text = str(name) if name is not None else f"{type(source).__module__}.{type(source).__qualname__}"
    return RunIdentity(source=text, samples_per_prompt=settings.samples_per_prompt)


def _require_source(source: object) -> None:
    advice = "a Source: an IterableSource(...) makes one of a list, a JsonlSource(path) of a file"
    require_methods("source", source, ("take",), advice)


def _own_parts(settings: EngineSettings, ports: Ports) -> dict[str, Any]:
    """Return the parts of an engine's context that its user does not give."""
    new_tools = partial(RolloutTools, deadlines=settings.deadlines, ports=ports)
    return {"gate": Gate(), "settings": settings, "ports": ports, "show_tasks": task_tree, "new_tools": new_tools}


def _require_scorers(**scorers: object) -> None:
    for what, function in scorers.items():
        if function is not None:
            require_async(what, function, "trio_rollout.in_thread(f) makes it async")


def _require_parts(
    source: object,
    generate: object,
    servers: object,
    ledger: object,
    gateway: object,
    settings: object,
    instruments: Sequence[object],
) -> None:
    """Refuse parts that are of another kind: see ``open_rollout_engine``."""
    require_trio("open_rollout_engine")
    _require_source(source)
    require_async("generate", generate, "write async def, and await rollout.generate(...)")
    allowed = "what open_sglang_servers(urls) gives in its block, or other InferenceServers"
    require_methods("servers", servers, ("under", "versions", "encode", "generate", "statistics"), allowed)
    if ledger is not None:
        require_methods("ledger", ledger, ("begin", "record"), "what open_ledger(path) gives in its block")
    if gateway is not None:
        require_methods("gateway", gateway, ("open_session",), "what open_gateway(servers) gives in its block")
    require("settings", settings, (EngineSettings, type(None)), "EngineSettings")
    for instrument in instruments:
        require_methods("instruments", instrument, ("event",), "Instruments: objects with a method event()")


@asynccontextmanager
async def open_rollout_engine(
    source: Source,
    generate: Generate,
    *,
    servers: InferenceServers,
    reward: Reward | None = None,
    group_reward: GroupReward | None = None,
    group_filter: GroupFilter | None = None,
    ledger: Ledger | None = None,
    settings: EngineSettings | None = None,
    instruments: Sequence[Instrument] = (),
    ports: Ports | None = None,
    gateway: Gateway | None = None,
) -> AsyncGenerator[RolloutEngine]:
    """Run rollouts of the source's prompts until the block is left; unfinished prompts go back, or stay in the ledger.

    Entering reads versions and the ledger. Leaving takes at most ``Deadlines.drain`` plus one accepted write.

    Raises:
      SettingsTypeError: an argument is of another type, or a synchronous function.
      Exception: the body's, as it was raised; or the engine's (LedgerError: the ledger is another run's) if no call told it.
    """
    _require_parts(source, generate, servers, ledger, gateway, settings, instruments)
    _require_scorers(reward=reward, group_reward=group_reward, group_filter=group_filter)
    settings, ports = settings or EngineSettings(), ports or Ports()
    context = RolloutContext(
        generate=generate,
        reward=reward,
        group_reward=group_reward,
        group_filter=group_filter,
        servers=servers.under(settings.deadlines),
        gateway=gateway,
        instruments=Instruments(instruments),
        **_own_parts(settings, ports),
    )
    with (state := new_state(source, context, ledger)).ledger.claimed():
        engine = await _assembled(state)
        async with engine._running():
            yield engine
