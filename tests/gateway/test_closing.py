"""Closing a session, step by step in virtual time: refuse, drain, cancel, and only then the trajectory."""

import math
from contextlib import suppress

import attrs
import psutil
import pytest
import trio

from trio_rollout import Deadlines, EngineSettings, Prompt, Retry, SamplingParams, Stop
from trio_rollout.errors import GenerateError, RolloutError, ServerError, SessionClosed
from trio_rollout.gateway._conversation import Conversation
from trio_rollout.gateway._protocol import Refusal
from trio_rollout.gateway._session import Tombstones
from trio_rollout.gateway._values import ContextLimits, Finish
from trio_rollout.testing import HANG, Fail, FakeServers, Say, cancel_everywhere, run_inline
from trio_rollout.tiny import DATA
from trio_rollout.tokenizer import load_tokenizer

from .virtual import LoneRollout, ask, asks, lone_session, virtual_engine, virtual_gateway


async def test_a_running_turn_may_finish_within_the_drain_time(autojump_clock, nursery):
    async with lone_session(FakeServers(plan=lambda number, prompt: Say(seconds=3))) as (session, _, _):
        nursery.start_soon(ask, session, asks("hello"))
        await trio.testing.wait_all_tasks_blocked()

    assert trio.current_time() == 3
    assert session.trajectory().turns == 1


async def test_what_is_not_done_by_then_is_cancelled_and_not_recorded(autojump_clock, nursery):
    failed = []

    async def hanging(session):
        with pytest.raises(SessionClosed):
            await ask(session, asks("hang"))
        failed.append(trio.current_time())

    servers = FakeServers(plan=lambda number, prompt: Say() if number == 0 else HANG)
    async with lone_session(servers, drain=5) as (session, _, _):
        await ask(session, asks("hello"))
        nursery.start_soon(hanging, session)
        await trio.testing.wait_all_tasks_blocked()

    await trio.testing.wait_all_tasks_blocked()
    assert failed == [6]
    assert servers.aborts == 1
    assert servers.running == 0
    assert session.trajectory().turns == 1


async def test_newcomers_are_refused_while_it_drains_and_reach_no_server(autojump_clock, nursery):
    servers = FakeServers(plan=lambda number, prompt: Say(seconds=2))
    async with lone_session(servers) as (session, _, _):
        nursery.start_soon(ask, session, asks("hello"))
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(session.close)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(SessionClosed):
            await ask(session, asks("late"))

    with pytest.raises(SessionClosed):
        await ask(session, asks("later"))
    assert servers.calls == 1


async def test_a_second_close_is_no_close(autojump_clock):
    async with lone_session() as (session, _, gateway):
        await ask(session, asks("hello"))
        await session.close()
        await session.close()
        assert session.trajectory().turns == 1

    await session.close()
    assert session.trajectory().turns == 1
    assert gateway.statistics().tombstones == 1


async def test_there_is_no_trajectory_before_the_end(autojump_clock):
    async with lone_session() as (session, _, _):
        await ask(session, asks("hello"))
        with pytest.raises(RuntimeError, match="leave the session's block"):
            session.trajectory()


async def test_a_body_that_raises_gets_no_drain(autojump_clock, nursery):
    async def hanging(session):
        with pytest.raises(SessionClosed):
            await ask(session, asks("hang"))

    with pytest.raises(KeyError, match="mine"):
        async with lone_session(FakeServers(plan=lambda number, prompt: HANG)) as (session, servers, _):
            nursery.start_soon(hanging, session)
            await trio.testing.wait_all_tasks_blocked()
            raise KeyError("mine")

    assert trio.current_time() == 0
    assert servers.aborts == 1


async def test_a_client_that_goes_cancels_its_turn(autojump_clock):
    async with lone_session(FakeServers(plan=lambda number, prompt: HANG if number else Say())) as (
        session,
        servers,
        _,
    ):
        await ask(session, asks("hello"))
        with trio.move_on_after(2):
            await ask(session, asks("gone"))
        await trio.testing.wait_all_tasks_blocked()
        assert servers.aborts == 1
        assert session.statistics().running == 0

    assert session.trajectory().turns == 1


