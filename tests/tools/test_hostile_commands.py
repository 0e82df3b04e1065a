"""Commands that attack their keeper and supervisor: they stop, kill and read them, and don't escape."""

import errno
import os
import random
import re
import resource
import signal
import socket
import time
from contextlib import suppress

import pytest
import trio

from trio_rollout import Leftovers
from trio_rollout.errors import ToolError
from trio_rollout.tools import ExecLimits, LocalSandboxes, SpawnError, StopKind, SupervisorLost, open_rollout_tools
from trio_rollout.tools._supervisor.supervisor_main import fork_keeper

KEEPER = "$PPID"
SUPERVISOR = "$(cut -d' ' -f4 /proc/$PPID/stat)"


def sh(line):
    return ["sh", "-c", line]


@pytest.fixture
async def tools(processes):
    async with open_rollout_tools(limits=ExecLimits(teardown=60)) as tools:
        yield tools
        left = trio.current_time()
    assert trio.current_time() - left < 50, "leaving was not torn off"
    assert (processes.marked(), processes.children()) == ([], 0)


@pytest.mark.parametrize(
    "attack",
    [
        f"kill -STOP {KEEPER}; sleep 600",
        f"kill -STOP {KEEPER} {SUPERVISOR}; sleep 600",
        f"kill -STOP {SUPERVISOR}; kill -STOP {KEEPER}; setsid sleep 600 & sleep 600",
    ],
    ids=["the keeper", "both", "both, and one escapes"],
)
async def test_a_command_that_stops_what_contains_it_runs_into_its_limit_and_is_dead_then(tools, processes, attack):
    result = await tools.run_captured(sh(attack), timeout=1.0)

    assert (result.stop, result.unreaped, processes.marked()) == (StopKind.TIMED_OUT, False, [])
    assert (await tools.run_captured(["echo", "next"], timeout=60)).stdout == b"next\n"


@pytest.mark.parametrize("target", [KEEPER, f"{KEEPER} {SUPERVISOR}"], ids=["the keeper", "both"])
async def test_one_that_stops_them_without_end_does_not_outlive_the_rollout(processes, target):
    async with open_rollout_tools(limits=ExecLimits(teardown=8)) as tools:
        attack = f'p=\'{target}\'; eval p="$p"; setsid sh -c "while :; do kill -STOP $p; done" & sleep 600'
        with trio.move_on_after(60):
            with suppress(SupervisorLost):  # the supervisor gives up such a keeper
                await tools.run_captured(sh(attack), timeout=0.5)

    for pid in processes.marked():
        await processes.wait_gone(pid)
    assert processes.children() == 0


HOSTILE = [
    f"kill -STOP {KEEPER}; sleep 600",
    f"kill -STOP {SUPERVISOR}; sleep 600",
    f"kill -STOP {KEEPER} {SUPERVISOR}; setsid sleep 600 & sleep 600",
    f"kill -9 {KEEPER}; sleep 600",
    f"kill -STOP {SUPERVISOR}; kill -9 {KEEPER}; setsid sleep 600",
    f"setsid sh -c 'while :; do kill -STOP {KEEPER}; done' & sleep 600",
    f"setsid sleep 600 & kill -9 {SUPERVISOR}; sleep 600",
    "setsid sleep 600 & exit 0",
]


async def hostile_rollout(draw, provider):
    """Run three hostile commands, captured, in a session and in a sandbox; often cancelled somewhere."""
    with trio.move_on_after(draw.choice([0.1, 0.5, 1.0, 60])):
        async with open_rollout_tools(limits=ExecLimits(teardown=60)) as tools:
            with suppress(ToolError):
                keep = draw.choice([Leftovers.KILL, Leftovers.KEEP])
                await tools.run_captured(sh(draw.choice(HOSTILE)), timeout=0.3, leftovers=keep)
            with suppress(ToolError):
                async with tools.open_sessions() as sessions:
                    await sessions.exec_command(sh(draw.choice(HOSTILE)), call_id="c", yield_time=0.3)
            with suppress(ToolError):
                async with tools.open_sandbox(provider) as sandbox:
                    await sandbox.exec(sh(draw.choice(HOSTILE)), timeout=0.3)


