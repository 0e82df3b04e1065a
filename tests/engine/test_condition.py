"""Waiting for a condition: the state that it saw still holds, every wait can be cancelled, and no waiter is left behind."""

from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from trio_rollout._util.condition import Condition


@asynccontextmanager
async def two_who_want(things):
    """Run two tasks that wait for a thing and take it; yield the condition and the list of taken things."""
    changed, found = Condition(), []

    async def take_one():
        await changed.wait_until(lambda: len(things))
        found.append(things.pop())

    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(take_one)
        await wait_all_tasks_blocked()
        try:
            yield changed, found
        finally:
            nursery.cancel_scope.cancel()


async def test_what_the_condition_saw_still_holds_when_the_wait_returns():
    """Two tasks are awake because of one thing: only one may find it."""
    async with two_who_want(things := []) as (changed, found):
        for wanted in (["first"], ["first", "second"]):
            things.append(wanted[-1])
            changed.notify()
            await wait_all_tasks_blocked()
            assert found == wanted


async def test_what_held_at_first_is_looked_at_again_after_the_checkpoint():
    async with two_who_want(["only one"]) as (_, found):
        assert found == ["only one"]


async def test_it_returns_what_the_condition_was():
    assert await Condition().wait_until(lambda: 3) == 3


async def test_a_condition_that_holds_is_a_checkpoint_all_the_same():
    with assert_checkpoints():
        await Condition().wait_until(lambda: True)


@pytest.mark.parametrize("holds", [False, True])
async def test_cancelled_it_does_not_wait_and_leaves_no_waiter_behind(holds):
    changed = Condition()
    with trio.CancelScope() as scope:
        scope.cancel()
        await changed.wait_until(lambda: holds)
    assert scope.cancelled_caught
    changed.notify()  # a waiter that was left behind would be woken although it does not wait


async def test_a_condition_that_raises_raises_where_it_is_waited_for():
    changed, broken = Condition(), []

    async def wait():
        with pytest.raises(ZeroDivisionError):
            await changed.wait_until(lambda: bool(broken) and 1 / 0)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        broken.append("now")
        changed.notify()
