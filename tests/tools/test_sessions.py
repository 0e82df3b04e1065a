"""Exec sessions by script, in virtual time: store, yields, denials, races. No process is involved."""

import itertools
import signal
from contextlib import asynccontextmanager

import attrs
import pytest
import trio

from trio_rollout import Leftovers
from trio_rollout.errors import ToolError
from trio_rollout.tools import (
    ExecLimits,
    ExecSessionsClosed,
    NetworkGrant,
    ProcessFailed,
    SpawnError,
    StdinClosed,
    UnknownProcessId,
)
from trio_rollout.tools._exec.sessions import open_exec_sessions
from trio_rollout.tools._network import FALLBACK_MESSAGE

from .fake_child import FakeBackend

KEEP = ExecLimits(on_turn_cancel=Leftovers.KEEP)


@attrs.define(eq=False)
class Stage:
    """Sessions over scripted children, each with the lowest free id; their ends; and a policy with prepared grants."""

    backend: FakeBackend = attrs.field(factory=FakeBackend)
    ends: list = attrs.field(factory=list)
    prepared: list = attrs.field(factory=list)
    sessions: object = None

    @asynccontextmanager
    async def open(self, **options):
        options.setdefault("limits", KEEP)
        options.setdefault("on_end", self.ends.append)
        network = self if self.prepared else None
        async with open_exec_sessions(self.backend.spawn, network=network, **options) as self.sessions:
            store = self.sessions._store
            store._draw = lambda first, _: next(n for n in itertools.count(first) if n not in store._reserved)
            yield self.sessions

    def grant(self):
        return self.prepared.pop()

    def prepare(self, **options):
        """Return the grant of the next session. Call this before ``open``."""
        self.prepared.append(NetworkGrant(**options))
        return self.prepared[-1]

    def reserved(self):
        return self.sessions._store._reserved

    def end(self):
        (end,) = self.ends
        return end

    async def start(self, *, yield_time=0.25, **options):
        """Start a session that is alive after its first response; return its id."""
        output = await self.sessions.exec_command(["play"], call_id="call", yield_time=yield_time, **options)
        assert output.alive
        return output.process_id


@pytest.fixture
def stage():
    return Stage()


async def test_a_yield_is_a_success_with_an_id_and_the_process_goes_on(autojump_clock, stage):
    async with stage.open() as sessions:
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def say():
                child = await stage.backend.child()
                child.say(b"early ")

            began = trio.current_time()
            output = await sessions.exec_command(["play"], call_id="c", yield_time=1)
            assert trio.current_time() - began == pytest.approx(1.15, abs=0.01), "the early exit's 0.15 s come before"

        assert (output.output, output.process_id, output.exit_code) == (b"early ", 1000, None)
        child = await stage.backend.child()
        child.say(b"late")
        child.exit(3)
        output = await sessions.poll(1000)

    assert (output.output, output.process_id, output.exit_code) == (b"late", None, 3)
    assert output.call_id == "c", "results belong to the call that started it"


async def test_an_ended_process_that_was_seen_is_unknown(autojump_clock, stage):
    async with stage.open() as sessions:
        process_id = await stage.start()
        (await stage.backend.child()).exit(0)
        assert (await sessions.poll(process_id)).exit_code == 0
        with pytest.raises(UnknownProcessId, match="Unknown process id 1000") as caught:
            await sessions.poll(process_id)
        assert repr(sessions) == "<ExecSessions 0 alive, 0 stored>"

    assert caught.value.process_id == 1000


async def test_a_start_that_fails_frees_its_id(autojump_clock, stage):
    stage.backend.error = SpawnError("no such program", errno=2)
    async with stage.open() as sessions:
        for _ in range(2):
            with pytest.raises(SpawnError, match="Failed to create unified exec process: no such program"):
                await sessions.exec_command(["nope"], call_id="c")
        assert stage.reserved() == set()

    assert stage.ends == []


async def test_cancelled_before_it_is_stored_the_process_dies_and_its_id_is_free(autojump_clock, stage):
    async with stage.open() as sessions:
        with trio.move_on_after(0.1):  # within the early exit's time
            await sessions.exec_command(["play"], call_id="c")
        child = await stage.backend.child()
        assert (child.released, stage.reserved()) == (True, set())


