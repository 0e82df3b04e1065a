"""The canary: same seed, same digest. If it fails, Trio's private names no longer do what ``_sim.scheduler`` expects."""

import os
import subprocess
import sys

import trio
from trio._core import _run

from trio_rollout.testing import sim_run

from . import jumble as program
from .jumble import digest


def test_the_same_seed_gives_the_same_run():
    assert len({digest(1) for _ in range(20)}) == 1


def test_other_seeds_give_other_runs():
    assert len({digest(seed) for seed in range(100)}) == 100


def test_the_digest_is_the_same_in_another_process_and_with_other_hashes():
    """PYTHONHASHSEED changes the order of sets of strings and of objects."""
    answer = subprocess.run(
        [sys.executable, program.__file__],
        env=os.environ | {"PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.strip() == digest(1)


def test_equal_deadlines_expire_in_a_repeatable_order():
    """Trio breaks ties of deadlines by address; the tasks that they wake are put in order afterwards."""

    async def ties() -> list[int]:
        order: list[int] = []

        async def wait(number: int) -> None:
            junk = [object() for _ in range(number * 7 % 5)]
            with trio.move_on_at(5):
                await trio.sleep_forever()
            order.append(number)
            del junk

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(wait, number)
        return order

    runs = [sim_run(ties, seed=4) for _ in range(5)]
    assert len({result.digest for result in runs}) == 1
    assert len({tuple(result.value) for result in runs}) == 1


def test_trio_is_left_as_it_was():
    state, flag = _run._r.getstate(), _run._ALLOW_DETERMINISTIC_SCHEDULING
    digest(5)
    assert (_run._r.getstate(), _run._ALLOW_DETERMINISTIC_SCHEDULING) == (state, flag)
