"""kill -9 at any moment of a whole engine: nothing acked is seen again, nothing unsettled is lost (P7, P8).

No turn is sampled twice except for samples that were in flight or not written yet at the kill, or had failed (P11).

``make test-kill`` is the long version.
"""

from pathlib import Path

from .cycles import run_cycles


def test_engines_killed_at_random_lose_nothing(tmp_path: Path):
    found = run_cycles(tmp_path, cycles=6, seed=11, servers=1)

    assert found.problems == []
    assert found.counts["cycles"] == 6
    assert found.counts["acks"] > 0
    assert found.counts["turns"] > 0
