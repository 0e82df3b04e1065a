"""Looking at a run while it runs: the task tree, the step watchdog, instruments and metrics.

``task_tree()`` shows every task and what it waits for. ``open_step_watchdog()`` names the code that blocks the event loop.
The instruments are for ``open_rollout_engine(instruments=[...])``; ``trio_rollout.abc`` has their events.
"""

from ._instruments import CountingInstrument as CountingInstrument
from ._instruments import LogInstrument as LogInstrument
from ._instruments import Metrics as Metrics
from ._instruments import MetricsInstrument as MetricsInstrument
from ._tree import task_tree as task_tree
from ._watchdog import SlowStep as SlowStep
from ._watchdog import StepWatchdog as StepWatchdog
from ._watchdog import open_step_watchdog as open_step_watchdog

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
