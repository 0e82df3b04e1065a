"""P1, P2, P3, P4 over many seeds: each is a whole engine with drawn faults, settings and schedule (``make soak SEEDS=N``).

A seed that failed is kept in ``ONCE_FAILED``.
"""

import pytest

from trio_rollout.testing import SimWorld, explore

from .coverage import SEEN
from .whole_world import whole

pytestmark = [pytest.mark.usefixtures("quiet"), pytest.mark.seeds]
LIMIT_S = 6 * 3600.0
ONCE_FAILED = {
    7: "pacing: a group that must be in the next batch waited for room in a full buffer, the consumer for it",
    17: "a drain that was cancelled while the source took prompts back gave them back twice",
    104: "pacing: the buffer held more than was asked for already, so a due group still found no room",
    1877: "the scenario took the failure of the engine that weight_update told for a crash",
    24: "pacing: new weights made nothing due any more, and the waiting consumer did not hear of it",
}


def test_whole_engines_lose_nothing_double_nothing_and_leave_nothing(seeds, record_property):
    sweep = explore(whole, seeds, limit=LIMIT_S)
    record_property(SEEN, {**sweep.sometimes, "seeds": sweep.points, "seconds": int(sweep.seconds)})
    sweep.require()


@pytest.mark.parametrize("seed", ONCE_FAILED)
def test_what_failed_once_does_not_again(seed):
    SimWorld(seed=seed).run(whole, limit=LIMIT_S)