async def test_a_turn_that_its_client_left_does_not_count_against_the_cap(autojump_clock):
    """A request that is sent again is the same turn, not a new one."""
    async with lone_session(FakeServers(plan=lambda number, prompt: Say() if number else HANG), max_turns=1) as (
        session,
        _,
        _,
    ):
        with trio.move_on_after(2):
            await ask(session, asks("hello"))
        await trio.testing.wait_all_tasks_blocked()
        await ask(session, asks("hello"))
        with pytest.raises(Refusal, match="turns of this session: the limit is 1"):
            await ask(session, asks("more"))

    assert session.trajectory().turns == 1


async def test_an_undelivered_answer_is_not_recorded(autojump_clock):
    async with lone_session() as (session, _, _):
        await ask(session, asks("hello"))
        with session.turn_for(asks("lost")) as turn:
            await turn.wait_over()

    assert session.trajectory().turns == 1
    assert session.statistics().undelivered == 1


async def test_a_resend_after_a_lost_answer_is_the_same_turn(autojump_clock):
    async with lone_session() as (session, servers, _):
        request = asks("hello")
        with session.turn_for(request) as turn:
            await turn.wait_over()
        again = await ask(session, request)
        assert again is turn
        assert servers.calls == 1
        another = await ask(session, request)
        assert another is not turn

    assert session.statistics().resends == 1
    assert session.trajectory().turns == 2


async def test_a_resend_joins_a_turn_that_still_runs_if_it_has_the_same_key(autojump_clock, nursery):
    """The first connection is half open: the gateway has not noticed yet that the client has gone."""
    async with lone_session(FakeServers(plan=lambda number, prompt: Say(seconds=4))) as (session, servers, _):
        nursery.start_soon(ask, session, asks("hello", key="k"))
        await trio.testing.wait_all_tasks_blocked()
        await ask(session, asks("hello", key="k"))

    assert servers.calls == 1
    assert session.trajectory().turns == 1


async def test_concurrent_turns_are_kept_apart(autojump_clock, nursery):
    async with lone_session(max_concurrent_turns=2, max_waiting_turns=0) as (session, _, _):
        nursery.start_soon(ask, session, asks("title"))
        nursery.start_soon(ask, session, asks("task"))
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(Refusal, match="at once: the limit is 2"):
            await ask(session, asks("third"))

    trajectory = session.trajectory()
    assert trajectory.turns == len(trajectory.segments) == 2


async def test_a_servers_failure_is_no_result_unless_the_agent_recovered(autojump_clock):
    plan = {0: Say(), 1: Fail(ServerError("down")), 2: Say(), 3: Fail(ServerError("down again"))}
    servers = FakeServers(plan=lambda number, prompt: plan[number])
    async with lone_session(servers) as (session, _, _):
        await ask(session, asks("hello"))
        with pytest.raises(ServerError):
            await ask(session, asks("more"))
        await ask(session, asks("more"))
        await session.close()
        assert session.trajectory().turns == 2

    async with lone_session(FakeServers(plan=lambda number, prompt: plan[3 * number])) as (session, _, _):
        await ask(session, asks("hello"))
        with pytest.raises(ServerError):
            await ask(session, asks("more"))
    with pytest.raises(ServerError, match="down again"):
        session.trajectory()


async def test_what_was_asked_is_forgotten_with_its_answer(autojump_clock):
    """The requests of a session together are much larger than its conversation; only stored ones can be continued by id."""
    kept, named = asks("a" * 1000), asks("b" * 1000)
    async with lone_session() as (session, _, _):
        plain = await ask(session, kept)
        first = await ask(session, attrs.evolve(named, store=True))
        assert plain.request.messages == first.request.messages == ()
        more = attrs.evolve(asks("more"), previous=first.id)
        for number in range(256):
            await ask(session, attrs.evolve(more, digest=str(number), store=True))
        for other in (plain.id, "unknown"):
            with pytest.raises(Refusal, match="no such response among its last 256"):
                await ask(session, attrs.evolve(more, previous=other))
        assert len((await ask(session, attrs.evolve(more, digest="once more"))).answer.text)


