"""The replay of one try: the recorded turns of its sample are given back, and what it samples itself is recorded.

With ``Resume.TURNS`` each turn of a rollout passes through here on its way to ``sample_turn``. A request that differs ends the
replay when it is answered: one that was refused, or given up, had no answer in the earlier try either. A turn that is given back
waits for the gate like one that is sampled, because the weight version decides if it is still fresh enough; no server is
asked. Nothing is given back to, or recorded for, a try that has ended: what comes after a try was cancelled is late.
See docs/decisions/0052-recorded-turns-are-given-back.md.
"""

import hashlib
import json
import operator
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias, final

import attrs
import numpy as np
import trio

from .._core.arrays import id_array
from .._core.enums import Cause
from .._core.sampling import SamplingParams
from .._core.turn_log import RecordedTurn, TurnLog
from .._core.values import Turn
from ..abc import ModelInput, OnTokens
from ._attempt import SampleTry
from ._context import RolloutContext
from ._turns import TurnKeeper

Sample: TypeAlias = Callable[[ModelInput, SamplingParams, Mapping[str, object], OnTokens | None], Awaitable[Turn]]
"""Samples one turn: its prompt, its sampling, its extra fields, and a callback for its tokens."""


@final
@attrs.define(eq=False, repr=False)
class Replay:
    """The recorded turns of the sample of one try. Made by ``replay_of``."""

    _this: SampleTry
    _context: RolloutContext
    _keeper: TurnKeeper
    _log: TurnLog
    _under_way: int = attrs.field(default=0, init=False)
    """Turns that are being sampled."""

    @property
    def is_replaying(self) -> bool:
        """True while there are recorded turns to give back."""
        return self._log.is_replaying

    async def turn(
        self,
        sample: Sample,
        prompt: ModelInput,
        sampling: SamplingParams,
        extra: Mapping[str, object],
        on_tokens: OnTokens | None,
    ) -> Turn:
        """Return the recorded answer to this request; without one, call ``sample`` and record what it returns.

        Blocks for the gate; without a recorded answer as long as ``sample`` does. Cancelled, nothing is given back and
        nothing is recorded.
        """
        request = digest_of_request(prompt, sampling, extra)
        if self.is_replaying and (record := await self._given_back(request)) is not None:
            turn = record.answer_to(prompt)
            if on_tokens is not None and record.tokens:
                on_tokens(turn.output_ids.tolist())
            return turn
        self._under_way += 1
        try:
            turn = await sample(prompt, sampling, extra, on_tokens)
        finally:
            self._under_way -= 1
        if self._this.is_current:
            self._note(request, prompt, turn)
        return turn

    def _note(self, request: bytes | None, prompt: ModelInput, turn: Turn) -> None:
        """Note that a request had no recorded answer, and record the one that it got."""
        self._keeper.drop(self._this.index, self._log.note_unanswered(), self._log.cause)
        if request is not None:
            record = self._log.add(request, prompt, turn, beside=self._under_way)
            self._keeper.note(self._this.index, record)

    async def _given_back(self, request: bytes | None) -> RecordedTurn | None:
        gate, this = self._context.gate, self._this
        if gate.is_open:
            await trio.lowlevel.checkpoint()
        else:
            await gate.wait()
        if not this.is_current:
            return None
        self.drop_stale()
        record = self._log.give_back(request)
        if record is not None:
            this.take_back(record.tokens, record.oldest_version)
        return record

    def drop_stale(self) -> None:
        """Drop what is left if any recorded turn is older than the settings allow: the others go on from it."""
        version = self._context.gate.version
        allowed = self._context.settings.staleness.oldest_allowed(version, newest=version)
        oldest = self._log.oldest_version
        if oldest is not None and oldest < allowed:
            self._keeper.drop(self._this.index, self._log.drop_left(), Cause.STALE)


def replay_of(this: SampleTry, context: RolloutContext, keeper: TurnKeeper) -> Replay:
    """Return the replay of a try, without turns that are too old."""
    replay = Replay(this, context, keeper, keeper.log_of(this.index))
    replay.drop_stale()
    return replay


def digest_of_request(prompt: ModelInput, sampling: SamplingParams, extra: Mapping[str, object]) -> bytes | None:
    """Return a digest of everything that a request asks for; None if it holds data that JSON can't express.

    It is the same in another process: nothing in it follows from an object's address or a hash of Python's.
    """
    try:
        if isinstance(prompt, str):
            kind, content = b"text", prompt.encode("utf-8", "surrogatepass")
        else:
            kind, content = b"ids", id_array(prompt).tobytes()
        fields = _encode([_fields_of(sampling), extra])
    except (TypeError, ValueError, RecursionError):
        return None
    digest = hashlib.blake2b(digest_size=16)
    for part in (kind, content, fields.encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


_OWN_FIELDS = operator.attrgetter(*(field.name for field in attrs.fields(SamplingParams)))


def _fields_of(sampling: SamplingParams) -> object:
    """Return every field of the sampling parameters, also those of a user's subclass."""
    return _OWN_FIELDS(sampling) if type(sampling) is SamplingParams else attrs.asdict(sampling, recurse=False)


def _as_json(value: object) -> object:
    """Return a value that JSON does not know as one that it does.

    Raises:
      TypeError: there is no such value.
    """
    match value:
        case np.ndarray():
            return [str(value.dtype), value.tolist()]
        case np.generic():
            return value.item()
        case Mapping():
            return dict(value)
        case bytes():
            return ["bytes", value.hex()]
    raise TypeError(f"{type(value).__name__} can't be expressed in JSON")


_encode = json.JSONEncoder(sort_keys=True, default=_as_json).encode
