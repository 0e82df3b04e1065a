"""Exec sessions with real processes: pipes, a real terminal, grandchildren, and no process left at the end."""

import os
import signal
import sys
import time
from contextlib import asynccontextmanager

import pytest
import trio

from trio_rollout import Leftovers
from trio_rollout.tools import ExecLimits, SpawnError, StdinClosed, UnknownProcessId
from trio_rollout.tools._exec.sessions import open_exec_sessions

# Shorter waits than a model gets, so that a poll is a quick look.
QUICK = {"min_yield": 0.01, "min_poll": 0.01, "early_exit": 0.15, "post_write": 0.01}


def sh(line):
    return ["sh", "-c", line]


@asynccontextmanager
async def quick(**options):
    async with open_exec_sessions(limits=ExecLimits(**{**QUICK, **options})) as sessions:
        yield sessions


@pytest.fixture
async def sessions():
    async with quick() as sessions:
        yield sessions


async def start(sessions, argv, *, until=b"ready", **options):
    """Start a session and poll until it has written ``until``; return its id and its output."""
    output = await sessions.exec_command(argv, call_id="call", yield_time=0.01, **options)
    said = output.output
    with trio.fail_after(120):
        while until not in said:
            assert output.alive, output
            output = await sessions.poll(output.process_id, yield_time=0.02)
            said += output.output
    return output.process_id, said


async def finish(sessions, process_id):
    """Poll until the session has ended; return its exit code and its output."""
    said = b""
    with trio.fail_after(120):
        while True:
            output = await sessions.poll(process_id, yield_time=0.1)
            said += output.output
            if not output.alive:
                return output.exit_code, said


async def test_a_short_yield_has_an_id_and_a_later_poll_the_rest(sessions):
    """Codex: ``unified_exec_timeouts``, ``completed_pipe_commands_preserve_exit_code``."""
    process_id, said = await start(sessions, sh("echo ready; sleep 0.3; echo done; exit 17"))

    assert said == b"ready\n"
    assert await finish(sessions, process_id) == (17, b"done\n")
    with pytest.raises(UnknownProcessId):
        await sessions.poll(process_id)


async def test_what_exits_at_once_is_never_stored_and_answers_at_once(sessions):
    """Codex: ``unified_exec_respects_early_exit_notifications``."""
    began = time.monotonic()
    output = await sessions.exec_command(sh("echo quick; exit 4"), call_id="c", yield_time=30)

    assert (output.exit_code, output.output, output.alive) == (4, b"quick\n", False)
    assert time.monotonic() - began < 25  # yield_time is not waited for
    assert sessions.statistics().stored == 0


async def test_sessions_keep_their_state_and_are_isolated(sessions):
    """Codex: ``unified_exec_persists_across_requests``, ``multi_unified_exec_sessions``."""
    first, _ = await start(sessions, ["sh"], tty=True, until=b"")
    second, _ = await start(sessions, ["sh"], tty=True, until=b"")
    await sessions.write_stdin(first, "X=one\n")
    await sessions.write_stdin(second, "X=two\n")

    assert await until(sessions, first, b"got-one\r\n", typing="echo got-$X; read\n")
    assert await until(sessions, second, b"got-two\r\n", typing="echo got-$X; read\n")


async def test_cancelled_before_it_is_stored_the_process_is_dead(processes):
    async with quick(early_exit=30, on_turn_cancel=Leftovers.KEEP) as sessions, trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:

            @nursery.start_soon
            async def cancel():
                with trio.fail_after(120):
                    while not processes.marked():
                        await trio.sleep(0.01)  # noqa: ASYNC110  a process's birth can't be waited for
                scope.cancel()

            await sessions.exec_command(["sleep", "600"], call_id="c")

        assert processes.marked() == []
        assert sessions.list_processes() == ()


