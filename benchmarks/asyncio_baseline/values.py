"""The input and output values of the baseline."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


class EndOfData(Exception):
    """Every group is delivered or given up."""


class Aborted(Exception):
    """The server aborted the request: for a weight update, or at another client's request."""


@dataclass(slots=True)
class Prompt:
    """One task for the model."""

    id: str
    input_ids: Sequence[int]


@dataclass(slots=True)
class Sample:
    """One answer."""

    input_ids: Any
    output_ids: Any
    log_probs: Any
    text: str
    finish: str
    weight_version: str | int
    latency_s: float | None
    tokens: Any = None
    loss_mask: Any = None
    reward: float | None = None
    prompt_id: str = ""
    index: int = 0
    meta: dict[str, Any] = field(default_factory=dict)
