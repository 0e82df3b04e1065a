"""The columns of a running batch: what one vectorised step needs of every request, rebuilt when its members change."""

from collections.abc import Sequence
from typing import final

import attrs
import numpy as np
import numpy.typing as npt

from ._model import Floats, Ints, TinyModel
from ._request import Request
from ._sampler import Draw, Limits, draw, uniforms
from ._scoring import picked, ranked

_TINY_SHARE = np.float32(-np.inf)


@final
@attrs.define(eq=False, repr=False)
class Batch:
    """Requests side by side. ``step`` samples one token for each of them and appends it."""

    requests: tuple[Request, ...]
    _codes: Ints
    _temperatures: Floats
    _seeds: npt.NDArray[np.uint64]
    _positions: npt.NDArray[np.uint64]
    _limited: tuple[tuple[int, Limits], ...]
    _special: tuple[int, ...]
    """Rows that need a look of their own: logits changed, tokens forced, log-probs of other tokens wanted."""

    @classmethod
    def of(cls, requests: Sequence[Request], model: TinyModel) -> "Batch":
        """The columns of ``requests`` as they stand."""
        span = model.context_tokens
        return cls(
            tuple(requests),
            np.stack([model.codes([*one.prompt[-span:], *one.output_ids[-span:]]) for one in requests]),
            np.array([[one.sampling.temperature] for one in requests], np.float32),
            np.array([one.seed for one in requests], np.uint64),
            np.array([len(one.output_ids) for one in requests], np.uint64),
            tuple((row, one.sampling.limits) for row, one in enumerate(requests) if one.sampling.limits.any),
            tuple(row for row, one in enumerate(requests) if _is_special(one)),
        )

    def step(self, model: TinyModel) -> None:
        """Sample one token for every request."""
        logits = model.table.take(model.rows_of(self._codes), axis=0)
        for row in self._special:
            _adjust(logits[row], self.requests[row])
        drawn = draw(logits, self._temperatures, uniforms(self._seeds, self._positions), self._limited)
        ids, log_probs = drawn.ids, drawn.log_probs
        for row in self._special:
            self._force(row, drawn)
        self._codes[:, :-1] = self._codes[:, 1:]
        self._codes[:, -1] = ids + 1
        self._positions += np.uint64(1)
        for request, token, log_prob in zip(self.requests, ids.tolist(), log_probs.tolist(), strict=True):
            request.output_ids.append(token)
            request.log_probs.append(log_prob)

    def _force(self, row: int, drawn: Draw) -> None:
        """A scripted token takes the place of the sampled one; its log-prob is the model's own."""
        request, scores = self.requests[row], drawn.row(row)
        place = len(request.output_ids)
        if place < len(request.forced):
            token = request.forced[place]
            drawn.ids[row], drawn.log_probs[row] = token, scores[token]
        if request.wanted.top:
            request.top.append(ranked(scores, request.wanted.top))
        if request.wanted.token_ids:
            request.chosen.append(picked(scores, request.wanted.token_ids))


def _is_special(request: Request) -> bool:
    wanted = request.wanted
    return bool(request.sampling.penalties.any or request.forced or wanted.top or wanted.token_ids)


def _adjust(logits: Floats, request: Request) -> None:
    """Penalties and biases change the logits in place, before the temperature."""
    penalties = request.sampling.penalties
    if not penalties.any:
        return
    for token, bias in penalties.logit_bias.items():
        logits[token] += np.float32(bias)
    if request.output_ids:
        seen, counts = np.unique(np.asarray(request.output_ids), return_counts=True)
        logits[seen] -= (penalties.frequency * counts + penalties.presence).astype(np.float32)
        repeated, factor = logits[seen], np.float32(penalties.repetition)
        logits[seen] = np.where(repeated > 0, repeated / factor, repeated * factor)
    if len(request.output_ids) < penalties.min_new_tokens:
        logits[[token for token in request.sampling.stop_ids if token < logits.size]] = _TINY_SHARE