async def test_cancelled_while_it_is_started_nothing_is_left(autojump_clock, stage):
    stage.backend.hold = trio.Event()
    async with stage.open() as sessions:
        with trio.move_on_after(0.1):
            await sessions.exec_command(["play"], call_id="c")
        assert (stage.backend.children, stage.reserved()) == ([], set())


async def test_cancelled_after_it_is_stored_it_can_be_kept(autojump_clock, stage):
    async with stage.open() as sessions:
        with trio.move_on_after(2):
            await sessions.exec_command(["play"], call_id="c")
        child = await stage.backend.child()
        (info,) = sessions.list_processes()
        assert (info.process_id, info.call_id, child.released) == (1000, "c", False)
        child.say(b"still here")
        child.exit(0)
        assert (await sessions.poll(1000)).output == b"still here"

    assert child.released


async def test_what_a_cancelled_call_had_gathered_waits_for_the_next(autojump_clock, stage):
    async with stage.open() as sessions, trio.open_nursery() as nursery:

        @nursery.start_soon
        async def say():
            (await stage.backend.child()).say(b"first ")

        with trio.move_on_after(2):
            await sessions.exec_command(["play"], call_id="c")
        (await stage.backend.child()).say(b"second")

        assert (await sessions.poll(1000)).output == b"first second"


async def test_cancelled_after_it_is_stored_it_dies_inside_rollouts(autojump_clock, stage):
    """F086: the process is dead before the cancelled call ends, by default."""
    async with stage.open(limits=ExecLimits()) as sessions:
        with trio.move_on_after(2):
            await sessions.exec_command(["play"], call_id="c")
        child = await stage.backend.child()
        assert (child.released, sessions.list_processes()) == (True, ())

        await stage.start()
        with trio.move_on_after(2):
            await sessions.poll(1000)
        assert (await stage.backend.child(1)).released


async def test_output_that_a_grandchild_holds_open_is_awaited_for_50_ms(autojump_clock, stage):
    async with stage.open() as sessions:
        process_id = await stage.start()
        child = await stage.backend.child()
        child.say(b"x")
        child.exit(0, close=False)
        began = trio.current_time()
        output = await sessions.poll(process_id)

    assert (output.exit_code, output.output) == (0, b"x")
    assert trio.current_time() - began == pytest.approx(0.05, abs=0.11)  # and the denial's grace


async def test_an_interrupt_is_a_signal_and_a_normal_poll(autojump_clock, stage):
    async with stage.open() as sessions, trio.open_nursery() as nursery:
        process_id = await stage.start()
        child = await stage.backend.child()

        @nursery.start_soon
        async def trap():
            await trio.sleep(0.1)
            child.say(b"trapped")
            child.exit(42)

        output = await sessions.write_stdin(process_id, "\x03")

    assert child.signals[0] == signal.SIGINT
    assert (output.exit_code, output.output) == (42, b"trapped")


async def test_an_ignored_interrupt_leaves_it_stored(autojump_clock, stage):
    async with stage.open() as sessions:
        process_id = await stage.start()
        assert (await sessions.write_stdin(process_id, "\x03")).process_id == process_id
        await sessions.interrupt(process_id)
        assert (await stage.backend.child()).signals == [signal.SIGINT, signal.SIGINT]


async def test_other_input_without_a_terminal_is_refused_and_harms_nothing(autojump_clock, stage):
    message = "stdin is closed for this session; rerun exec_command with tty=true to keep stdin open"
    async with stage.open() as sessions:
        process_id = await stage.start()
        with pytest.raises(StdinClosed, match=message):
            await sessions.write_stdin(process_id, "hello\n")
        assert [info.process_id for info in sessions.list_processes()] == [process_id]


async def test_a_terminal_takes_input_and_the_interrupt_as_a_character(autojump_clock, stage):
    async with stage.open() as sessions:
        process_id = await stage.start(tty=True)
        await sessions.write_stdin(process_id, "hello\n")
        await sessions.interrupt(process_id)
        child = await stage.backend.child()

    assert (child.stdin.written, signal.SIGINT in child.signals) == (b"hello\n\x03", False)
    assert child.command.tty == (24, 80)