async def test_cancelled_after_it_is_stored_it_can_be_kept_and_dies_with_the_block(processes):
    """Codex: ``unified_exec_interrupt_preserves_long_running_session``."""
    async with quick(on_turn_cancel=Leftovers.KEEP) as sessions:
        process_id, said = await start(sessions, sh("echo $$ ready; exec sleep 600"))
        with trio.move_on_after(0.1):
            await sessions.poll(process_id, yield_time=30)
        assert [info.process_id for info in sessions.list_processes()] == [process_id]
        assert processes.alive(int(said.split()[0]))

    assert not processes.alive(int(said.split()[0]))


async def test_by_default_it_dies_with_its_call(processes):
    async with quick() as sessions:
        process_id, said = await start(sessions, sh("echo $$ ready; exec sleep 600"))
        with trio.move_on_after(0.1):
            await sessions.poll(process_id, yield_time=30)
        assert not processes.alive(int(said.split()[0]))
        assert sessions.list_processes() == ()


async def test_an_interrupt_reaches_the_trap_and_its_own_exit_code(sessions):
    """Codex: ``write_stdin_ctrl_c_interrupts_non_tty_session``."""
    script = "trap 'echo trapped; exit 42' INT; echo ready; while true; do sleep 0.05; done"
    process_id, _ = await start(sessions, sh(script))
    output = await sessions.write_stdin(process_id, "\x03", yield_time=5)

    assert (output.exit_code, output.output, output.process_id) == (42, b"trapped\n", None)


async def test_an_interrupt_without_a_trap_is_130(sessions):
    """Codex: ``write_stdin_default_interrupt_reports_130``."""
    process_id, _ = await start(sessions, sh("echo ready; exec sleep 600"))

    assert (await sessions.write_stdin(process_id, "\x03", yield_time=5)).exit_code == 130


async def test_a_program_that_ignores_the_interrupt_stays_stored(sessions):
    process_id, _ = await start(sessions, sh("trap '' INT; echo ready; sleep 600"))
    output = await sessions.write_stdin(process_id, "\x03", yield_time=0.1)

    assert output.process_id == process_id


async def test_a_pipe_session_takes_no_other_input_and_is_no_terminal(sessions):
    """Codex: ``unified_exec_defaults_to_pipe``."""
    process_id, _ = await start(sessions, sh("test -t 0 || echo ready; sleep 600"))
    with pytest.raises(StdinClosed):
        await sessions.write_stdin(process_id, "hello\n")

    assert (await sessions.poll(process_id, yield_time=0.1)).alive


async def test_both_outputs_come_in_the_order_in_which_they_were_written(sessions):
    output = await sessions.exec_command(sh("echo 1; echo 2 >&2; echo 3"), call_id="c")

    assert output.output == b"1\n2\n3\n"


async def test_a_terminal_is_one_with_its_size_and_echo(sessions):
    """Codex: ``unified_exec_can_enable_tty``."""
    script = (
        "import os, sys; print(sys.stdin.isatty(), sys.stderr.isatty(), os.get_terminal_size(), flush=True); input()"
    )
    process_id, said = await start(sessions, [sys.executable, "-c", script], tty=True, until=b")")

    assert said == b"True True os.terminal_size(columns=80, lines=24)\r\n"
    output = await sessions.write_stdin(process_id, "hello\n", yield_time=5)
    assert (output.output, output.exit_code) == (b"hello\r\n", 0)


async def test_cat_echoes_and_the_end_of_input_ends_it(sessions):
    """Codex: ``write_stdin_returns_exit_metadata_and_clears_session``."""
    process_id, _ = await start(sessions, ["cat"], tty=True, until=b"")
    said = (await sessions.write_stdin(process_id, "abc\n", yield_time=0.1)).output
    output = await sessions.write_stdin(process_id, "\x04", yield_time=5)

    assert said + output.output == b"abc\r\nabc\r\n"
    assert (output.exit_code, sessions.statistics().stored) == (0, 0)