async def test_a_prompt_that_no_server_takes_is_answered_without_a_request(autojump_clock):
    """A real SGLang refuses a prompt before the context is used up."""
    length = len(Conversation(load_tokenizer(DATA)).place(asks("hello").messages, ()).prompt_ids)
    for longest, calls in ((length, 1), (length - 1, 0)):
        limits = ContextLimits(length=length + 7, longest_prompt=longest)
        async with lone_session(limits=limits) as (session, servers, _):
            turn = await ask(session, attrs.evolve(asks("hello"), max_tokens=100))
            assert servers.calls == calls
            assert (turn.answer.output_tokens > 0) == bool(calls)
            assert calls or turn.answer.finish is Finish.LENGTH


async def test_large_conversations_are_tokenised_beside_the_loop(autojump_clock):
    """Tokenising half a megabyte takes a second, in which no other session would get a token."""
    beside = []

    async def run_sync(fn, /, *args):
        beside.append(fn.__name__)
        return await run_inline(fn, *args)

    large = asks("several words " * 1000)
    async with lone_session(run_sync=run_sync) as (session, servers, _):
        await ask(session, asks("hello"))
        assert beside == []
        await ask(session, large)
        assert await session.count_tokens(large) == len(servers.sent[-1])
        assert beside == ["place", "place"]

    assert session.trajectory().turns == 2


async def test_an_agent_that_said_nothing_is_no_result(autojump_clock):
    async with lone_session() as (session, _, _):
        pass
    with pytest.raises(GenerateError, match="no answer"):
        session.trajectory()


async def test_the_groups_deadline_ends_a_hung_turn_and_its_session(autojump_clock):
    async def generate(prompt, rollout):
        async with rollout.session() as session:
            await ask(session, asks("hang"))
        return session.trajectory()

    settings = EngineSettings(
        samples_per_prompt=2, max_running=2, retry=Retry(max_attempts=1), deadlines=Deadlines(group=7.0)
    )
    servers = FakeServers(plan=lambda number, prompt: HANG)
    async with virtual_engine(generate, servers=servers, settings=settings) as stage:
        with pytest.raises(RolloutError, match="no group was delivered"):
            await anext(stage.engine.batches(1))
        (report,) = stage.engine.quarantined()

    assert report.cause.value == "deadline"
    assert trio.current_time() == 7
    assert servers.aborts == 2


async def test_a_weight_update_in_the_middle_of_a_session_tries_again_with_a_new_one(autojump_clock):
    """The attempt is requeued; its session ends at once, and the next attempt's session has another id."""
    ids = []

    async def generate(prompt, rollout):
        async with rollout.session() as session:
            ids.append((rollout.attempt, session.id))
            await ask(session, asks("one"))
            await ask(session, asks("two"))
        return session.trajectory()

    settings = EngineSettings(samples_per_prompt=1, max_running=1)
    async with virtual_engine(
        generate, servers=FakeServers(plan=lambda number, prompt: Say(seconds=5)), settings=settings
    ) as stage:
        with trio.move_on_after(7):
            await stage.engine.next_batch(1)
        async with stage.engine.weight_update(version=1):
            stage.servers.set_version(1)
        batch = await stage.engine.next_batch(1)
        await batch.ack()

    (trajectory,) = batch.groups[0].trajectories
    assert [attempt for attempt, _ in ids] == [1, 2]
    assert ids[0][1] != ids[1][1]
    assert {span.version for row in trajectory.segments for span in row.versions} == {1}


