"""The language model and its sampling: one table of logits, with a row for every context of the last few tokens.

The model has no other state. The logits of a token depend only on the weights and the last ``context_tokens`` tokens, so that
scoring a sequence gives the log-probs that it was sampled with, and a trainer can follow the gradient into the table.
Log-probs are taken after the temperature and before top-k, top-p and min-p, as SGLang reports them.

Owns: the table. A context is written as codes, token + 1, with 0 for "before the beginning". If ``(vocab + 1) **
context_tokens`` rows fit, every context has its row; otherwise a hash chooses one.
"""

import json
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias, final

import attrs
import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float32]

_TABLE_FILE = "model.npz"
# Odd 64-bit multipliers with no pattern in their bits (golden ratio, splitmix64, murmur3): products wrap, none loses a bit.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def mixed(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spread every bit of ``value`` over all 64 bits: the finaliser of splitmix64."""
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))


def log_softmax(logits: Floats) -> Floats:
    """Return the log-probs of each row of logits."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    scores: Floats = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return scores


@final
@attrs.define(eq=False, repr=False)
class TinyModel:
    """A table of logits, ``table[row, token]``, which its owner may write to.

    ``row_indices(tokens)`` are the rows that predict each token: a policy gradient is a scatter into the table.
    """

    table: Floats
    context_tokens: int = 3
    _exact: bool = attrs.field(init=False)
    _weights: npt.NDArray[np.uint64] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        base = self.vocab + 1
        self._exact = base**self.context_tokens <= self.rows
        if self._exact:
            powers = [base**place for place in range(self.context_tokens)]
            self._weights = np.array(powers[::-1], np.uint64)
        else:
            numbers = np.arange(1, self.context_tokens + 1, dtype=np.uint64)
            self._weights = mixed(numbers * _GOLDEN) | np.uint64(1)

    def __repr__(self) -> str:
        kind = "a row for every context" if self._exact else "hashed"
        return f"<TinyModel {self.vocab} tokens, {self.rows} rows, last {self.context_tokens} tokens, {kind}>"

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return int(self.table.shape[0])

    @property
    def vocab(self) -> int:
        """Size of the vocabulary."""
        return int(self.table.shape[1])

    @classmethod
    def random(
        cls, *, vocab: int, context_tokens: int = 3, rows: int = 4096, scale: float = 2.0, seed: int = 0
    ) -> "TinyModel":
        """Return a model of normally distributed logits, with no more rows than there are contexts."""
        needed = (vocab + 1) ** context_tokens
        table = np.random.default_rng(seed).standard_normal((min(rows, needed), vocab), dtype=np.float32)
        return cls(table * np.float32(scale), context_tokens)

    def codes(self, tokens: npt.ArrayLike) -> Ints:
        """Return the code of the context after ``tokens``: ``context_tokens`` integers, the newest last."""
        tail = np.asarray(tokens, np.int64)[-self.context_tokens :] + 1
        padded = np.zeros(self.context_tokens, np.int64)
        padded[self.context_tokens - tail.size :] = tail
        return padded

    def rows_of(self, codes: Ints) -> Ints:
        """Return the row of each context; ``codes[..., context_tokens]``."""
        flat = codes.reshape(-1, self.context_tokens).astype(np.uint64)
        place: npt.NDArray[np.uint64] = (flat * self._weights).sum(axis=1, dtype=np.uint64)
        if not self._exact:
            place = mixed(place) % np.uint64(self.rows)
        return place.astype(np.int64).reshape(codes.shape[:-1])

    def row_indices(self, tokens: npt.ArrayLike, start: int = 0) -> Ints:
        """Return the row that predicts each of ``tokens[start:]``, given the tokens before it."""
        ids = np.asarray(tokens, np.int64)
        padded = np.concatenate([np.zeros(self.context_tokens, np.int64), ids + 1])
        windows = np.lib.stride_tricks.sliding_window_view(padded, self.context_tokens)
        return self.rows_of(windows[start : ids.size])

    def log_probs(self, tokens: npt.ArrayLike, start: int = 0, *, temperature: float = 1.0) -> Floats:
        """Return the log-prob of each of ``tokens[start:]`` after those before it; the first token's context is empty."""
        ids = np.asarray(tokens, np.int64)
        rows, place = np.unique(self.row_indices(ids, start), return_inverse=True)
        scores = log_softmax(self.table[rows] / np.float32(temperature))
        found: Floats = scores[place, ids[start:]]
        return found

    def save(self, path: str | Path) -> Path:
        """Write the weights to a ``.npz`` or ``.npy`` file, or else to a folder with ``model.npz`` and ``config.json``.

        The file is replaced in one step: a server that loads it meanwhile gets the old weights or the new ones.
        """
        path = Path(path)
        if path.suffix not in {".npy", ".npz"}:
            write_config(path, vocab_size=self.vocab)
            self.save(path / _TABLE_FILE)
            return path
        partial = path.with_name(f".{path.name}.partial")
        with partial.open("wb") as file:
            if path.suffix == ".npy":
                np.save(file, self.table)
            else:
                np.savez(file, table=self.table, context_tokens=np.int64(self.context_tokens))
        partial.replace(path)
        return path

    @classmethod
    def load(cls, path: str | Path, *, context_tokens: int = 3, like: "TinyModel | None" = None) -> "TinyModel":
        """Read the weights that ``save`` wrote. ``context_tokens`` is used if the file does not contain it (``.npy``).

        Raises:
          OSError: the file does not exist, or cannot be read.
          ValueError: the file has no table of logits, or another vocabulary or context than ``like`` has.
        """
        model = cls._read(Path(path), context_tokens if like is None else like.context_tokens)
        if like is not None and (model.vocab, model.context_tokens) != (like.vocab, like.context_tokens):
            raise ValueError(
                f"expected {like.vocab} tokens and a context of {like.context_tokens}, "
                f"got {model.vocab} and {model.context_tokens}"
            )
        return model

    @classmethod
    def _read(cls, path: Path, context_tokens: int) -> "TinyModel":
        if path.is_dir():
            path /= _TABLE_FILE
        try:
            loaded = np.load(path, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                table = loaded
            else:
                with loaded:
                    table, context_tokens = loaded["table"], int(loaded.get("context_tokens", context_tokens))
        except (EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{path}: not a file of weights: {error}") from error
        if table.ndim != 2 or 0 in table.shape or table.dtype.kind != "f":  # noqa: PLR2004  rows and columns
            raise ValueError(f"{path}: expected a table of floats, got shape {table.shape} of {table.dtype}")
        return cls(np.ascontiguousarray(table, np.float32), context_tokens)


def write_config(folder: Path, **config: object) -> None:
    """Write the ``config.json`` from which clients read the size of the vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"architectures": ["TinyTableLM"], "model_type": "tiny_table", **config}
    (folder / "config.json").write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


Uniforms: TypeAlias = npt.NDArray[np.float64]

EVERY_TOKEN = 1 << 30
"""SGLang's ``top_k`` for "no limit"."""
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
