"""Canned /generate answers, cut at the place where each request's id, latency and weight version go."""

import json
from pathlib import Path

import numpy as np

VOCABULARY = 151_936
LENGTHS = (0, 4, 16, 512, 2048, 8192, 32_768)
_WORDS = (
    "the",
    " answer",
    " is",
    "\n\n",
    "so",
    " we",
    " have",
    "x^2",
    " + 3",
    " therefore",
    "$\\frac{1}{2}$",
    " compute",
)


def _log_probs(count: int, rng: np.random.Generator) -> list[float]:
    """A third of the tokens nearly certain, as in a trained model; printed as float32 values come out of a real server."""
    values = -rng.exponential(0.4, count)
    sure = rng.random(count) < 0.35
    values[sure] = -rng.exponential(1e-5, int(sure.sum()))
    return [float(value) for value in values.astype(np.float32)]


def make_body(count: int) -> tuple[bytes, bytes]:
    """The text before and behind ``id","e2e_latency":1.5,...,"finish_reason":{...}`` in an answer of so many tokens."""
    rng = np.random.default_rng(count)
    ids = [int(token) for token in rng.integers(0, VOCABULARY, count)]
    text = "".join(_WORDS[index] for index in rng.integers(0, len(_WORDS), count))
    meta = {
        "prompt_tokens": 512,
        "total_retractions": 0,
        "output_token_logprobs": [
            [value, token, None] for value, token in zip(_log_probs(count, rng), ids, strict=True)
        ],
        "completion_tokens": count,
        "cached_tokens": 448,
    }
    dumped = [json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() for value in (text, ids, meta)]
    return b'{"text":%b,"output_ids":%b,"meta_info":{"id":"' % (dumped[0], dumped[1]), b",%b}" % dumped[2][1:]


def write_bodies(folder: Path) -> None:
    """Write every length's two halves, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    for count in LENGTHS:
        if not (folder / f"{count}.tail").exists():
            head, tail = make_body(count)
            (folder / f"{count}.head").write_bytes(head)
            (folder / f"{count}.tail").write_bytes(tail)
