"""Sources of prompts: a JSONL file, any iterable, generated tasks. Each has a position that can be saved and restored."""

from ._iterable import IterableSource as IterableSource
from ._jsonl import JsonlSource as JsonlSource
from ._tasks import TaskSource as TaskSource

__all__ = [
    "IterableSource",
    "JsonlSource",
    "TaskSource",
]