async def test_hostile_rollouts_leave_nothing_wherever_they_are_cancelled(processes, tmp_path):
    provider, before = LocalSandboxes(tmp_path / "boxes"), processes.descriptors()
    async with trio.open_nursery() as nursery:
        for seed in range(8):
            nursery.start_soon(hostile_rollout, random.Random(seed), provider)
    for pid in processes.marked():
        await processes.wait_gone(pid)

    assert (processes.children(), processes.descriptors(), provider.counts.leaked) == (0, before, 0)


async def test_a_stopped_supervisor_goes_on_when_it_is_asked_for_something(tools):
    await tools.run_captured(sh(f"kill -STOP {SUPERVISOR}"), timeout=60)
    started = time.monotonic()
    result = await tools.run_captured(["echo", "next"], timeout=60)

    assert result.stdout == b"next\n"
    assert time.monotonic() - started < 30


async def test_a_stopped_supervisor_does_not_outlive_the_rollout(tools):
    await tools.run_captured(sh(f"kill -STOP {SUPERVISOR}"), timeout=60)


async def test_a_killed_keeper_under_a_stopped_supervisor_leaves_no_process(tools, processes):
    attack = f"s={SUPERVISOR}; kill -STOP $s; setsid sleep 600 >/dev/null 2>&1 & kill -9 $PPID; sleep 600"
    with pytest.raises(SupervisorLost):
        await tools.run_captured(sh(attack), timeout=60)
    assert (await tools.run_captured(["echo", "next"], timeout=60)).stdout == b"next\n"
    for pid in processes.marked():
        await processes.wait_gone(pid)


async def test_a_command_that_kills_its_keeper_is_a_tool_error_and_dies(tools, processes):
    with pytest.raises(SupervisorLost):
        await tools.run_captured(sh(f"setsid sleep 600 & kill -9 {KEEPER}; sleep 600"), timeout=60)
    assert (await tools.run_captured(["echo", "next"], timeout=60)).stdout == b"next\n"
    for pid in processes.marked():
        await processes.wait_gone(pid)


async def test_a_command_that_kills_the_supervisor_is_contained_by_its_keeper(processes, given_time):
    attack = f"setsid sleep 600 >/dev/null 2>&1 & echo $PPID; kill -9 {SUPERVISOR}; sleep 600"

    async def keeper(limit):
        """Return the id of the attacker's keeper, if the attack succeeded in time."""
        async with open_rollout_tools() as tools:
            result = await tools.run_captured(sh(attack), timeout=limit)
            assert (result.stop, result.unreaped, processes.marked()) == (StopKind.TIMED_OUT, False, [])
            try:
                await tools.run_captured(["true"])
            except SupervisorLost:
                return int(result.stdout)

    await processes.wait_gone(await given_time(keeper, bool))


async def test_a_command_that_stops_itself_ends_at_its_limit(tools):
    assert (await tools.run_captured(sh("kill -STOP 0; kill -STOP $$"), timeout=0.5)).timed_out


async def test_a_start_can_be_cancelled_by_an_event_and_never_waits_for_ever():
    """The supervisor is stopped each time it is continued, so that nothing can be started."""
    cancel = trio.Event()
    async with open_rollout_tools(limits=ExecLimits(teardown=3)) as tools, trio.open_nursery() as nursery:
        hold = "setsid sh -c 'while :; do kill -STOP $0; done' $s >/dev/null 2>&1 &"
        keep = sh(f"s={SUPERVISOR}; {hold} echo")
        await tools.run_captured(keep, leftovers=Leftovers.KEEP, timeout=60)

        @nursery.start_soon
        async def soon():
            await trio.sleep(0.5)
            cancel.set()

        result = await tools.run_captured(["sleep", "600"], cancel=cancel)
    assert (result.stop, result.exit_code, result.stdout) == (StopKind.CANCELLED, 1, b"")


async def test_a_start_that_takes_too_long_is_the_hosts_failure(processes):
    async with open_rollout_tools(limits=ExecLimits(start=1e-9)) as tools:
        with pytest.raises(SupervisorLost, match=r"true: not started within 1e-09 s"):
            await tools.run_captured(["true"], timeout=60)
        async with tools.open_sessions() as sessions:
            with pytest.raises(SupervisorLost, match=r"true: not started within 1e-09 s"):
                await sessions.exec_command(["true"], call_id="c")
    assert processes.children() == 0


