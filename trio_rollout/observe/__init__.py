"""Looking at a run while it runs: the task tree, the step watchdog, instruments and metrics.

``task_tree()`` shows every task and what it waits for. ``open_step_watchdog()`` names the code that blocks the event loop.
The instruments are for ``open_rollout_engine(instruments=[...])``; ``trio_rollout.abc`` has their events.
"""

from ._instruments import CountingInstrument, LogInstrument, Metrics, MetricsInstrument
from ._tree import task_tree
from ._watchdog import SlowStep, StepWatchdog, open_step_watchdog

__all__ = [
    "CountingInstrument",
    "LogInstrument",
    "Metrics",
    "MetricsInstrument",
    "SlowStep",
    "StepWatchdog",
    "open_step_watchdog",
    "task_tree",
]
