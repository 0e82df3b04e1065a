"""Sampling, vectorised over the running requests: temperature, then top-k, top-p and min-p if a request asks for them.

Pure functions. Log-probs are taken after the temperature and before top-k, top-p and min-p, as SGLang reports them.
"""

from collections.abc import Sequence
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from .model import Floats, Ints, mixed

Uniforms: TypeAlias = npt.NDArray[np.float64]

EVERY_TOKEN = 1 << 30
"""SGLang's ``top_k`` for "no limit"."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 32


@attrs.frozen(kw_only=True)
class Limits:
    """Limits of the tokens that a request may get: the ``top_k`` likeliest, a share ``top_p``, none below ``min_p`` of the best."""

    top_k: int = EVERY_TOKEN
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def any(self) -> bool:
        """True if anything is limited."""
        return self.top_k < EVERY_TOKEN or self.top_p < 1.0 or self.min_p > 0.0


@attrs.frozen(kw_only=True, eq=False)
class Draw:
    """One token for every row: ids, their log-probs, and the parts from which the log-probs of all tokens are made."""

    ids: Ints
    log_probs: Floats
    shifted: Floats
    log_total: Floats

    def row(self, index: int) -> Floats:
        """Return the log-probs of the whole vocabulary in one row."""
        scores: Floats = self.shifted[index] - self.log_total[index]
        return scores


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> Uniforms:
    """Return a number in [0, 1) for each row, which depends only on its seed and position, never on its neighbours.

    It has 24 bits, so that its product with a float32 total, in float64, stays below that total.
    """
    bits = mixed(seeds + (positions + np.uint64(1)) * _GOLDEN) >> np.uint64(40)
    return bits.astype(np.float64) * 2.0**-24


def draw(logits: Floats, temperatures: Floats, numbers: Uniforms, limited: Sequence[tuple[int, Limits]] = ()) -> Draw:
    """Sample one token for each row of ``logits``; ``temperatures[n, 1]``; ``limited`` names the rows with limits."""
    shifted = logits / temperatures
    shifted -= shifted.max(axis=1, keepdims=True)
    count, vocab = shifted.shape
    weights = np.zeros((count, -(-vocab // _BLOCK) * _BLOCK), np.float32)
    np.exp(shifted, out=weights[:, :vocab])
    blocks = weights.reshape(count, -1, _BLOCK)
    block_sums = blocks.sum(axis=2)
    ids = _chosen(blocks, block_sums, numbers)
    for row, limits in limited:
        ids[row] = _limited(weights[row, :vocab], limits, float(numbers[row]))
    log_total = np.log(block_sums.sum(axis=1))
    return Draw(ids=ids, log_probs=shifted[np.arange(count), ids] - log_total, shifted=shifted, log_total=log_total)


def _chosen(blocks: Floats, block_sums: Floats, numbers: Uniforms) -> Ints:
    """Return the token at which the running sum of a row passes ``number * total``: first the block, then inside it.

    One running sum over the whole row is a chain of dependent additions and costs three times as much (measured). A token
    of weight 0 is never taken: the comparisons are strict, and the rest is kept inside its block.
    """
    every = np.arange(len(blocks))
    running = block_sums.cumsum(axis=1)
    targets = numbers * running[:, -1]
    block = (running > targets[:, None]).argmax(axis=1)
    inner = blocks[every, block].cumsum(axis=1)
    rest = targets - (running[every, block] - block_sums[every, block])
    rest = np.clip(rest, 0.0, inner[:, -1] * (1.0 - 2.0**-20))
    chosen: Ints = block * _BLOCK + (inner > rest[:, None]).argmax(axis=1)
    return chosen


def _limited(weights: Floats, limits: Limits, number: float) -> int:
    """Sample as SGLang does it: sorted by probability; a token stays if the share *before* it is at most ``top_p``."""
    if limits.top_k == 1:
        return int(weights.argmax())
    order = np.argsort(-weights, kind="stable")[: limits.top_k]
    shares = weights[order].astype(np.float64) / float(weights.sum(dtype=np.float64))
    before = shares.cumsum() - shares
    kept = shares[(before <= limits.top_p) & (shares >= shares[0] * limits.min_p)]
    running = kept.cumsum()
    return int(order[min(int((running <= number * running[-1]).sum()), kept.size - 1)])