async def test_with_partial_a_turn_goes_on_and_what_was_streamed_stays_true(autojump_clock):
    shown = []

    async def generate(prompt, rollout):
        async with rollout.session() as session:
            with session.turn_for(asks("one", stream=True)) as turn:
                await turn.wait_over()
                shown.extend(turn.sampled)
                assert turn.error is None
                turn.delivered = True
        return session.trajectory()

    settings = EngineSettings(samples_per_prompt=1, max_running=1, partial=True)
    servers = FakeServers(plan=lambda number, prompt: Say(tokens=None, seconds=8, stop=Stop.LENGTH))
    async with virtual_engine(generate, servers=servers, settings=settings) as stage:
        with trio.move_on_after(4.5):
            await stage.engine.next_batch(1)
        async with stage.engine.weight_update(version=1):
            stage.servers.set_version(1)
        batch = await stage.engine.next_batch(1)

    (row,) = batch.groups[0].trajectories[0].segments
    assert row.response_length == 8
    assert {span.version for span in row.versions} == {0, 1}
    assert shown == row.tokens[-8:].tolist()


async def busy_session(arm):
    """Run a session with a main turn and two concurrent ones; return the servers and the gateway to look at."""
    servers, gateway = FakeServers(plan=lambda number, prompt: Say(seconds=2)), virtual_gateway(drain=1)

    async def helper(session, text):
        with suppress(SessionClosed):
            await ask(session, asks(text))

    with trio.CancelScope() as scope:
        arm(scope)
        opened = gateway.open_session(
            LoneRollout(servers), prompt=Prompt(id="p", text="task"), sampling=SamplingParams()
        )
        async with opened as session, trio.open_nursery() as agents:
            agents.start_soon(helper, session, "title")
            agents.start_soon(helper, session, "sub-agent")
            await ask(session, asks("main"))
    return servers, gateway


def test_cancelled_anywhere_nothing_of_a_session_stays():
    """At every step: no turn runs, no session is open, nothing is left on a server."""

    def check(state, _point):
        servers, gateway = state
        assert servers.running == 0
        assert gateway.statistics().sessions == 0

    cancel_everywhere(busy_session, check, sample=80).require()


async def in_a_row(sessions):
    """Open and close so many sessions of one gateway; return the resident bytes after a fifth and at the end."""
    gateway, sizes = virtual_gateway(tombstones=100, tombstone_seconds=30), []
    for number in range(sessions):
        opened = gateway.open_session(LoneRollout(), prompt=Prompt(id="p", text="task"), sampling=SamplingParams())
        async with opened as session:
            assert gateway.directory.key_of(session.id) == session.api_key
        if number in {sessions // 5, sessions - 1}:
            sizes.append(psutil.Process().memory_info().rss)
    assert gateway.directory.key_of(session.id) == session.api_key, "a late call is told that it is closed"
    assert gateway.statistics().tombstones == min(100, sessions)
    assert gateway.statistics().sessions == 0
    return sizes


async def test_sessions_in_a_row_leave_a_bounded_number_of_tombstones(autojump_clock):
    await in_a_row(300)


@pytest.mark.soak
async def test_a_million_sessions_leak_nothing(autojump_clock):
    early, late = await in_a_row(1_000_000)

    assert late <= early + max(20_000_000, early // 20)


def test_many_tombstones_are_bounded():
    stones = Tombstones(most=4096, seconds=600)
    for number in range(100_000):
        stones.add(str(number), "key", now=number * 0.001)

    assert len(stones) == 4096
    assert stones.key_of("99999", now=100.0) == "key"
    assert stones.key_of("0", now=100.0) is None


def test_tombstones_are_bounded_in_number_and_time():
    stones = Tombstones(most=3, seconds=10)
    for number in range(1000):
        stones.add(str(number), f"key {number}", now=float(number) / 1000)

    assert len(stones) == 3
    assert stones.key_of("999", now=5.0) == "key 999"
    assert stones.key_of("1", now=5.0) is None
    assert stones.key_of("999", now=math.inf) is None
    assert len(stones) == 0
