"""Log-probs of prompts, and of tokens other than the one that was sampled. No I/O."""

from collections.abc import Sequence

import numpy as np

from ._model import Floats, TinyModel, log_softmax
from ._request import Ranked, Request


def ranked(scores: Floats, count: int) -> Ranked:
    """The ``count`` likeliest tokens with their log-probs, best first."""
    count = min(count, scores.size)
    best = np.argpartition(-scores, count - 1)[:count]
    best = best[np.argsort(-scores[best], kind="stable")]
    return [(float(scores[token]), int(token), None) for token in best]


def picked(scores: Floats, tokens: Sequence[int]) -> Ranked:
    """The log-probs of ``tokens``."""
    return [(float(scores[token]), token, None) for token in tokens]


def score_prompt(model: TinyModel, request: Request) -> None:
    """Fill in the log-probs of the prompt's tokens from ``log_probs_from`` on; the first place has none, as in SGLang."""
    wanted, start = request.wanted, request.wanted.log_probs_from
    rest = request.prompt[start:]
    if not rest.size:
        return
    scores = model.log_probs(request.prompt, start + 1)
    request.input_log_probs = [None, *scores.tolist()]
    if not wanted.top and not wanted.token_ids:
        return
    rows = model.row_indices(request.prompt, start + 1)
    if wanted.top:
        request.input_top = [None, *(ranked(log_softmax(model.table[[row]])[0], wanted.top) for row in rows)]
    if wanted.token_ids:
        request.input_chosen = [None, *(picked(log_softmax(model.table[[row]])[0], wanted.token_ids) for row in rows)]