@pytest.mark.parametrize(
    "program", [["cat"], [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]]
)
async def test_ctrl_c_in_a_terminal_interrupts_whatever_runs_there(sessions, program):
    """This needs a controlling terminal, which neither dash nor Python opens by itself."""
    process_id, _ = await start(sessions, program, tty=True, until=b"up" if len(program) > 1 else b"")
    output = await sessions.write_stdin(process_id, "\x03", yield_time=5)

    assert output.exit_code in {130, 1}, "Python turns it into KeyboardInterrupt and dies of the signal"
    assert not output.alive


async def test_a_shell_in_a_terminal_has_job_control(sessions):
    """Ctrl-C reaches the foreground job and not the shell."""
    bash = ["env", "PS1=go> ", "bash", "--norc", "--noprofile", "-i"]
    process_id, _ = await start(sessions, bash, tty=True, until=b"go> ")
    await until(sessions, process_id, b"in-the-1-job", typing="sh -c 'echo in-the-$((1))-job; exec sleep 600'\n")
    assert b"^C" in await until(sessions, process_id, b"go> ", typing="\x03")

    assert await until(sessions, process_id, b"status-130\r\n", typing="echo status-$?; read\n")


async def until(sessions, process_id, what, *, typing):
    """Write, and poll until the session has written ``what``; return all output, with the echo of the input."""
    said = (await sessions.write_stdin(process_id, typing)).output
    with trio.fail_after(120):
        while what not in said:
            said += (await sessions.poll(process_id, yield_time=0.05)).output
    return said


async def test_terminate_is_true_once_and_the_process_is_dead(sessions, processes):
    process_id, said = await start(sessions, sh("trap '' TERM INT HUP; echo $$ ready; sleep 600"))

    assert await sessions.terminate_process(process_id) is True
    assert not processes.alive(int(said.split()[0]))
    assert await sessions.terminate_process(process_id) is False
    assert sessions.list_processes() == ()


async def test_an_evicted_process_is_really_dead(processes):
    async with quick(max_processes=2, protected=1) as sessions:
        started = [await start(sessions, sh("echo $$ ready; exec sleep 600")) for _ in range(3)]
        await processes.wait_gone(int(started[0][1].split()[0]))
        assert len(sessions.list_processes()) == 2


async def test_a_grandchild_that_holds_the_output_does_not_delay_the_response(sessions):
    began = time.monotonic()
    output = await sessions.exec_command(sh("sleep 600 & echo done"), call_id="c", yield_time=30)

    assert (output.exit_code, output.output) == (0, b"done\n")
    assert time.monotonic() - began < 25  # yield_time is not waited for


async def test_what_a_session_left_running_lives_until_it_is_released(sessions, processes):
    """The leader stays a zombie until then: its group can still be killed, and its id is not reused."""
    process_id, said = await start(sessions, sh("sleep 600 & echo $! $$ ready; sleep 0.3"))
    child, leader = (int(word) for word in said.split()[:2])
    await processes.wait_gone(leader)
    assert processes.alive(child)

    exit_code, _ = await finish(sessions, process_id)
    assert exit_code == 0
    await processes.wait_gone(child)


async def test_an_escapee_dies_with_its_session(sessions, processes):
    process_id, said = await start(sessions, sh("setsid sleep 600 >/dev/null 2>&1 & echo $! ready; sleep 600"))
    await sessions.terminate_process(process_id)

    assert not processes.alive(int(said.split()[0]))


async def test_no_byte_is_lost_or_doubled_across_polls(sessions):
    script = "for i in range(60000): print(i)"
    output = await sessions.exec_command([sys.executable, "-uc", script], call_id="c", yield_time=0.01)
    said = output.output
    while output.alive:
        output = await sessions.poll(output.process_id, yield_time=0.05)
        said += output.output

    assert said.split() == [str(number).encode() for number in range(60000)]