async def test_nothing_of_the_host_can_be_read_from_its_keeper_or_supervisor(tools, monkeypatch):
    monkeypatch.setenv("SECRET_API_KEY", "hunter2")
    looks = f"for p in {KEEPER} {SUPERVISOR}; do cat /proc/$p/environ /proc/$p/cmdline; readlink /proc/$p/cwd; done"
    said = (await tools.run_captured(sh(looks))).stdout

    assert b"hunter2" not in said
    assert b"SECRET_API_KEY" not in said
    assert (said.count(b"supervisor_main.py"), said.count(b"/\n")) == (2, 2)


async def test_a_keeper_holds_nothing_of_another_command(tools):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tools.run_captured, ["sleep", "600"])
        await tools.run_captured(["sleep", "0.1"])
        theirs = await tools.run_captured(sh(f"sleep 0.1; ls -l /proc/{KEEPER}/fd"))
        nursery.cancel_scope.cancel()

    assert theirs.stdout.count(b"socket:") == 1, "its own control socket"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EAGAIN, errno.ENOENT, errno.EPERM])
async def test_a_supervisor_that_cannot_be_started_is_never_the_commands_fault(monkeypatch, code):
    async def fail(*_args, **_options):
        await trio.lowlevel.checkpoint()
        raise OSError(code, os.strerror(code))

    async with open_rollout_tools() as tools:
        monkeypatch.setattr(trio.lowlevel, "open_process", fail)
        with pytest.raises(SpawnError, match="supervisor") as caught:
            await tools.run_captured(["true"])
    assert not caught.value.command_is_wrong


async def test_a_host_out_of_descriptors_is_not_the_commands_fault(processes):
    async with open_rollout_tools() as tools:
        await tools.run_captured(["true"])
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (processes.descriptors() + 1, hard))
        try:
            with pytest.raises(SpawnError) as caught:
                await tools.run_captured(["true"])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert not caught.value.command_is_wrong
        assert (await tools.run_captured(["true"])).exit_code == 0


def test_a_keeper_that_cannot_be_forked_is_the_hosts_failure_and_the_supervisor_goes_on(monkeypatch):
    def fail():
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(os, "fork", fail)
    with ours:
        assert fork_keeper(ours, [os.memfd_create("command"), theirs.detach()]) == 0
        assert ours.recv(1000) == b"failed 0 a keeper could not be forked: Resource temporarily unavailable"
        assert ours.recv(1000) == b"", "nothing of it stays open"


async def test_kept_commands_do_not_pile_up(processes):
    async with open_rollout_tools(limits=ExecLimits(max_processes=3)) as tools:
        await tools.run_captured(["true"])
        before = processes.descriptors()
        for _ in range(8):
            await tools.run_captured(["true"], leftovers=Leftovers.KEEP)
        await tools.run_captured(["sleep", "0.1"], leftovers=Leftovers.KEEP)
        assert processes.descriptors() - before <= 3
        kept = [
            int((await tools.run_captured(sh("sleep 600 >/dev/null 2>&1 & echo $!"), leftovers=Leftovers.KEEP)).stdout)
            for _ in range(5)
        ]
        for pid in kept[:2]:
            await processes.wait_gone(pid)
        assert [processes.alive(pid) for pid in kept] == [False, False, True, True, True]


async def test_f179_of_a_command_that_kills_both_is_said_that_it_lives_on(processes):
    """The error names the process; that its supervisor kills the process would not be so."""
    async with open_rollout_tools(limits=ExecLimits(teardown=60)) as tools:
        with pytest.raises(SupervisorLost, match="unless the command has killed that too: then they live on") as lost:
            await tools.run_captured(sh(f"kill -9 {SUPERVISOR}; kill -9 {KEEPER}; sleep 600"), timeout=60)
    left = processes.marked()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        await processes.wait_gone(pid)
    assert int(re.search(r"\d+", str(lost.value)).group()) in left


async def test_a_keeper_that_was_killed_alone_has_a_supervisor_that_kills(tools, processes):
    with pytest.raises(
        SupervisorLost, match=r"keeper of process \d+ is gone; its supervisor kills the processes it had"
    ):
        await tools.run_captured(sh(f"kill -9 {KEEPER}; sleep 600"), timeout=60)
    for pid in processes.marked():
        await processes.wait_gone(pid)
