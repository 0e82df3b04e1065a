"""Looking at a run while it runs: the task tree, the step watchdog, instruments and metrics."""

from ._tree import task_tree as task_tree

__all__ = ["task_tree"]