async def test_a_write_to_a_terminal_that_broke_is_an_error_unless_the_process_ended(autojump_clock, stage):
    async with stage.open() as sessions:
        process_id = await stage.start(tty=True)
        child = await stage.backend.child()
        child.stdin.broken = True
        with pytest.raises(StdinClosed, match="failed to write to stdin"):
            await sessions.write_stdin(process_id, "x")
        child.exit(5)
        assert (await sessions.write_stdin(process_id, "x")).exit_code == 5


async def test_a_terminal_that_takes_nothing_is_given_up(autojump_clock, stage):
    async with stage.open() as sessions:
        process_id = await stage.start(tty=True)
        (await stage.backend.child()).stdin.full = True
        began = trio.current_time()
        with pytest.raises(StdinClosed):
            await sessions.write_stdin(process_id, "x", yield_time=1)

    assert trio.current_time() - began < 2


async def test_terminate_is_confirmed_and_true_once(autojump_clock, stage):
    async with stage.open() as sessions:
        process_id = await stage.start()
        assert await sessions.terminate_process(process_id) is True
        assert await sessions.terminate_process(process_id) is False
        assert sessions.list_processes() == ()


async def test_a_termination_that_is_not_confirmed_keeps_the_entry(autojump_clock, stage):
    """Codex: ``remote_terminate_confirmed_updates_state_on_success_only``."""
    async with stage.open(limits=attrs.evolve(KEEP, teardown=1)) as sessions:
        process_id = await stage.start()
        child = await stage.backend.child()
        child.stubborn = True
        assert await sessions.terminate_process(process_id) is False
        assert [info.process_id for info in sessions.list_processes()] == [process_id]
        child.exit(0)


async def test_terminating_the_initial_response_leaves_the_entry_to_it(autojump_clock, stage):
    async with stage.open() as sessions, trio.open_nursery() as nursery:

        @nursery.start_soon
        async def terminate():
            await stage.backend.child()
            await trio.sleep(1)
            assert await sessions.terminate_process(1000) is True

        output = await sessions.exec_command(["play"], call_id="c")

    assert (output.exit_code, output.process_id) == (137, None)


async def test_the_flag_of_the_initial_response_is_read_after_the_kill(autojump_clock, stage):
    """Codex: ``terminating_initial_exec_command_rechecks_initial_response_state``."""
    async with stage.open() as sessions, trio.open_nursery() as nursery:

        @nursery.start_soon
        async def terminate():
            child = await stage.backend.child()
            child.stubborn = True
            await trio.sleep(0.2)  # the first response ends while the kill is not confirmed yet
            nursery.start_soon(die_later, child)
            assert await sessions.terminate_process(1000) is True

        async def die_later(child):
            await trio.sleep(1)
            child.stubborn = False
            child.exit(signal_number=9)

        output = await sessions.exec_command(["play"], call_id="c", yield_time=0.25)
        assert output.alive
        await trio.sleep(2)
        assert sessions.statistics().stored == 0


async def test_terminated_while_it_is_polled_the_poll_sees_an_exit(autojump_clock, stage):
    """Codex: ``terminating_during_stdin_poll_returns_exited_response``."""
    async with stage.open() as sessions, trio.open_nursery() as nursery:
        process_id = await stage.start()

        @nursery.start_soon
        async def terminate():
            await trio.sleep(1)
            await sessions.terminate_process(process_id)

        assert (await sessions.poll(process_id)).exit_code == 137


async def test_the_first_denial_ends_the_session_and_its_message_stays(autojump_clock, stage):
    denial = stage.prepare()
    async with stage.open() as sessions, trio.open_nursery() as nursery:

        @nursery.start_soon
        async def deny():
            (await stage.backend.child()).say(b"curl")
            await trio.sleep(1)
            denial.deny("evil.example is not allowed")
            denial.deny("and neither is this")

        with pytest.raises(ProcessFailed, match=r"Unified exec process failed: evil\.example is not allowed"):
            await sessions.exec_command(["play"], call_id="c")
        assert sessions.statistics().stored == 0

    end = stage.end()
    assert (end.exit_code, end.failure) == (-1, "evil.example is not allowed")
    assert end.aggregated == b"curl\nevil.example is not allowed"


