"""Sources of prompts: a JSONL file, any iterable, generated tasks. Each has a position that can be saved and restored."""

from ._iterable import IterableSource
from ._jsonl import JsonlSource
from ._tasks import TaskSource

__all__ = ["IterableSource", "JsonlSource", "TaskSource"]
