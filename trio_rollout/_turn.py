"""One turn of a rollout: the gate, one request in a scope of its own, and what an interruption means.

Without ``partial`` an interrupted turn ends the attempt. With it the turn goes on inside the same attempt from the tokens
it has: wait for the gate, resubmit prompt and tokens with what is left of ``max_new_tokens``, merge the parts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import attrs

from ._attempt import Attempt
from ._core.enums import Cause, Stop
from ._core.failures import failure_of
from ._core.sampling import SamplingParams
from ._core.turns import context_after, is_used_up, merge, remaining
from ._core.values import Failure, Turn
from ._gate import limit_of
from ._recipe import Recipe
from .abc import ModelInput, OnTokens
from .errors import ServerLost


@attrs.frozen
class _Interrupted:
    """A call that ended without a complete answer, through no fault of the turn's own."""

    cause: Cause
    why: str
    tokens: Turn | None = None
    failure: Failure | None = None


_Call: TypeAlias = Turn | _Interrupted


async def sample_turn(
    attempt: Attempt,
    recipe: Recipe,
    prompt: ModelInput,
    sampling: SamplingParams,
    *,
    affinity: str,
    extra: Mapping[str, object],
    moved: Callable[[], None],
    on_tokens: OnTokens | None = None,
) -> Turn:
    """Sample one turn. Blocks for the gate, then for the answer, at most ``Deadlines.turn`` a call.

    Cancelled, the request is aborted on its server before Cancelled goes on. An interruption that ends the attempt raises
    Cancelled too, because the attempt's scope is cancelled.
    """
    parts: list[Turn] = []
    in_vain = 0
    while True:
        asked = remaining(sampling, parts) if parts else sampling
        context = context_after(parts) if parts else prompt
        told = _behind(parts, on_tokens)
        call = await _call_once(attempt, recipe, context, asked, affinity, extra, moved, told)
        moved()
        if isinstance(call, Turn):
            return merge([*parts, call])
        if call.tokens is not None and len(call.tokens.output_ids):
            parts.append(call.tokens)
            in_vain = 0
            if is_used_up(sampling, parts):
                return merge(parts, stop=Stop.LENGTH)
        else:
            in_vain += 1
        if not recipe.settings.partial or in_vain > recipe.settings.retry.max_free:
            raise await attempt.give_up(call.cause, call.why, failure=call.failure)


def _behind(parts: Sequence[Turn], on_tokens: OnTokens | None) -> OnTokens | None:
    """Told of a part's ids, it tells of all ids of the turn."""
    if on_tokens is None or not parts:
        return on_tokens
    before = [int(token) for part in parts for token in part.output_ids]
    return lambda ids: on_tokens([*before, *ids])


async def _call_once(
    attempt: Attempt,
    recipe: Recipe,
    prompt: ModelInput,
    sampling: SamplingParams,
    affinity: str,
    extra: Mapping[str, object],
    moved: Callable[[], None],
    on_tokens: OnTokens | None,
) -> _Call:
    gate, seconds = recipe.gate, recipe.settings.deadlines.turn
    watched = moved if recipe.settings.partial or limit_of(recipe.settings.deadlines.no_progress) < math.inf else None
    answer: Turn | None = None
    await gate.wait()
    if attempt.begun is None:
        attempt.begun = gate.version
    with gate.turn(seconds) as passage, passage.scope:
        try:
            answer = await recipe.servers.generate(
                prompt, sampling, affinity=affinity, extra=extra, moved=watched, on_tokens=on_tokens
            )
        except ServerLost as error:
            failure = failure_of(error, Cause.SERVER_LOST, group=attempt.id, attempt=attempt.number)
            attempt.new_tokens += len(error.tokens.output_ids) if error.tokens else 0
            return _Interrupted(Cause.SERVER_LOST, str(error), tokens=error.tokens, failure=failure)
    if answer is None:
        if passage.interrupted:
            return _Interrupted(Cause.WEIGHT_UPDATE, "a weight update closed the call")
        raise await attempt.give_up(Cause.DEADLINE, f"the turn's deadline of {seconds} s passed")
    attempt.new_tokens += len(answer.output_ids)
    if answer.stop is not Stop.ABORT:
        return answer
    ours = not gate.is_open or gate.epoch != passage.epoch
    cause = Cause.WEIGHT_UPDATE if ours else Cause.SERVER_ABORT
    return _Interrupted(cause, f"request {answer.rid} was aborted on its server", tokens=answer)