@pytest.mark.parametrize(("after", "counts"), [(0.0, True), (0.01, True), (0.15, False)])
async def test_a_denial_just_after_the_exit_still_counts(autojump_clock, stage, after, counts):
    """Codex: ``late_network_denial_grace_observes_cancellation_after_exit``, for the first response and for a poll."""
    for polled in (False, True):
        denial, number = stage.prepare(), len(stage.backend.children)
        async with stage.open() as sessions, trio.open_nursery() as nursery:

            @nursery.start_soon
            async def exit_and_deny(denial=denial, number=number):
                child = await stage.backend.child(number)
                await trio.sleep(3)
                child.exit(0)
                await trio.sleep(after)
                denial.deny()

            output = None
            try:
                if polled:
                    output = await sessions.poll(await stage.start())
                else:
                    output = await sessions.exec_command(["play"], call_id="c")
            except ProcessFailed as error:
                assert FALLBACK_MESSAGE in str(error)  # ruff: ignore[pytest-assert-in-except]

        assert (output is None) == counts
        assert counts or output.exit_code == 0


async def test_a_denial_of_what_exits_at_once_is_told_by_the_call(autojump_clock, stage):
    """Codex: ``failed_initial_end_for_unstored_process_uses_fallback_output``."""
    finished = []
    denial = stage.prepare(on_finish=lambda: finished.append(True))
    async with stage.open() as sessions, trio.open_nursery() as nursery:

        @nursery.start_soon
        async def exit_and_deny():
            (await stage.backend.child()).exit(0)
            denial.deny()

        with pytest.raises(ProcessFailed):
            await sessions.exec_command(["play"], call_id="c")

    assert stage.end().aggregated == FALLBACK_MESSAGE.encode()
    assert finished == [True]


async def test_the_end_of_a_stored_session_is_told_after_the_denials_grace(autojump_clock, stage):
    """Codex: ``exit_watcher_waits_for_late_network_denial_before_classifying_end``."""
    denial = stage.prepare()
    async with stage.open():
        await stage.start()
        (await stage.backend.child()).exit(0)
        began = trio.current_time()
        await trio.sleep(0.01)
        assert stage.ends == []
        denial.deny("no")
        await trio.sleep(0.05)
        assert stage.end().failure == "no"
        assert trio.current_time() - began < 0.1


@pytest.mark.parametrize(("closes", "after"), [(True, 0.0), (False, 0.1)])
async def test_the_end_waits_for_the_output_or_100_ms(autojump_clock, stage, closes, after):
    """Codex: ``streaming_output_finishes_on_close_without_waiting_for_grace``, ``…keeps_grace_as_fallback_without_close``."""
    told = []
    async with stage.open(on_end=lambda _: told.append(trio.current_time())):
        await stage.start()
        began = trio.current_time()
        (await stage.backend.child()).exit(0, close=closes)
        await trio.sleep(1)

    (at,) = told
    assert at - began == pytest.approx(after, abs=0.02)


async def test_one_end_on_every_path(autojump_clock, stage):
    refusal = NetworkGrant()
    refusal.deny()

    async def early(sessions):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(exit_at_once, len(stage.backend.children))
            await sessions.exec_command(["play"], call_id="c")

    async def exit_at_once(number):
        (await stage.backend.child(number)).exit(0)

    async def unpolled(_sessions):
        await stage.start()

    async def polled(sessions):
        await stage.start()
        stage.backend.children[-1].exit(1)
        await trio.sleep(1)
        await sessions.poll(1000)

    async def terminated(sessions):
        await sessions.terminate_process(await stage.start())

    async def denied(sessions):
        with pytest.raises(ProcessFailed):
            await sessions.exec_command(["play"], call_id="c")

    async def cancelled(sessions):
        with trio.move_on_after(0.05):
            await sessions.exec_command(["play"], call_id="c")

    async def one_shot(sessions):
        await sessions.exec_to_completion(["play"], call_id="c", timeout=1)

    for path in (early, unpolled, polled, terminated, denied, cancelled, one_shot):
        stage.ends.clear()
        stage.prepared = [refusal] if path is denied else []
        async with stage.open() as sessions:
            await path(sessions)
        assert len(stage.ends) == 1, path


async def test_a_full_store_evicts_the_least_recently_used_and_kills_it(autojump_clock, stage):
    async with stage.open(limits=attrs.evolve(KEEP, max_processes=3, protected=1)) as sessions:
        ids = [await stage.start() for _ in range(4)]
        await trio.sleep(1)
        listed = [info.process_id for info in sessions.list_processes()]
        assert len(listed) == 3
        assert (ids[0] in listed, stage.backend.children[0].released) == (False, True)
        assert sessions.statistics().evicted == 1


