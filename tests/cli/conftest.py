"""What several tests of the command line need."""

from collections.abc import Callable
from typing import Any

import pytest

from trio_rollout._core.statistics import EngineStatistics

StatisticsOf = Callable[..., EngineStatistics]


@pytest.fixture
def statistics_of() -> StatisticsOf:
    """Makes statistics of the given counts, with zeros elsewhere."""

    def make(**counts: Any) -> EngineStatistics:
        zeros: dict[str, Any] = dict.fromkeys(
            (
                *("pulled", "waiting", "running", "ready", "delivered", "acked", "filtered", "quarantined", "returned"),
                *("late", "orphans", "running_rollouts", "max_running", "generated_tokens", "weight_version"),
            ),
            0,
        )
        return EngineStatistics(**{**zeros, "requeues": {}, **counts})

    return make
