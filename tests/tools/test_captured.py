"""Captured commands with real processes: outside a rollout and inside one."""

import os
import signal
import sys
import time

import pytest
import trio

from trio_rollout import Leftovers
from trio_rollout.errors import ToolError
from trio_rollout.tools import ExecLimits, SpawnError, StopKind, open_rollout_tools, run_captured

FAST_DRAIN = ExecLimits(io_drain=0.2)
SLOW_DRAIN = ExecLimits(io_drain=600)  # who waits for it is seen to, also on a busy machine


def sh(line):
    return ["sh", "-c", line]


async def test_a_clean_exit_is_its_own_code_and_both_streams(run):
    result = await run(sh("echo out; echo err >&2; exit 3"))

    assert (result.exit_code, result.stop, result.timed_out) == (3, StopKind.EXITED, False)
    assert (result.stdout, result.stderr, result.aggregated) == (b"out\n", b"err\n", b"out\nerr\n")
    assert (result.stdout_complete, result.stderr_complete, result.unreaped) == (True, True, False)


async def test_timeout_is_124_and_keeps_the_output(run, given_time):
    started = time.monotonic()
    result = await given_time(lambda limit: run(sh("echo before; sleep 600"), timeout=limit))

    assert (result.exit_code, result.stop, result.timed_out) == (124, StopKind.TIMED_OUT, True)
    assert result.stdout == b"before\n"
    assert result.duration >= 0.2
    assert time.monotonic() - started < 200
    assert result.model_text().startswith("command timed out after ")


async def test_timeout_kills_grandchildren_that_hold_the_output(run, processes, given_time):
    """F085: ``sh -c "(while …) | cat"`` must not delay the call."""
    started = time.monotonic()
    script = "sleep 600 & echo $!; (while true; do echo x; sleep 0.05; done) | cat"
    result = await given_time(lambda limit: run(sh(script), timeout=limit, limits=SLOW_DRAIN))

    assert result.timed_out
    assert time.monotonic() - started < 200
    await processes.wait_gone(int(result.stdout.split()[0]))


async def test_cancel_event_is_exit_code_1_and_no_timeout(run, said):
    cancel = trio.Event()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def set_it_when_ready():
            await said.wait(b"ready")
            cancel.set()

        result = await run(sh("echo ready; exec sleep 60"), cancel=cancel, on_chunk=said)

    assert (result.exit_code, result.stop, result.timed_out) == (1, StopKind.CANCELLED, False)


async def test_any_of_several_cancel_events_counts(run):
    cancels = [trio.Event() for _ in range(3)]
    cancels[2].set()

    assert (await run(["sleep", "60"], cancel=cancels, timeout=60)).stop is StopKind.CANCELLED


async def test_cancellation_lets_the_leader_clean_up_and_kills_children_that_ignore_sigterm(run, said, processes):
    """The leader's trap writes its marker within the grace; a child that ignores SIGTERM gets SIGKILL."""
    cancel = trio.Event()
    script = "trap 'echo cleaned; exit 0' TERM; (trap '' TERM; exec sleep 60) & echo $!; wait"
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def set_it_when_ready():
            await said.words(1)
            cancel.set()

        result = await run(sh(script), cancel=cancel, on_chunk=said, limits=ExecLimits(term_grace=5))

    assert b"cleaned" in result.stdout
    assert result.stop is StopKind.CANCELLED
    assert result.duration < 4, "the grace ends as soon as the leader has gone"
    await processes.wait_gone(int(result.stdout.split()[0]))


async def test_a_command_that_ignores_sigterm_is_killed_after_the_grace(run, said):
    with trio.move_on_after(60) as scope:
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def cancel_when_ready():
                await said.wait(b"ready")
                scope.cancel()

            await run(sh("trap '' TERM; echo ready; sleep 60; sleep 60"), on_chunk=said)

    assert scope.cancelled_caught


async def test_ambient_cancellation_leaves_nothing_and_goes_on_as_cancelled(run, said, processes):
    """F086: the leader is reaped before the cancelled scope is left; the group is killed (in a rollout: reaped, too)."""
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def cancel_when_ready():
                await said.words(2)
                scope.cancel()

            await run(sh("sleep 600 & echo $$; echo $!; wait"), on_chunk=said)

    assert scope.cancelled_caught
    leader, child = await said.words(2)
    assert not processes.alive(leader)
    assert run is run_captured or not processes.alive(child)
    await processes.wait_gone(child)


async def test_a_scope_that_is_already_cancelled_starts_nothing_that_stays(run):
    with trio.CancelScope() as scope:
        scope.cancel()
        await run(["sleep", "60"])

    assert scope.cancelled_caught


@pytest.mark.parametrize("ticks", range(12))
async def test_cancelled_at_any_tick_of_its_start_nothing_is_left(run, ticks, processes):
    """The call is cancelled ``ticks`` scheduler rounds after its start."""
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def cancel_soon():
                for _ in range(ticks):
                    await trio.lowlevel.checkpoint()
                scope.cancel()

            await run(["sleep", "60"])

    assert scope.cancelled_caught
    assert processes.marked() == []


