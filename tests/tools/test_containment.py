"""Inside a rollout no process escapes: by ``setsid``, a double fork, forking while it is killed, or the death of its keeper or host."""

import ctypes
import os
import signal
import subprocess
import sys
import time

import pytest
import trio

from trio_rollout import Leftovers
from trio_rollout.tools import ExecLimits, SupervisorLost, open_rollout_tools, run_captured

# Forks until 200 tokens are used up; every other process leaves the group and the session. It can't grow beyond that.
TREE = """
import os, sys, time
read, write = os.pipe()
os.write(write, b"." * 200)
os.close(write)
escape = sys.argv[1] == "escape"
forks = 0
while os.read(read, 1):
    if os.fork() == 0:
        forks = 0
        if escape and os.getpid() % 2:
            os.setsid()
    else:
        forks += 1
        if forks == 3:
            os.write(1, b"growing\\n")
time.sleep(600)
"""


def sh(line):
    return ["sh", "-c", line]


def start(nursery, tools, argv, said, **options):
    """Run a command in the background and return its scope."""
    scope = trio.CancelScope()

    async def go():
        with scope:
            await tools.run_captured(argv, on_chunk=said, **options)

    nursery.start_soon(go)
    return scope


async def test_an_escapee_by_setsid_dies_with_the_command_that_had_it(processes):
    async with open_rollout_tools() as tools:
        result = await tools.run_captured(sh("setsid sleep 600 >/dev/null 2>&1 & echo $!; exit 0"))
        await processes.wait_gone(int(result.stdout))
        assert processes.alive(os.getpid())


async def test_an_escapee_that_holds_the_output_does_not_delay_a_timeout():
    async with open_rollout_tools(limits=ExecLimits(io_drain=60)) as tools:
        started = time.monotonic()
        result = await tools.run_captured(sh("setsid sleep 600 & exec sleep 600"), timeout=0.2)

    assert result.timed_out
    assert result.stdout_complete
    assert time.monotonic() - started < 30, "the drain was not needed"


async def test_an_unbound_command_may_leave_an_escapee_and_its_docstring_says_so(processes, tmp_path):
    escape = "mkfifo f; setsid sh -c 'exec >/dev/null 2>&1; echo $$ > f; exec sleep 600' & read pid < f; echo $pid"
    result = await run_captured(sh(escape), cwd=tmp_path)
    pid = int(result.stdout)
    survived = processes.alive(pid)
    os.kill(pid, signal.SIGKILL)
    await processes.wait_gone(pid)

    assert survived
    assert "setsid" in run_captured.__doc__


@pytest.mark.parametrize("escape", ["stay", "escape"])
async def test_a_tree_of_200_that_forks_while_it_is_killed_ends(escape, said, processes):
    async with open_rollout_tools() as tools, trio.open_nursery() as nursery:
        scope = start(nursery, tools, [sys.executable, "-c", TREE, escape], said)
        await said.wait(b"growing")
        scope.cancel()

    assert processes.marked() == []


async def test_a_tree_of_200_in_its_group_ends_without_a_rollout_too(said, processes):
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def cancel_while_it_grows():
                await said.wait(b"growing")
                scope.cancel()

            await run_captured([sys.executable, "-c", TREE, "stay"], on_chunk=said)

    assert scope.cancelled_caught
    for pid in processes.marked():  # killed, but not our children: they can be watched, not waited for
        await processes.wait_gone(pid)
    assert processes.marked() == []


async def test_kept_leftovers_live_until_the_rollout_ends_and_may_go_on_writing(processes):
    """The output of leftovers is read and discarded: they don't die of a closed pipe."""
    script = "(while true; do echo more || exit; sleep 0.01; done) & echo $! >&2; exit 0"
    async with open_rollout_tools(limits=ExecLimits(io_drain=0.05)) as tools:
        result = await tools.run_captured(sh(script), leftovers=Leftovers.KEEP)
        pid = int(result.stderr)
        assert (await tools.run_captured(["sleep", "0.1"])).exit_code == 0
        assert processes.alive(pid)

    assert not processes.alive(pid)


async def test_kept_leftovers_die_with_a_cancelled_rollout(processes):
    with trio.CancelScope() as scope:
        async with open_rollout_tools() as tools:
            kept = await tools.run_captured(sh("sleep 600 >/dev/null 2>&1 & echo $!"), leftovers=Leftovers.KEEP)
            scope.cancel()
            await trio.lowlevel.checkpoint()

    assert not processes.alive(int(kept.stdout))


async def test_a_killed_keeper_is_a_tool_error_and_its_command_dies(said, processes):
    async with open_rollout_tools() as tools:
        with pytest.RaisesGroup(SupervisorLost):
            async with trio.open_nursery() as nursery:
                start(nursery, tools, sh("setsid sleep 600 & echo $!; echo $PPID; wait"), said)
                escapee, keeper = await said.words(2)
                os.kill(keeper, signal.SIGKILL)
        await processes.wait_gone(escapee)
        assert (await tools.run_captured(["true"])).exit_code == 0, "the supervisor goes on"


async def test_a_killed_supervisor_is_a_tool_error_for_what_comes_after():
    async with open_rollout_tools() as tools:
        await tools.run_captured(["true"])
        os.kill(tools._supervisor._process.pid, signal.SIGKILL)
        await tools._supervisor._process.wait()
        with pytest.raises(SupervisorLost):
            await tools.run_captured(["true"])


async def test_a_supervisor_that_dies_while_a_command_runs_leaves_the_command_contained(said, processes):
    """The keeper still answers the host."""
    async with open_rollout_tools() as tools, trio.open_nursery() as nursery:
        scope = start(nursery, tools, sh("setsid sleep 600 & echo $!; wait"), said)
        (pid,) = await said.words(1)
        os.kill(tools._supervisor._process.pid, signal.SIGKILL)
        scope.cancel()

    assert not processes.alive(pid)


HOST = """
import trio
from trio_rollout.tools import open_rollout_tools

async def main():
    async with open_rollout_tools() as tools:
        line = "setsid sleep 600 >/dev/null 2>&1 & echo $!; echo $$; echo ready; exec sleep 600"
        await tools.run_captured(["sh", "-c", line], on_chunk=lambda _, chunk: print(chunk.decode(), end="", flush=True))

trio.run(main)
"""


async def test_when_the_host_is_killed_its_commands_die(processes):
    host = await trio.lowlevel.open_process([sys.executable, "-c", HOST], stdout=subprocess.PIPE)
    try:
        said = b""
        with trio.fail_after(120):
            while b"ready" not in said:
                said += await host.stdout.receive_some()
    finally:
        host.kill()
        with trio.move_on_after(10, shield=True):
            await host.wait()
            await host.stdout.aclose()

    for pid in said.split()[:2]:
        await processes.wait_gone(int(pid))


async def test_the_host_adopts_no_process():
    """The host is no subreaper: it does not adopt orphans of its other children."""
    async with open_rollout_tools() as tools:
        await tools.run_captured(["true"])

    is_reaper = ctypes.c_int(-1)
    assert ctypes.CDLL(None).prctl(37, ctypes.byref(is_reaper), 0, 0, 0) == 0
    assert is_reaper.value == 0


async def test_entering_a_rollouts_tools_starts_nothing(processes):
    async with open_rollout_tools():
        assert processes.children() == 0


async def test_a_rollout_may_be_left_with_20_commands_running(processes):
    with trio.CancelScope() as scope:
        async with open_rollout_tools() as tools, trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(tools.run_captured, ["sleep", "600"])
            await tools.run_captured(["sleep", "0.1"])
            scope.cancel()

    assert processes.marked() == []
