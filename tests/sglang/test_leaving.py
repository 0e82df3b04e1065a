"""Leaving a request without its answer: aborts, their repeats, debts of paused servers, orphans, late answers."""

import itertools
import math
import random
import time

import pytest
import trio

from trio_rollout import Deadlines, PauseMode, Ports
from trio_rollout.errors import ServerError
from trio_rollout.sglang import ServerSettings
from trio_rollout.testing import Fault, Reply, Run, cancel_everywhere

from .helpers import EXPECTED, FIVE, PROMPT, memory_world, socket_world


def aborts_are(*actions):
    """A plan: generate for ever, and these actions for the aborts; afterwards each is obeyed."""

    def plan(seen):
        if seen.path == "/abort_request":
            return actions[seen.number] if seen.number < len(actions) else None
        return Run() if seen.path == "/generate" else None

    return plan


async def cancelled_after(run, seconds=1.0):
    """Generate, cancelled after so long; how many seconds leaving took."""
    with trio.move_on_after(seconds) as scope:
        await run.servers.generate(PROMPT, FIVE)
    assert scope.cancelled_caught
    return trio.current_time() - scope.deadline


async def test_f036_a_cancelled_request_is_aborted_once_and_its_answer_awaited(autojump_clock):
    """Exactly one abort for exactly this request although the parent scope is cancelled; nothing runs when Cancelled goes on."""
    async with memory_world([Run()]) as run:
        assert await cancelled_after(run) < 0.1
        assert run.fake.aborts == run.fake.generates
        assert run.fake.in_flight == 0
        counts = run.servers.statistics()
        assert (counts.orphans, counts.late, counts.owed_aborts, counts.servers[0].in_flight) == (0, 0, 0, 0)


async def test_after_an_acknowledged_abort_the_connection_is_used_again(autojump_clock):
    async with memory_world([Run(), Run(), Run()]) as run:
        for _ in range(3):
            await cancelled_after(run)
        assert run.fake.accepted == 3  # control, generate, abort


async def test_f045_an_ignored_abort_is_repeated_at_most_every_half_second(autojump_clock):
    async with memory_world(aborts_are(Fault.IGNORE, Fault.IGNORE, Fault.IGNORE)) as run:
        assert 1.5 <= await cancelled_after(run) < 1.6
        assert len(run.fake.aborts) == 4
        times = [seen.time for seen in run.fake.seen if seen.path == "/abort_request"]
        assert all(later - earlier >= 0.49 for earlier, later in itertools.pairwise(times))
        assert run.servers.statistics().orphans == 0


async def test_f045_aborts_that_do_nothing_end_in_a_counted_orphan_within_the_budget(autojump_clock):
    """The server says 200 to each abort and goes on: closed and counted when the budget is over."""
    async with memory_world(aborts_are(*[Fault.IGNORE] * 50)) as run:
        assert 4 <= await cancelled_after(run) <= 5
        assert run.servers.statistics().orphans == 1
        assert len(run.fake.aborts) <= 10
        await trio.sleep(10)
        assert run.fake.in_flight == 0


@pytest.mark.parametrize("count", [1, 5])
async def test_each_orphan_is_counted_once(autojump_clock, count):
    async with memory_world(aborts_are(*[Fault.IGNORE] * 500)) as run:
        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(cancelled_after, run)
        assert run.servers.statistics().orphans == count
        await trio.sleep(10)
        await cancelled_after(run)
        assert run.servers.statistics().orphans == count + 1


async def test_a_server_that_ends_the_request_by_itself_leaves_no_orphan(autojump_clock):
    """It never acknowledges, but nothing of ours runs there when we look."""
    async with memory_world(aborts_are(*[Fault.IGNORE] * 50)) as run:
        run.fake.plan = lambda seen: Fault.HANG_IN_BODY if seen.path == "/generate" else None
        await cancelled_after(run)
        assert run.servers.statistics().orphans == 0


async def test_an_orphan_is_counted_when_the_server_does_not_say_what_it_runs(autojump_clock):
    def plan(seen):
        if seen.path == "/v1/loads":
            return Reply(status=404, body={"detail": "Not Found"})
        return aborts_are(*[Fault.IGNORE] * 50)(seen)

    async with memory_world(plan) as run:
        await cancelled_after(run)
        assert run.servers.statistics().orphans == 1