async def test_a_background_child_that_holds_the_output_is_killed_after_the_drain(run, processes):
    """The prefix is kept, and the stream is not complete."""
    started = time.monotonic()
    result = await run(sh("sleep 60 & echo $!; exit 0"), limits=FAST_DRAIN)

    assert (result.exit_code, result.stop) == (0, StopKind.EXITED)
    assert (result.stdout_complete, result.stderr_complete) == (False, False)
    assert time.monotonic() - started >= 0.2
    await processes.wait_gone(int(result.stdout))


async def test_a_background_child_without_the_output_is_killed_too(run, processes):
    result = await run(sh("sleep 60 >/dev/null 2>&1 & echo $!; exit 0"))

    assert result.stdout_complete
    await processes.wait_gone(int(result.stdout))


async def test_output_beyond_the_cap_is_read_and_thrown_away(run):
    """A writer of 4 MiB is never blocked by a cap of 1 MiB."""
    result = await run([sys.executable, "-c", "import sys; sys.stdout.write('x' * (4 << 20))"], timeout=60)

    assert result.exit_code == 0
    assert len(result.stdout) == len(result.aggregated) == 1 << 20
    assert result.omitted_bytes == 3 << 20
    assert not result.stdout_complete


async def test_death_by_a_signal_is_128_and_the_signal(run):
    result = await run(sh("kill -SEGV $$"))

    assert (result.exit_code, result.signal, result.stop) == (128 + 11, signal.SIGSEGV, StopKind.EXITED)


async def test_a_command_may_itself_return_124(run):
    result = await run(sh("exit 124"))

    assert (result.exit_code, result.timed_out) == (124, False)


async def test_stdin_is_the_null_device(run):
    assert (await run(["cat"])).exit_code == 0


async def test_a_missing_program_is_a_spawn_error_that_blames_the_command(run):
    with pytest.raises(SpawnError, match="nosuchprogram") as caught:
        await run(["nosuchprogram"])

    assert isinstance(caught.value, ToolError)
    assert caught.value.command_is_wrong


async def test_a_missing_directory_is_a_spawn_error_too(run, tmp_path):
    with pytest.raises(SpawnError) as caught:
        await run(["true"], cwd=tmp_path / "nowhere")

    assert caught.value.command_is_wrong


@pytest.mark.parametrize(
    ("argv", "error"), [([], ValueError), ([""], ValueError), (["a\0b"], ValueError), ("ls", TypeError)]
)
async def test_an_argv_that_is_none_is_refused(run, argv, error):
    with pytest.raises(error, match="argv"):
        await run(argv)


async def test_an_error_of_the_callers_callback_comes_out_as_itself_and_ends_the_command(run):
    def refuse(_stream, _chunk):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await run(sh("echo x; exec sleep 60"), on_chunk=refuse)


async def test_nothing_is_read_by_a_shell(run):
    assert (await run(["echo", "$HOME;", "`id`", "*"])).stdout == b"$HOME; `id` *\n"


async def test_the_environment_is_replaced_and_has_nothing_of_the_host(run, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")

    assert b"SECRET" not in (await run(["env"])).stdout
    assert (await run(["env"], env={"A": "1"})).stdout == b"A=1\n"


async def test_bytes_that_are_no_text_reach_the_command_unchanged(run):
    assert (await run(["printf", "%s", b"\xff\xfe"], env={"PATH": "/usr/bin:/bin"})).stdout == b"\xff\xfe"


async def test_umask_descriptors_and_directory_are_explicit(run, tmp_path):
    with (tmp_path / "open").open("w") as ours:
        os.set_inheritable(ours.fileno(), True)  # ruff: ignore[boolean-positional-value-in-call]
        result = await run(sh("umask; pwd; ls /proc/self/fd | wc -l; touch made"), cwd=tmp_path)

    assert result.stdout.split() == [b"0077", bytes(tmp_path), b"4"]  # 0, 1, 2 and ls's own
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o600


async def test_signals_that_the_host_ignores_work_in_the_command_of_a_rollout():
    """Outside a rollout an ignored SIGINT is inherited, as from any shell; inside it is reset."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        async with open_rollout_tools() as tools:
            result = await tools.run_captured(sh("kill -INT $$; echo survived"))
    finally:
        signal.signal(signal.SIGINT, before)

    assert (result.signal, result.stdout) == (signal.SIGINT, b"")


async def test_commands_may_run_at_the_same_time(run):
    results = []
    async with trio.open_nursery() as nursery:
        for number in range(5):

            @nursery.start_soon
            async def one(number=number):
                results.append((number, (await run(["echo", str(number)])).stdout))

    assert sorted(results) == [(number, f"{number}\n".encode()) for number in range(5)]


async def test_keeping_leftovers_needs_a_rollout():
    with pytest.raises(ValueError, match="needs a rollout"):
        await run_captured(["true"], leftovers=Leftovers.KEEP)


async def test_200_runs_leave_no_descriptor_and_no_child(processes):
    before = processes.descriptors()
    async with trio.open_nursery() as nursery:
        limiter = trio.CapacityLimiter(8)
        for number in range(200):

            @nursery.start_soon
            async def one(number=number):
                async with limiter:
                    await run_captured(["true"] if number % 2 else ["sleep", "60"], timeout=0.05)

    assert (processes.descriptors(), processes.children()) == (before, 0)
