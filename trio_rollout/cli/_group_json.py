"""A group as one JSON object: the format of ``export --format jsonl``. Pure."""

import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from .._core.values import Group, Prompt, Segment, Trajectory


def _prompt(prompt: Prompt) -> dict[str, object]:
    """The prompt under the name of its kind."""
    shown: dict[str, object] = {"id": prompt.id, "epoch": prompt.epoch}
    if prompt.input_ids is not None:
        shown["input_ids"] = prompt.input_ids.tolist()
    elif prompt.text is not None:
        shown["text"] = prompt.text
    else:
        shown["messages"] = prompt.messages
    return shown | {"label": prompt.label, "metadata": prompt.metadata}


def _segment(segment: Segment) -> dict[str, object]:
    return {
        "tokens": segment.tokens.tolist(),
        "response_length": segment.response_length,
        "loss_mask": segment.loss_mask.tolist(),
        "log_probs": segment.log_probs.tolist(),
        "versions": [list(span) for span in segment.versions],
        "text": segment.text,
    }


def _trajectory(trajectory: Trajectory) -> dict[str, object]:
    return {
        "index": trajectory.index,
        "status": trajectory.status.value,
        "stop": trajectory.stop.value,
        "reward": trajectory.reward,
        "turns": trajectory.turns,
        "segments": [_segment(segment) for segment in trajectory.segments],
    }


def group_object(group: Group) -> dict[str, Any]:
    """The group as what JSON is made of, users' own values excepted. ``versions`` are lists [start, stop, version]."""
    return {
        "id": str(group.id),
        "attempt": group.attempt,
        "prompt": _prompt(group.prompt),
        "trajectories": [_trajectory(trajectory) for trajectory in group.trajectories],
    }


def _users_value(value: object) -> object:
    """What JSON lacks: arrays become lists, mappings objects, everything else its text."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return dict(value) if isinstance(value, Mapping) else str(value)


def _plain(value: object) -> object:
    """The same value without what JSON or its readers can't say; polars, for one, reads no file with a lone surrogate."""
    if isinstance(value, Mapping):
        return {clean(str(key)): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, str):
        return clean(value)
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return _plain(_users_value(value))


def clean(text: str) -> str:
    """Text that UTF-8 can say: lone surrogates, which models produce, become question marks."""
    return text.encode("utf-8", "replace").decode()


def json_text(value: object) -> str:
    """A value as JSON on one line. NaN and infinity, which JSON lacks, become null, lone surrogates question marks."""
    try:
        return msgspec.json.encode(value, enc_hook=_users_value).decode()
    except (UnicodeEncodeError, TypeError):  # a lone surrogate, or an odd key
        return json.dumps(_plain(value))
