"""Cancel a scope before every task step, in one run for each, and check what is left.

The points are exhaustive for one order of the tasks and one course of events only. So vary ``seed``, and write scenarios with
slow consumers, full buffers and faults: of three bugs planted in a toy pool, one is found with a slow consumer only. A
point costs 1 to 5 ms, and there are as many points as steps: ``sample`` draws that many of them.
"""

import operator
import random
from collections.abc import Awaitable, Callable, Collection, Iterator
from typing import TypeAlias, TypeVar

from .._points import Inject, Point, Sweep
from .sweeper import Arm, Injection, Injector, Sweeper

S = TypeVar("S")

Scenario: TypeAlias = Callable[[Arm[S]], Awaitable[S]]
Check: TypeAlias = Callable[[S, Point | None], object]

_LONGEST_BETWEEN = 8  # steps between the two cancellations of CANCEL_TWICE: most clean-ups take fewer


def cancel_everywhere(
    scenario: Scenario[S],
    check: Check[S],
    *,
    seed: object = 0,
    how: Collection[Inject] = (Inject.CANCEL,),
    scopes: Collection[str] | None = None,
    sample: int | None = None,
    limit: float = 86400.0,
    max_steps: int = 200_000,
    virtual_time: bool = True,
) -> Sweep:
    """Run ``scenario`` undisturbed, then once for each point at which it could be cancelled; check the end of each run.

    ``scenario(arm)`` calls ``arm(scope)`` with a cancel scope that it has made (several by name: ``arm(scope, "turn")``), does
    the work in it and returns a state, even if that scope was cancelled. ``check(state, point)`` raises, or returns
    False, if something is lost; ``point`` is None for the undisturbed run, which must succeed. Interrupted by Ctrl-C, the
    scenario may end by KeyboardInterrupt; the check then gets the state that ``arm.keep(state)`` was given. ``scopes``: those
    to cancel, by default all. An exception at a point is that point's failure. Scenarios with real sockets or threads need
    ``virtual_time=False``; a step may then be missed.

    Raises:
      BaseException: the error of the undisturbed run, or of its check.
      ValueError: no scope was armed, or none of those named.

    """
    sweeper = Sweeper(check=check, seed=seed, limit=limit, max_steps=max_steps, virtual_time=virtual_time)
    lives = _rehearse(sweeper, scenario)
    wanted = {name: steps for name, steps in lives.items() if scopes is None or name in scopes}
    if not wanted:
        raise ValueError(f"cancel_everywhere: armed were {sorted(lives)}, to be cancelled {scopes}: nothing to do")
    draw = random.Random(f"cancel_everywhere-{seed}")
    for kind in how:
        injections = list(_injections(kind, wanted, draw))
        for injection in injections if sample is None or sample >= len(injections) else draw.sample(injections, sample):
            _try(sweeper, scenario, injection)
    return sweeper.report()


def _rehearse(sweeper: Sweeper[S], scenario: Scenario[S]) -> dict[str, int]:
    """Make the undisturbed run, and return the number of steps that each armed scope lived."""
    injector = Injector()
    arm: Arm[S] = Arm(injector.arm)
    sweeper.judge(sweeper.once(lambda: scenario(arm), arm, (injector,)), None)
    return injector.lives()


def _injections(how: Inject, lives: dict[str, int], draw: random.Random) -> Iterator[Injection]:
    if how in {Inject.THROW, Inject.SEED}:
        raise ValueError(f"cancel_everywhere only cancels and interrupts, it does not know {how}")
    if how is Inject.CANCEL_TWICE and len(lives) == 1:
        raise ValueError(f"cancel_everywhere: cancelling twice needs two armed scopes, there is only {list(lives)}")
    if how is Inject.INTERRUPT:  # a signal has no scope: the one that lives longest is used
        lives = dict([max(lives.items(), key=operator.itemgetter(1))])
    for name, steps in lives.items():
        others = [other for other in lives if other != name]
        for step in range(1, steps + 1):
            twice = how is Inject.CANCEL_TWICE
            then = (draw.choice(others), draw.randint(1, _LONGEST_BETWEEN)) if twice else None
            yield Injection(how=how, name=name, step=step, then=then)


def _try(sweeper: Sweeper[S], scenario: Scenario[S], injection: Injection) -> None:
    """Make one run with one injection, and check it."""
    injector = Injector(injection)
    arm: Arm[S] = Arm(injector.arm)
    sweeper.attempt(
        lambda: sweeper.once(lambda: scenario(arm), arm, (injector,)),
        lambda: Point(how=injection.how, step=injection.step, scope=injection.label, where=injector.where),
        arm,
        interrupts=injection.how is Inject.INTERRUPT,
    )
