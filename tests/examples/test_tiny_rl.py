"""The demonstration learns, and it learns because of the weights it is given."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 40


@pytest.fixture
def tiny_rl(monkeypatch):
    """The example as a module; its folder is where it finds its neighbour."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import tiny_rl

    yield tiny_rl
    for name in ("tiny_rl", "learning_curve"):
        sys.modules.pop(name, None)


@pytest.fixture
def fifths(tiny_rl):
    import learning_curve

    return learning_curve.fifths


@pytest.mark.parametrize("seed", [0, 1, 2])
async def test_the_held_out_reward_rises(tiny_rl, fifths, tmp_path, seed):
    """The last fifth's mean exceeds the first's by at least 0.3."""
    first, last = fifths(await tiny_rl.learn(tmp_path, seed=seed, steps=STEPS, updates=True))
    assert last - first >= 0.3


async def test_without_weight_updates_it_does_not(tiny_rl, fifths, tmp_path):
    """The trainer's own copy learns, but what is served stays as it was."""
    first, last = fifths(await tiny_rl.learn(tmp_path, seed=0, steps=STEPS, updates=False))
    assert last - first < 0.1


def test_the_page_shows_the_curve(tmp_path):
    """Runs in a separate process, because matplotlib keeps its fonts' files open."""
    code = f"import pathlib, learning_curve as c; c.write_page(pathlib.Path({str(tmp_path)!r}), [0.0, 0.5, 1.0], title='A')"
    subprocess.run([sys.executable, "-c", code], cwd=EXAMPLES, check=True, timeout=300)

    assert (tmp_path / "reward.png").stat().st_size > 1000
    assert "1.000" in (tmp_path / "index.html").read_text(encoding="utf-8")
