"""The tally of tries and tokens: what became of every token that was sampled. No I/O, no clock.

Invariant: ``in_flight + kept + delivered + filtered + wasted`` is the number of tokens that were sampled here or recovered
from a ledger. A token is in flight until its try ends, then kept or wasted; kept tokens are delivered, filtered or wasted
with their group. The tokens of recorded turns are kept while no try of their sample is under way that got them back.
"""

from typing import final

import attrs

from .enums import Cause
from .samples import Samples
from .statistics import Counts, TokenCounts


@final
@attrs.define(eq=False)
class Tally:
    """Counts tries by the cause that ended them, and tokens by what became of them."""

    tries: int = attrs.field(default=0, init=False)
    sampled: int = attrs.field(default=0, init=False)
    recovered: int = attrs.field(default=0, init=False)
    retries: dict[Cause, int] = attrs.field(factory=lambda: dict.fromkeys(Cause, 0), init=False)
    _in_flight: int = attrs.field(default=0, init=False)
    _kept: int = attrs.field(default=0, init=False)
    _delivered: int = attrs.field(default=0, init=False)
    _filtered: int = attrs.field(default=0, init=False)
    _wasted: dict[Cause, int] = attrs.field(factory=lambda: dict.fromkeys(Cause, 0), init=False)

    def sample(self, tokens: int) -> None:
        """A turn of a try brought so many tokens."""
        self.sampled += tokens
        self._in_flight += tokens

    def keep(self, tokens: int) -> None:
        """A try finished its sample, or ended and left so many tokens in recorded turns to the next one."""
        self._in_flight -= tokens
        self._kept += tokens

    def recover(self, samples: Samples) -> None:
        """A ledger remembers these samples of an unfinished or ready group."""
        tokens = samples.kept_tokens
        self._kept += tokens
        self.recovered += tokens

    def take_up(self, tokens: int) -> None:
        """A try goes on with a sample that only lacks a reward."""
        self._kept -= tokens
        self._in_flight += tokens

    def lose(self, cause: Cause, tokens: int) -> None:
        """A try ended without a result."""
        self._in_flight -= tokens
        self._wasted[cause] += tokens

    def give_back(self, tokens: int) -> None:
        """A try got recorded turns of an earlier one, with so many tokens."""
        self._kept -= tokens
        self._in_flight += tokens

    def drop(self, cause: Cause, tokens: int) -> None:
        """Kept tokens are thrown away: they are too old, no request asks for them any more, or their group was given up."""
        self._kept -= tokens
        self._wasted[cause] += tokens

    def filter(self, samples: Samples) -> None:
        """A finished group was dropped by the user's filter."""
        tokens = samples.kept_tokens
        self._kept -= tokens
        self._filtered += tokens

    def deliver(self, samples: Samples) -> None:
        """A group was handed to the trainer."""
        tokens = samples.kept_tokens
        self._kept -= tokens
        self._delivered += tokens

    def take_back(self, samples: Samples) -> None:
        """A delivered group is ready again, by a restore."""
        tokens = samples.kept_tokens
        self._delivered -= tokens
        self._kept += tokens

    def is_conserved(self) -> bool:
        """Return True if every token is accounted for exactly once."""
        now = self.tokens()
        counts = (now.in_flight, now.kept, now.delivered, now.filtered, now.wasted_total)
        return min(counts) >= 0 and sum(counts) == self.sampled + self.recovered

    def tokens(self) -> TokenCounts:
        """Return the tokens of this moment."""
        return TokenCounts(
            in_flight=self._in_flight,
            kept=self._kept,
            delivered=self._delivered,
            filtered=self._filtered,
            wasted=Counts({cause: tokens for cause, tokens in self._wasted.items() if tokens}),
        )