async def test_polls_of_one_session_come_one_after_the_other_and_of_two_do_not(autojump_clock, stage):
    async with stage.open() as sessions:
        first, second = await stage.start(), await stage.start()
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for process_id in (first, first, second):
                nursery.start_soon(sessions.poll, process_id)

        assert trio.current_time() - began == pytest.approx(10, abs=0.1)


async def test_a_poll_that_waited_while_its_id_was_given_to_another_knows_nothing(autojump_clock, stage):
    async with stage.open() as sessions:
        process_id = await stage.start()
        failed = []

        async def poll_too_late():
            with pytest.raises(UnknownProcessId):
                await sessions.poll(process_id)
            failed.append(True)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(sessions.poll, process_id)
            await trio.sleep(1)
            nursery.start_soon(poll_too_late)
            await trio.sleep(1)
            (await stage.backend.child()).exit(0)
            await trio.sleep(0.06)
            assert await stage.start() == process_id

        assert failed == [True]


async def test_a_bug_in_one_session_does_not_end_the_others(autojump_clock, stage):
    async with stage.open() as sessions:
        broken, healthy = await stage.start(), await stage.start()

        def explode(_size):
            raise RuntimeError("a bug")

        stage.backend.children[0].stdout.receive_some = explode
        stage.backend.children[0].say(b"x")
        with pytest.raises(ToolError, match="a bug"):
            await sessions.poll(broken)
        assert (await sessions.poll(healthy)).alive


async def test_leaving_kills_and_reaps_all_and_refuses_new_calls(autojump_clock, stage):
    async with stage.open() as sessions:
        for _ in range(3):
            await stage.start()
    with pytest.raises(ExecSessionsClosed):
        await sessions.exec_command(["play"], call_id="c")

    assert all(child.released and child.closed for child in stage.backend.children)
    assert sessions.statistics().stored == 0


async def test_leaving_gives_the_calls_under_way_their_time_then_ends_them(autojump_clock, stage):
    outputs = []
    async with trio.open_nursery() as nursery:
        async with stage.open(drain_timeout=2) as sessions:
            process_id = await stage.start()

            @nursery.start_soon
            async def poll():
                outputs.append(await sessions.poll(process_id, yield_time=60))

            await trio.sleep(0.1)
            began = trio.current_time()
        left = trio.current_time() - began

    assert left == pytest.approx(2, abs=0.1)
    assert outputs[0].exit_code == 137


async def test_leaving_by_an_error_does_not_drain_and_the_error_comes_out_as_itself(autojump_clock, stage):
    error = KeyError("mine")
    async with trio.open_nursery() as nursery:
        with pytest.raises(KeyError) as caught:
            async with stage.open() as sessions:
                nursery.start_soon(sessions.poll, await stage.start())
                await trio.sleep(0.1)
                began = trio.current_time()
                raise error
        assert trio.current_time() - began < 0.5

    assert caught.value is error


async def test_what_does_not_die_is_counted_and_leaving_is_bounded(autojump_clock, stage):
    began = trio.current_time()
    async with stage.open(limits=attrs.evolve(KEEP, teardown=3)) as sessions:
        await stage.start()
        (await stage.backend.child()).stubborn = True

    assert trio.current_time() - began < 4
    assert sessions.statistics().unreaped == 1


async def test_one_shot_mode_never_leaves_an_id(autojump_clock, stage):
    async with stage.open() as sessions:
        output = await sessions.exec_to_completion(["play"], call_id="c", timeout=60)
        assert (output.exit_code, output.timed_out, output.process_id) == (124, True, None)

        with trio.move_on_after(5):
            await sessions.exec_to_completion(["play"], call_id="c", timeout=60)
        assert stage.backend.children[1].released
        assert (sessions.statistics().stored, stage.reserved()) == (0, set())


async def test_a_listener_that_fails_changes_nothing(autojump_clock, stage, caplog):
    def fail(_end):
        raise OSError("full")

    async with stage.open(on_end=fail):
        assert await stage.start()

    assert "a listener of exec sessions failed" in caplog.text