@pytest.mark.parametrize("tty", [False, True])
async def test_a_chatty_process_is_not_held_up_while_no_call_polls(sessions, tty, tmp_path):
    script = f"import sys; sys.stdout.write('x' * 3000000); open({str(tmp_path / 'done')!r}, 'w')"
    output = await sessions.exec_command([sys.executable, "-c", script], call_id="c", tty=tty, yield_time=0.01)
    said = output.output.count(b"x") + output.omitted_bytes
    while output.alive:
        output = await sessions.poll(output.process_id, yield_time=20)
        said += output.output.count(b"x") + output.omitted_bytes

    assert output.exit_code == 0
    assert (tmp_path / "done").exists()
    assert said == 3_000_000


async def test_leaving_kills_and_reaps_whatever_the_sessions_had(processes):
    began = time.monotonic()
    async with quick() as sessions:
        for _ in range(3):
            await start(
                sessions, sh("trap '' TERM HUP; (trap '' TERM; sleep 600) & setsid sleep 600 & echo ready; wait")
            )
        await start(sessions, sh("trap '' HUP; echo ready; sleep 600"), tty=True)

    assert processes.marked() == []
    assert processes.children() == 0
    assert time.monotonic() - began < 120


async def test_leaving_by_a_cancellation_kills_and_reaps_too(processes):
    with trio.CancelScope() as scope:
        async with quick() as sessions:
            await start(sessions, sh("trap '' TERM; (trap '' TERM; sleep 600) & echo ready; wait"))
            scope.cancel()
            await sessions.exec_command(["sleep", "600"], call_id="c")

    assert scope.cancelled_caught
    assert processes.marked() == []


@pytest.mark.parametrize(("ends", "limit", "code"), [("exec sleep 600", 0.5, 124), ("exit 3", 60, 3)])
async def test_one_shot_mode_leaves_no_process(sessions, processes, ends, limit, code):
    output = await sessions.exec_to_completion(
        sh(f"setsid sleep 600 >/dev/null 2>&1 & {ends}"), call_id="c", timeout=limit
    )

    assert (output.exit_code, processes.marked()) == (code, [])


async def test_one_shot_mode_is_124_at_its_deadline_and_dead_when_cancelled(sessions, processes, given_time):
    output = await given_time(
        lambda limit: sessions.exec_to_completion(sh("echo x; exec sleep 600"), call_id="c", timeout=limit),
        lambda output: output.output,
    )
    assert (output.exit_code, output.output, output.timed_out) == (124, b"x\n", True)

    with trio.move_on_after(0.3):
        await sessions.exec_to_completion(["sleep", "600"], call_id="c", timeout=60)
    assert processes.marked() == []


async def test_a_missing_program_is_an_error_that_leaves_nothing(sessions):
    with pytest.raises(SpawnError, match="No such file") as caught:
        await sessions.exec_command(["nosuchprogram"], call_id="c")

    assert caught.value.command_is_wrong
    assert sessions.statistics().stored == 0


async def test_a_keeper_that_is_killed_is_an_infrastructure_error(sessions):
    process_id, said = await start(sessions, sh("echo $PPID ready; sleep 600"))
    os.kill(int(said.split()[0]), signal.SIGKILL)
    with pytest.raises(Exception, match="keeper"):
        await sessions.poll(process_id, yield_time=20)

    assert sessions.statistics().stored == 0


async def test_twenty_sessions_polled_again_and_again_leave_nothing(processes):
    async with quick() as warm:  # whatever is opened once is open now
        await start(warm, sh("echo ready; sleep 600"))
    descriptors = processes.descriptors()
    async with quick() as sessions:
        ids = [(await start(sessions, sh("while true; do echo ready; sleep 0.01; done")))[0] for _ in range(20)]
        opened = processes.descriptors()
        async with trio.open_nursery() as nursery:
            for process_id in ids:
                nursery.start_soon(poll_often, sessions, process_id)
        assert processes.descriptors() == opened

    assert (processes.descriptors(), processes.children()) == (descriptors, 0)


async def poll_often(sessions, process_id):
    for _ in range(10):
        assert (await sessions.poll(process_id, yield_time=0.01)).alive
