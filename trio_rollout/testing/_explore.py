"""Many seeds of one world: what failed, under which seed, and what was seen."""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from ._points import Inject, Point, PointFailure, Sweep
from ._simworld import SimWorld

T = TypeVar("T")


def explore(
    scenario: Callable[[SimWorld], Awaitable[T]],
    seeds: Iterable[int],
    *,
    check: Callable[[T], object] | None = None,
    world: Callable[..., SimWorld] = SimWorld,
    **run: Any,
) -> Sweep:
    """Run ``scenario`` in a world of each seed; a seed that fails is a failure of the sweep and never ends it.

    ``world(seed=...)`` makes the world, ``check`` judges what the scenario returned, and ``run`` goes to ``SimWorld.run``.
    ``Sweep.require("reset", ...)`` then insists that nothing failed and that those states were seen. Keep each seed that
    ever failed as a test of its own: ``SimWorld(seed=...).run(scenario)`` repeats it exactly.
    """
    started, points = time.perf_counter(), 0
    failures: list[PointFailure] = []
    seen: Counter[str] = Counter()
    for seed in seeds:
        points += 1
        made = world(seed=seed)
        try:
            value = made.run(scenario, **run).value
            if check is not None and check(value) is False:
                failures.append(PointFailure.of(_point(seed), AssertionError("the check returned False")))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # ruff: ignore[blind-except]  # noqa: ASYNC103 - pytest.fail() raises no Exception
            failures.append(PointFailure.of(_point(seed), error))
        seen.update(made.seen)
    return Sweep(
        points=points,
        failures=tuple(failures),
        seconds=time.perf_counter() - started,
        sometimes=seen,
        seed="one each",
    )


def _point(seed: int) -> Point:
    return Point(how=Inject.SEED, step=seed, where=f"SimWorld(seed={seed})")