async def test_orphans_of_a_server_that_never_says_what_it_runs_are_not_kept(autojump_clock):
    def plan(seen):
        if seen.path == "/v1/loads":
            return Reply(status=404, body={"detail": "Not Found"})
        return aborts_are(*[Fault.IGNORE] * 500)(seen)

    async with memory_world(plan) as run:
        for _ in range(5):
            await cancelled_after(run)
            await trio.sleep(10)
        assert run.servers.statistics().orphans == 5
        assert len(run.servers._fleet.servers[0].orphans) == 1


async def test_an_orphan_is_counted_when_the_look_hangs_and_the_budget_still_holds(autojump_clock):
    def plan(seen):
        return Fault.HANG if seen.path == "/v1/loads" else aborts_are(*[Fault.IGNORE] * 50)(seen)

    async with memory_world(plan) as run:
        assert await cancelled_after(run) <= 5.001
        assert run.servers.statistics().orphans == 1


async def test_f048_an_abort_that_is_never_answered_does_not_outlast_the_budget(autojump_clock):
    async with memory_world(aborts_are(*[Fault.HANG] * 50)) as run:
        assert await cancelled_after(run) <= 5.001
        assert run.servers.statistics().orphans == 1


async def test_the_budget_is_the_one_of_the_view(autojump_clock):
    async with memory_world(aborts_are(*[Fault.IGNORE] * 50)) as run:
        view = run.servers.under(Deadlines(abort=0.75))
        with trio.move_on_after(1) as scope:
            await view.generate(PROMPT, FIVE)
        assert 0.6 < trio.current_time() - scope.deadline <= 0.7501
        assert run.servers.statistics().orphans == 1


async def test_a_server_that_dies_during_the_wrap_up_leaves_no_orphan(autojump_clock):
    async with memory_world(aborts_are(Fault.HANG)) as run:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancelled_after, run)
            await run.fake.until(lambda: run.fake.aborts)
            run.host().kill()
        assert trio.current_time() < 2
        assert run.servers.statistics().orphans == 0
        assert not run.servers.statistics().servers[0].usable


async def test_aborts_are_bounded_in_connections_and_none_is_left_out(autojump_clock):
    """Two hundred requests cancelled at once: one abort each, over a handful of connections."""
    async with memory_world(lambda seen: Run() if seen.path == "/generate" else None) as run:
        with trio.move_on_after(1):
            async with trio.open_nursery() as nursery:
                for _ in range(200):
                    nursery.start_soon(run.servers.generate, PROMPT, FIVE)
        assert sorted(run.fake.aborts) == sorted(run.fake.generates)
        assert run.fake.in_flight == 0
        assert run.fake.accepted <= 1 + 200 + 8


# --- answers that come all the same


async def test_f047_a_read_answer_is_never_aborted(autojump_clock):
    async with memory_world() as run:
        for _ in range(5):
            with trio.CancelScope() as scope:
                await run.servers.generate(PROMPT, FIVE)
                scope.cancel()
        assert run.fake.aborts == []


async def test_a_complete_answer_that_came_too_late_is_counted(autojump_clock):
    """It finishes while its abort is under way: thrown away, and counted."""
    done = trio.Event()

    def plan(seen):
        if seen.path == "/abort_request":
            done.set()
            return Fault.IGNORE
        return Run(until=done) if seen.path == "/generate" else None

    async with memory_world(plan) as run:
        await cancelled_after(run)
        counts = run.servers.statistics()
        assert (counts.late, counts.orphans) == (1, 0)


def block_until(moment: float) -> None:
    """Hold up the loop, as user code that computes would."""
    while trio.current_time() <= moment:
        time.sleep(0.005)


async def test_an_answer_in_the_socket_beats_a_deadline_that_passed_in_a_stall():
    """The loop was blocked, the answer had come, the deadline has passed: the answer counts."""
    done = trio.Event()
    async with socket_world([Run(until=done)]) as run:
        turn = None
        async with trio.open_nursery() as nursery:

            async def stall() -> None:
                await run.fake.until(lambda: run.fake.in_flight == 1)
                done.set()
                await run.fake.until(lambda: run.fake.in_flight == 0)
                await trio.lowlevel.checkpoint()
                block_until(scope.deadline)

            nursery.start_soon(stall)
            with trio.move_on_after(0.1) as scope:
                turn = await run.servers.generate(PROMPT, FIVE)
        assert turn is not None
        assert turn.output_ids.tolist() == EXPECTED
        assert run.fake.aborts == []


