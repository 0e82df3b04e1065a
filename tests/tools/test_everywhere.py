"""Cancelled at every step: captured commands, sessions and sandboxes leave no process, no id, no sandbox."""

from functools import partial

import attrs
import pytest
import trio

from trio_rollout import Leftovers
from trio_rollout.testing import Inject, cancel_everywhere
from trio_rollout.tools import ExecLimits, SandboxCounts, SandboxSettings
from trio_rollout.tools._commands.capture import CapturePlan, Expiration, capture
from trio_rollout.tools._commands.command import Command
from trio_rollout.tools._exec.sessions import open_exec_sessions
from trio_rollout.tools._sandboxes.sandbox import open_sandbox

from .fake_child import FakeBackend

HOW = [Inject.CANCEL, Inject.CANCEL_TWICE]


@attrs.define
class World:
    """A backend whose processes run for a moment, and the ends that were reported."""

    backend: FakeBackend = attrs.field(factory=FakeBackend)
    ends: list = attrs.field(factory=list)
    sessions: object = None

    async def live(self):
        """Let a process write twice, and every third one exit by itself."""
        number = 0
        async with trio.open_nursery() as nursery:
            while True:
                nursery.start_soon(self.play, await self.backend.child(number), number)
                number += 1

    async def play(self, child, number):
        await trio.sleep(0.1)
        child.say(b"hello")
        await trio.sleep(3)
        child.say(b"more")
        if number % 3 == 0:
            child.exit(0)

    def require_nothing_left(self):
        for child in self.backend.children:
            assert (child.released, child.closed) == (True, True)
        if self.sessions is not None:
            assert self.sessions._store._reserved == set()
            assert self.sessions.statistics().unreaped == 0
            assert len(self.ends) == len(self.backend.children), "one end for each process"


async def captured(arm):
    """Three commands side by side: one reaches its limit, one is cancelled by its event."""
    world, cancel = World(), trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.live)
        with trio.CancelScope() as scope:
            arm(scope, "outside")
            async with trio.open_nursery() as running:
                arm(running.cancel_scope, "inside")
                for expiration in (Expiration(), Expiration(timeout=1), Expiration(cancels=(cancel,))):
                    plan = CapturePlan(expiration=expiration)
                    running.start_soon(capture, world.backend.spawn, Command(argv=["play"]), plan)
                await trio.sleep(2)
                cancel.set()
                await trio.sleep(2)
                running.cancel_scope.cancel()
        nursery.cancel_scope.cancel()
    return world


def test_captured_commands_leave_nothing_wherever_they_are_cancelled():
    cancel_everywhere(captured, lambda world, _: world.require_nothing_left(), how=HOW, sample=60).require()


async def use_sessions(sessions):
    first = await sessions.exec_command(["play"], call_id="1", yield_time=1)
    second = await sessions.exec_command(["play"], call_id="2", yield_time=1, tty=True)
    await sessions.write_stdin(second.process_id, "hi\n", yield_time=1)
    await sessions.poll(first.process_id, yield_time=5)
    await sessions.exec_to_completion(["play"], call_id="3", timeout=1)
    await sessions.terminate_process(second.process_id)
    await sessions.exec_command(["play"], call_id="4", yield_time=1)


async def sessions_world(arm, policy):
    world = World()
    limits = ExecLimits(on_turn_cancel=policy)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.live)
        with trio.CancelScope() as outside:
            arm(outside, "outside")
            async with open_exec_sessions(
                world.backend.spawn, limits=limits, on_end=world.ends.append, drain_timeout=1
            ) as sessions:
                world.sessions = sessions
                with trio.CancelScope() as call:
                    arm(call, "call")
                    await use_sessions(sessions)
                if call.cancelled_caught and sessions.list_processes():
                    arm.sometimes("a process outlived its call")
        nursery.cancel_scope.cancel()
    return world


@pytest.mark.parametrize("policy", Leftovers)
def test_sessions_leave_no_process_and_no_id_wherever_they_are_cancelled(policy):
    sweep = cancel_everywhere(
        partial(sessions_world, policy=policy), lambda world, _: world.require_nothing_left(), how=HOW, sample=60
    )

    sweep.require(*(["a process outlived its call"] if policy is Leftovers.KEEP else []))


class Service:
    """A slow provider; a sandbox exists from the middle of its creation on."""

    def __init__(self):
        self.counts = SandboxCounts()
        self.alive = set()

    async def create(self, spec):
        await trio.sleep(0.2)
        self.alive.add(spec.name)
        await trio.sleep(0.2)
        return self

    async def destroy(self, name):
        await trio.sleep(0.1)
        self.alive.discard(name)
        await trio.sleep(0.1)

    async def exec(self, *_arguments, **_options):
        await trio.sleep(1)


async def sandboxes(arm):
    service = Service()
    with trio.CancelScope() as scope:
        arm(scope, "outside")
        for _ in range(2):
            with trio.CancelScope() as inside:
                arm(inside, "inside")
                async with open_sandbox(service, settings=SandboxSettings(create=5, destroy=5)) as sandbox:
                    await sandbox.exec(["work"])
    return service


def test_sandboxes_are_destroyed_wherever_their_rollout_is_cancelled():
    def check(service, _point):
        assert (service.alive, service.counts.leaked) == (set(), 0)
        assert service.counts.created == service.counts.destroyed

    cancel_everywhere(sandboxes, check, how=HOW).require()
