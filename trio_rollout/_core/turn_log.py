"""The finished turns of one sample, over its tries: a try that begins anew gets them back. No I/O, no clock.

A request is known by a digest of its prompt, its sampling and its extra fields. A recorded turn is given back to the request
that has its digest, once a try; of several with one digest the oldest one. The first answer to a request that has no
recorded one ends that, and what was not given back until then is dropped.

A sample may have several conversations at once. A request of one of them that was under way when the sample was interrupted
has no recorded answer, and does not end the replay of the others. Each record therefore counts the requests that were under
way beside it: as many requests as that may have no answer.

Invariant: a turn is *left* (to be given back in this try, or in the next one), or of the try under way, and never both. The
tokens of the first are kept ones, the tokens of the second are in flight.
"""

from collections.abc import Sequence
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt

from .arrays import id_array
from .enums import Cause
from .values import Turn, copied


@attrs.frozen(kw_only=True)
class RecordedTurn:
    """A finished turn and the digest of its request. ``number`` counts the turns of the sample.

    ``beside``: requests of the sample that were under way when it finished. The prompt's ids are left out of ``turn`` where
    they are those of the request: the whole prompts of a conversation grow with the square of its turns.
    """

    number: int
    request: bytes
    turn: Turn
    beside: int = 0

    @property
    def tokens(self) -> int:
        """The number of tokens that were sampled."""
        return len(self.turn.output_ids)

    @property
    def oldest_version(self) -> int:
        """The lowest weight version of its tokens."""
        return min((span.version for span in self.turn.versions), default=self.turn.weight_version)

    def answer_to(self, prompt: Sequence[int] | npt.NDArray[Any] | str) -> Turn:
        """Return the turn as the request with this prompt got it."""
        if isinstance(prompt, str) or len(self.turn.prompt_ids):
            return self.turn
        return copied(self.turn, Turn, {"prompt_ids": id_array(prompt)})


@final
@attrs.define(eq=False, repr=False)
class TurnLog:
    """The recorded turns of one sample that is not finished."""

    _turns: list[RecordedTurn] = attrs.field(factory=list)
    cause: Cause = attrs.field(default=Cause.SHUTDOWN, init=False)
    """The reason why the sample began anew; at first the end of the process."""
    _next: int = attrs.field(default=0, init=False)
    _left: dict[int, RecordedTurn] = attrs.field(factory=dict, init=False)
    _unanswered: int = attrs.field(default=0, init=False)
    """Requests that may still have no answer because they were under way beside recorded turns."""

    def __attrs_post_init__(self) -> None:
        self._next = max((turn.number for turn in self._turns), default=-1) + 1
        self.rewind(self.cause)

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def is_replaying(self) -> bool:
        """True while there are turns to give back."""
        return bool(self._left)

    @property
    def tokens_left(self) -> int:
        """The tokens of the turns that are left."""
        return sum(turn.tokens for turn in self._left.values())

    @property
    def tokens_of_try(self) -> int:
        """The tokens of the turns that the try under way was given back, or has sampled."""
        return sum(turn.tokens for turn in self._turns) - self.tokens_left

    @property
    def oldest_version(self) -> int | None:
        """The lowest weight version of the recorded turns; None if there are none."""
        return min((turn.oldest_version for turn in self._turns), default=None)

    def rewind(self, cause: Cause) -> None:
        """End a try, for this reason: every turn is left for the next one."""
        self.cause = cause
        self._left = {turn.number: turn for turn in self._turns}
        self._unanswered = max((turn.beside for turn in self._turns), default=0)

    def give_back(self, request: bytes | None) -> RecordedTurn | None:
        """Return the recorded answer to this request, which is of the try from now on; None if there is none."""
        found = next((turn for turn in self._left.values() if turn.request == request), None)
        if found is not None:
            del self._left[found.number]
        return found

    def note_unanswered(self) -> Sequence[RecordedTurn]:
        """Note that a request without a recorded answer was answered. Return the turns that are dropped for it."""
        if self._unanswered:
            self._unanswered -= 1
            return ()
        return self.drop_left()

    def drop_left(self) -> Sequence[RecordedTurn]:
        """Drop and return the turns that are left."""
        dropped = tuple(self._left.values())
        self._turns = [turn for turn in self._turns if turn.number not in self._left]
        self._left = {}
        return dropped

    def drop_all(self) -> Sequence[RecordedTurn]:
        """Drop and return every turn."""
        dropped, self._turns, self._left = tuple(self._turns), [], {}
        return dropped

    def add(
        self, request: bytes, prompt: Sequence[int] | npt.NDArray[Any] | str, turn: Turn, *, beside: int
    ) -> RecordedTurn:
        """Record a turn that the try has sampled for the request with this prompt."""
        if not isinstance(prompt, str) and np.array_equal(turn.prompt_ids, prompt):
            turn = copied(turn, Turn, {"prompt_ids": id_array(())})
        record = RecordedTurn(number=self._next, request=request, turn=turn, beside=beside)
        self._next += 1
        self._turns.append(record)
        return record
