"""The language model: one table of logits, with a row for every context of the last few tokens.

The model has no other state. The logits of a token depend only on the weights and the last ``context_tokens`` tokens, so that
scoring a sequence gives the log-probs that it was sampled with, and a trainer can follow the gradient into the table.

Owns: the table. A context is written as codes, token + 1, with 0 for "before the beginning". If ``(vocab + 1) **
context_tokens`` rows fit, every context has its row; otherwise a hash chooses one.
"""

import json
import zipfile
import zlib
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


def _multipliers(count: int) -> npt.NDArray[np.uint64]:
    return mixed(np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN) | np.uint64(1)


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
            self._weights = _multipliers(self.context_tokens)

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
            write_config(path, {"vocab_size": self.vocab})
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


def write_config(folder: Path, config: dict[str, object]) -> None:
    """Write the ``config.json`` from which clients read the size of the vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"architectures": ["TinyTableLM"], "model_type": "tiny_table", **config}
    (folder / "config.json").write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
