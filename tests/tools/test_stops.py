"""The stop that a captured command met, if several are due at once. Scripted, in virtual time."""

import signal

import pytest
import trio

from trio_rollout.tools import ExecLimits, StopKind
from trio_rollout.tools._commands.capture import CapturePlan, Expiration, capture
from trio_rollout.tools._commands.command import Command

from .fake_child import FakeBackend


@pytest.fixture
def backend():
    return FakeBackend()


async def run(backend, act, *, limits=None, **expires):
    plan = CapturePlan(expiration=Expiration(**expires), limits=limits or ExecLimits())
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def direct():
            await act(await backend.child())

        return await capture(backend.spawn, Command(argv=["play"]), plan)


async def test_cancellation_and_timeout_at_the_same_instant_is_a_cancellation(autojump_clock, backend):
    cancel = trio.Event()

    async def act(_child):
        await trio.sleep_until(began + 10)
        cancel.set()

    began = trio.current_time()
    result = await run(backend, act, timeout=10, cancels=(cancel,))

    assert (result.stop, result.exit_code, result.timed_out) == (StopKind.CANCELLED, 1, False)


async def test_exit_and_timeout_at_the_same_instant_is_an_exit(autojump_clock, backend):
    async def act(child):
        await trio.sleep_until(began + 10)
        child.exit(7)

    began = trio.current_time()
    result = await run(backend, act, timeout=10)

    assert (result.stop, result.exit_code) == (StopKind.EXITED, 7)


async def test_a_clean_exit_stays_one_when_the_cancel_event_is_set_too(autojump_clock, backend):
    cancel = trio.Event()

    async def act(child):
        child.exit(0)
        cancel.set()

    result = await run(backend, act, cancels=(cancel,))

    assert (result.stop, result.exit_code) == (StopKind.EXITED, 0)
    assert signal.SIGTERM not in (await backend.child()).signals


async def test_a_timeout_kills_at_once_and_a_cancellation_asks_first(autojump_clock, backend):
    async def act(_child):
        await trio.lowlevel.checkpoint()

    await run(backend, act, timeout=1)
    cancelled = trio.Event()
    cancelled.set()
    await run(backend, act, cancels=(cancelled,))

    assert backend.children[0].signals == [signal.SIGKILL]
    assert backend.children[1].signals[:2] == [signal.SIGTERM, signal.SIGKILL]


async def test_f179_both_streams_share_one_drain_of_a_second_and_keep_what_they_had(autojump_clock, backend):
    """A grandchild may hold them open for ever, and the call must not."""

    async def act(child):
        child.say(b"kept")
        await trio.sleep(1)
        child.exit(0, close=False)

    began = trio.current_time()
    result = await run(backend, act)

    assert trio.current_time() - began == pytest.approx(1 + 1, abs=0.01)
    assert (result.stdout, result.stdout_complete, result.stderr_complete) == (b"kept", False, False)


async def test_what_does_not_die_is_reported_and_the_call_returns(autojump_clock, backend):
    """F088: an unkillable process is reported, and the call does not hang."""

    async def act(child):
        child.stubborn = True

    began = trio.current_time()
    result = await run(backend, act, timeout=1, limits=ExecLimits(teardown=3))

    assert (result.unreaped, result.timed_out) == (True, True)
    assert trio.current_time() - began < 1 + 3 + 2 + 4


def test_any_of_several_events_cancels_and_the_timeout_stays():
    events = [trio.Event() for _ in range(3)]
    expiration = Expiration(timeout=5.0, cancels=tuple(events))
    assert expiration.deadline(10.0) == 15.0
    events[2].set()

    assert expiration.classify(exited=False) is StopKind.CANCELLED
    assert expiration.classify(exited=True) is StopKind.EXITED
    assert Expiration(timeout=5.0).classify(exited=False) is StopKind.TIMED_OUT