# --- cancelled before the request was out


async def test_cancelled_while_connecting_nothing_was_sent_and_nothing_stays(autojump_clock):
    async with memory_world() as run:
        run.host().partition()
        with trio.move_on_after(1):
            await run.servers.generate(PROMPT, FIVE)
        assert run.fake.generates == []
        assert run.fake.aborts == []
        assert run.servers.statistics().connections == 1


async def test_cancelled_while_sending_there_is_no_abort(autojump_clock):
    """The server has only a part of the request: closing is enough."""
    async with memory_world() as run:

        async def deaf(stream) -> None:
            await trio.sleep_forever()

        run.net.add_host(run.fake.url, deaf)
        with trio.move_on_after(1):
            await run.servers.generate([7] * 300_000, FIVE)
        assert trio.current_time() < 1.1
        assert run.fake.aborts == []
        assert run.servers.statistics().connections == 1


async def test_cancelled_while_waiting_for_a_server_there_is_nothing_to_undo(autojump_clock):
    async with memory_world() as run:
        await run.servers.pause(PauseMode.ABORT)
        with trio.move_on_after(1):
            await run.servers.generate(PROMPT, FIVE)
        await run.servers.resume()
        assert run.fake.generates == []
        assert run.servers.statistics().servers[0].in_flight == 0


# --- paused servers


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_an_abort_that_falls_due_during_a_pause_is_a_debt_and_paid_after_it(autojump_clock, mode):
    """The caller is free at once, the request is aborted after the resume, and nothing of it runs then."""
    async with memory_world([Run()], settings=ServerSettings(vocab_size=1000)) as run:
        run.fake.disconnect_s = 1e9  # only an abort ends it
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancelled_after, run, 10)
            await run.fake.until(lambda: run.fake.in_flight == 1)
            await run.servers.pause(mode)
        assert trio.current_time() <= 10.1
        assert run.fake.aborts == []
        assert run.servers.statistics().owed_aborts == 1
        await run.servers.resume()
        await trio.sleep(2)
        assert run.fake.aborts == run.fake.generates
        assert run.fake.in_flight == 0
        counts = run.servers.statistics()
        assert (counts.owed_aborts, counts.orphans) == (0, 0)


async def test_a_wrap_up_that_is_under_way_ends_when_its_server_is_paused(autojump_clock):
    async with memory_world(aborts_are(*[Fault.IGNORE] * 50)) as run:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancelled_after, run, 1)
            await trio.sleep(2)
            await run.servers.pause(PauseMode.RETRACT)
        assert trio.current_time() < 3
        assert run.servers.statistics().owed_aborts == 1
        await run.servers.resume()


async def test_debts_that_cannot_be_paid_are_orphans(autojump_clock):
    async with memory_world(aborts_are(*[Fault.IGNORE] * 500)) as run:
        run.fake.disconnect_s = 1e9
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(cancelled_after, run, 10)
            await run.fake.until(lambda: run.fake.in_flight == 3)
            await run.servers.pause(PauseMode.RETRACT)
        await run.servers.resume()
        await trio.sleep(30)
        counts = run.servers.statistics()
        assert (counts.owed_aborts, counts.orphans) == (0, 3)


class LongestStep(trio.abc.Instrument):
    """The longest that one task kept the loop, in seconds of its thread's processor time."""

    seconds = 0.0
    began = math.inf

    def before_task_step(self, task):
        self.began = time.thread_time()

    def after_task_step(self, task):
        self.seconds = max(self.seconds, time.thread_time() - self.began)


async def test_f134_to_pay_thousands_of_owed_aborts_never_keeps_the_loop_for_long(autojump_clock):
    """Each step costs the same whatever is owed. With one set of all for each abort, 8,000 of them stopped the loop for seconds."""
    async with memory_world() as run:
        owed = run.servers._fleet.servers[0].owed
        await run.servers.pause(PauseMode.RETRACT)
        for number in range(8000):
            owed.let_stand(owed.add(f"{number:032x}", now=trio.current_time()))
        assert run.servers.statistics().owed_aborts == 8000
        longest = LongestStep()
        trio.lowlevel.add_instrument(longest)
        await run.servers.resume()
        await owed.changed.wait_until(owed.has_tried_debts)
        await trio.sleep(1)
        trio.lowlevel.remove_instrument(longest)
        assert run.servers.statistics().owed_aborts == 0
        assert len(set(run.fake.aborts)) == 8000
        assert 0 < longest.seconds < 0.2


