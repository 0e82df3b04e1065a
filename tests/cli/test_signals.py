"""The effect of signals on a run, with real signals and a recorded drain."""

import signal

import pytest
import trio
import trio.testing

from trio_rollout.cli._run import open_tree_on_usr1, stop_on_interrupt


@pytest.fixture
def events():
    """The recorded events, in order."""
    return []


@pytest.fixture
def say(events):
    """Return a function that records printed lines by their first word."""

    async def say(line):
        await trio.lowlevel.checkpoint()
        events.append(line.split()[0].rstrip(":"))

    return say


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_first_interrupt_drains_and_the_second_cancels_without_waiting_for_the_drain(events, say, number):
    async def drain():
        events.append("drain")
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        await nursery.start(
            lambda task_status: stop_on_interrupt(drain, nursery.cancel_scope.cancel, say=say, task_status=task_status)
        )
        signal.raise_signal(number)
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(events) == ["drain", "draining"]

        signal.raise_signal(number)
        await trio.sleep_forever()

    assert nursery.cancel_scope.cancelled_caught


async def test_the_message_names_both_signals_that_cancel():
    """A user whose scheduler sent SIGTERM may have no Ctrl-C to press."""
    lines = []

    async def say(line):
        await trio.lowlevel.checkpoint()
        lines.append(line)

    async with trio.open_nursery() as nursery:
        await nursery.start(
            lambda task_status: stop_on_interrupt(trio.sleep_forever, lines.clear, say=say, task_status=task_status)
        )
        signal.raise_signal(signal.SIGTERM)
        await trio.testing.wait_all_tasks_blocked()
        assert lines[0].endswith("A second Ctrl-C or SIGTERM cancels them")
        nursery.cancel_scope.cancel()


async def test_without_an_interrupt_nothing_is_said_and_the_handlers_are_put_back(events, say):
    before = signal.getsignal(signal.SIGINT)

    async with trio.open_nursery() as nursery:
        await nursery.start(
            lambda task_status: stop_on_interrupt(trio.sleep_forever, events.clear, say=say, task_status=task_status)
        )
        assert signal.getsignal(signal.SIGINT) is not before
        nursery.cancel_scope.cancel()

    assert signal.getsignal(signal.SIGINT) is before
    assert events == []


async def test_every_usr1_shows_the_tree_also_while_the_body_is_cancelled(events, say):
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
    assert events == ["tree", "tree"]
