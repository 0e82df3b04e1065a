"""What signals do, with the signals themselves and a recorded drain."""

import signal

import pytest
import trio
import trio.testing

from trio_rollout.cli._run import open_tree_on_usr1, stop_on_interrupt


@pytest.fixture
def record():
    """What happened, in order."""
    return []


@pytest.fixture
def say(record):
    """Records what is said to the user, by its first word."""

    async def say(line):
        await trio.lowlevel.checkpoint()
        record.append(line.split()[0].rstrip(":"))

    return say


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_first_interrupt_drains_and_the_second_cancels_without_waiting_for_the_drain(record, say, number):
    async def drain():
        record.append("drain")
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        await nursery.start(
            lambda task_status: stop_on_interrupt(drain, nursery.cancel_scope.cancel, say=say, task_status=task_status)
        )
        signal.raise_signal(number)
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(record) == ["drain", "draining"]

        signal.raise_signal(number)
        await trio.sleep_forever()

    assert nursery.cancel_scope.cancelled_caught


async def test_without_an_interrupt_nothing_is_said_and_the_handlers_are_put_back(record, say):
    before = signal.getsignal(signal.SIGINT)

    async with trio.open_nursery() as nursery:
        await nursery.start(
            lambda task_status: stop_on_interrupt(trio.sleep_forever, record.clear, say=say, task_status=task_status)
        )
        assert signal.getsignal(signal.SIGINT) is not before
        nursery.cancel_scope.cancel()

    assert signal.getsignal(signal.SIGINT) is before
    assert record == []


async def test_every_usr1_shows_the_tree_also_while_the_body_is_cancelled(record, say):
    with trio.CancelScope() as outer:
        async with open_tree_on_usr1(lambda: "tree of tasks", say=say):
            signal.raise_signal(signal.SIGUSR1)
            await trio.testing.wait_all_tasks_blocked()
            outer.cancel()
            with trio.CancelScope(shield=True):
                signal.raise_signal(signal.SIGUSR1)
                await trio.testing.wait_all_tasks_blocked()
            await trio.lowlevel.checkpoint()

    assert outer.cancelled_caught
    assert record == ["tree", "tree"]