async def test_leaving_the_servers_does_not_wait_for_a_paused_one(autojump_clock):
    async with memory_world([Run()]) as run:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancelled_after, run, 10)
            await run.fake.until(lambda: run.fake.in_flight == 1)
            await run.servers.pause(PauseMode.RETRACT)
        left_at = trio.current_time()
    assert trio.current_time() - left_at < 0.1


# --- everywhere, and often


@pytest.mark.parametrize("actions", [(), (Fault.IGNORE,)], ids=["obeyed", "first ignored"])
@pytest.mark.parametrize("fault", [None, Fault.CHUNKED, Fault.CLOSE])
def test_cancelled_at_any_step_nothing_is_left(actions, fault):
    """Before every single task step of a generate call: afterwards nothing runs, nothing is owed, the next call works."""

    async def scenario(arm):
        done = trio.Event()

        def plan(seen):
            if seen.path == "/abort_request":
                return actions[seen.number] if seen.number < len(actions) else None
            return Run(until=done, fault=fault) if seen.path == "/generate" else None

        async with memory_world(plan, ports=Ports(random=random.Random(1))) as run, trio.open_nursery() as nursery:

            async def finish() -> None:
                await trio.sleep(1)
                done.set()

            nursery.start_soon(finish)
            with trio.CancelScope() as scope:
                arm(scope)
                try:
                    await run.servers.generate(PROMPT, FIVE)
                except ServerError:
                    assert fault is Fault.CLOSE
            counts = run.servers.statistics()
            left = (run.fake.in_flight, counts.orphans, counts.owed_aborts, counts.servers[0].in_flight)
            done.set()
            fault_was, run.fake.plan = run.fake.plan, ()
            turn = await run.servers.generate(PROMPT, FIVE)
            assert fault_was is plan
            return left, turn.output_ids.tolist()

    def check(state, _point):
        assert state == ((0, 0, 0, 0), EXPECTED)

    sweep = cancel_everywhere(scenario, check, seed=1)
    assert not sweep.failures, sweep


@pytest.mark.parametrize("seed", [1])
async def test_f082_hundreds_of_random_cancels_leave_the_sockets_at_their_baseline(seed):
    """20 rounds of 100 requests, each cancelled at a random moment: then all further ones succeed."""
    rng = random.Random(seed)
    settings = ServerSettings(vocab_size=1000, abort=2.0)
    async with socket_world(
        lambda seen: Run(until=go) if seen.path == "/generate" else None, settings=settings, disconnect_s=0.0
    ) as run:
        go = trio.Event()

        async def one(scope: trio.CancelScope) -> None:
            with scope:
                await run.servers.generate(PROMPT, FIVE)

        for _ in range(20):
            go = trio.Event()
            scopes = [trio.CancelScope() for _ in range(100)]
            async with trio.open_nursery() as nursery:
                for scope in scopes:
                    nursery.start_soon(one, scope)
                for scope in rng.sample(scopes, 100):
                    for _ in range(rng.randrange(4)):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()
            assert run.fake.in_flight == 0
        go.set()
        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(run.servers.generate, PROMPT, FIVE)
        counts = run.servers.statistics()
        assert (counts.orphans, counts.owed_aborts, counts.servers[0].in_flight) == (0, 0, 0)
        assert counts.connections <= 100 + 8 + 4
        await run.fake.until(lambda: run.fake.connections <= counts.connections)


async def test_f083_a_half_read_answer_closes_its_connection(autojump_clock):
    async with memory_world([Fault.HANG_IN_BODY]) as run:
        await cancelled_after(run)
        await run.fake.until(lambda: run.fake.connections <= 3)  # for control calls and the abort
        assert (await run.servers.generate(PROMPT, FIVE)).output_ids.tolist() == EXPECTED


async def test_f084_after_a_burst_of_timeouts_the_next_request_works(autojump_clock):
    async with memory_world(lambda seen: Fault.HANG if seen.path == "/generate" and seen.number < 200 else None) as run:
        async with trio.open_nursery() as nursery:
            for _ in range(200):
                nursery.start_soon(cancelled_after, run)
        assert run.servers.statistics().orphans == 200
        assert (await run.servers.generate(PROMPT, FIVE)).output_ids.tolist() == EXPECTED
        assert run.servers.statistics().connections <= 15
