"""One turn of a rollout: it waits for the gate, sends one request inside a scope, and handles interruptions.

Without ``partial`` an interrupted turn ends the try at its sample. With ``partial`` the turn goes on inside the same try from the
tokens that it has: it waits for the gate, sends prompt and tokens again with what is left of ``max_new_tokens``, and merges
the parts.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import attrs

from .._core.enums import Cause, Stop
from .._core.failures import failure_of
from .._core.sampling import SamplingParams
from .._core.segments import context_after, is_used_up, merge, remaining
from .._core.values import Failure, Turn
from .._util.time import retry_wait_s, wait_s
from ..abc import ModelInput, OnTokens
from ..errors import ContextFull, ServerLost
from ._attempt import SampleTry
from ._context import RolloutContext
from ._gate import Clock, Gate, GateTicket, ignore_progress


@attrs.frozen
class _Interrupted:
    """A call that ended without a complete answer, through no fault of the turn."""

    cause: Cause
    why: str
    tokens: Turn | None = None
    failure: Failure | None = None


_Call: TypeAlias = Turn | _Interrupted


async def sample_turn(
    this: SampleTry,
    context: RolloutContext,
    prompt: ModelInput,
    sampling: SamplingParams,
    *,
    affinity: str,
    extra: Mapping[str, object],
    progress: Clock | None,
    on_tokens: OnTokens | None = None,
) -> Turn:
    """Sample one turn. Blocks for the gate and for a server, then for the answer, at most ``Deadlines.turn`` a call.

    ``progress``: the idle timer, which each new token resets.

    Cancelled, the request is aborted on its server before Cancelled goes on. An interruption that ends the try raises
    Cancelled too, because the scope of the try is cancelled.
    """
    parts: list[Turn] = []
    empty_continuations = 0
    while True:
        asked = remaining(sampling, parts) if parts else sampling
        continued = context_after(parts) if parts else prompt
        told = _behind(parts, on_tokens)
        try:
            call = await _call_once(this, context, continued, asked, affinity, extra, progress, told)
        except ContextFull as error:
            return _filled(parts, error)
        if progress is not None:
            progress.reset()
        if isinstance(call, Turn):
            return merge([*parts, call])
        if call.tokens is not None and len(call.tokens.output_ids):
            parts.append(call.tokens)
            empty_continuations = 0
            if is_used_up(sampling, parts):
                return merge(parts, stop=Stop.LENGTH)
        else:
            empty_continuations += 1
        await _before_going_on(this, context, call, empty_continuations)


async def _before_going_on(
    this: SampleTry, context: RolloutContext, call: _Interrupted, empty_continuations: int
) -> None:
    """Back off if the turn may go on and got no token; end the try if it may not go on."""
    retry = context.settings.retry
    if not context.settings.partial or empty_continuations > retry.max_free:
        raise await this.give_up(call.cause, call.why, failure=call.failure)
    this.empty_continuations = max(this.empty_continuations, empty_continuations)
    if empty_continuations and call.cause is not Cause.WEIGHT_UPDATE:
        await wait_s(retry_wait_s(empty_continuations, retry=retry, rng=context.ports.random))


def _filled(parts: Sequence[Turn], error: ContextFull) -> Turn:
    """Return the turn if it was interrupted with no token left to sample; a prompt that leaves no room is refused."""
    if not parts:
        raise error
    return merge(parts, stop=Stop.LENGTH)


def _behind(parts: Sequence[Turn], on_tokens: OnTokens | None) -> OnTokens | None:
    """Return a callback for one part's ids that reports all ids of the turn."""
    if on_tokens is None or not parts:
        return on_tokens
    before = [int(token) for part in parts for token in part.output_ids]
    return lambda ids: on_tokens([*before, *ids])


async def _call_once(
    this: SampleTry,
    context: RolloutContext,
    prompt: ModelInput,
    sampling: SamplingParams,
    affinity: str,
    extra: Mapping[str, object],
    progress: Clock | None,
    on_tokens: OnTokens | None,
) -> _Call:
    gate, seconds = context.gate, context.settings.deadlines.turn
    on_progress = progress.reset if progress is not None else ignore_progress if context.settings.partial else None
    answer: Turn | None = None
    if not gate.is_open:
        await gate.wait()
    if this.begun is None:
        this.begin(gate.version)
    with gate.turn(seconds, beside=progress) as ticket:
        this.calls += 1
        try:
            answer = await context.servers.generate(
                prompt,
                sampling,
                affinity=affinity,
                extra=extra,
                on_progress=on_progress,
                on_tokens=on_tokens,
                while_waiting=ticket.stopped,
            )
        except ServerLost as error:
            return _lost(error, this)
        finally:
            this.calls -= 1
    if answer is None:
        if ticket.interrupted:
            return _Interrupted(Cause.WEIGHT_UPDATE, "a weight update closed the call")
        raise await this.give_up(Cause.DEADLINE, f"the turn's deadline of {seconds} s passed")
    this.note_tokens(len(answer.output_ids))
    return answer if answer.stop is not Stop.ABORT else _aborted(answer, gate, ticket)


def _aborted(answer: Turn, gate: Gate, ticket: GateTicket) -> _Interrupted:
    ours = not gate.is_open or gate.epoch != ticket.epoch
    cause = Cause.WEIGHT_UPDATE if ours else Cause.SERVER_ABORT
    return _Interrupted(cause, f"request {answer.rid} was aborted on its server", tokens=answer)


def _lost(error: ServerLost, this: SampleTry) -> _Interrupted:
    failure = failure_of(error, Cause.SERVER_LOST, group=this.id, attempt=this.attempt.number)
    if error.tokens is not None:
        this.note_tokens(len(error.tokens.output_ids))
    return _Interrupted(Cause.SERVER_LOST, str(error), tokens=error.tokens, failure=failure)
