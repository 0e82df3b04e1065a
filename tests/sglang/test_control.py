"""Pause, resume, versions, flush, abort until idle, health: what is sent, what is bounded, who is named."""

from contextlib import suppress

import pytest
import trio

from trio_rollout import Deadlines, PauseMode, SamplingParams, Stop
from trio_rollout.errors import ServerError
from trio_rollout.testing import Fault, Link, Reply, Run, cancel_everywhere

from .helpers import EXPECTED, FIVE, PROMPT, memory_world, sent

LONG = SamplingParams(max_new_tokens=100)


@pytest.mark.parametrize("mode", PauseMode)
async def test_f056_the_mode_goes_out_and_what_runs_fares_as_it_says(autojump_clock, mode):
    """ABORT: the call returns with the tokens it has. RETRACT, IN_PLACE: it goes on after the resume."""
    done = trio.Event()
    async with memory_world([Run(until=done)], ()) as run:
        turns = []

        async def one() -> None:
            turns.append(await run.servers.generate(PROMPT, LONG))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await run.fake.until(lambda: run.fake.in_flight == 1)
            await run.servers.pause(mode)
            assert all(fake.paused for fake in run.fakes)
            assert [sent(fake, "/pause_generation") for fake in run.fakes] == [[{"mode": mode.value}]] * 2
            await trio.sleep(1)
            assert len(turns) == (mode is PauseMode.ABORT)
            done.set()
            await run.servers.resume()
            assert not any(fake.paused for fake in run.fakes)
        assert turns[0].stop is (Stop.ABORT if mode is PauseMode.ABORT else Stop.LENGTH)
        assert len(turns[0].output_ids) == (2 if mode is PauseMode.ABORT else 100)


async def test_f058_nothing_is_sent_into_a_paused_server(autojump_clock):
    async with memory_world((), ()) as run, trio.open_nursery() as nursery:
        await run.servers.pause(PauseMode.RETRACT)
        for _ in range(4):
            nursery.start_soon(run.servers.generate, PROMPT, FIVE)
        await trio.sleep(100)
        assert [fake.generates for fake in run.fakes] == [[], []]
        await run.servers.resume()
        await trio.sleep(0.1)
        assert [len(fake.generates) for fake in run.fakes] == [2, 2]


async def test_f058_a_request_that_is_connecting_when_the_pause_begins_is_not_sent(autojump_clock):
    async with memory_world() as run, trio.open_nursery() as nursery:
        run.net.link = Link(latency=(0.5, 0.5))
        nursery.start_soon(run.servers.generate, PROMPT, FIVE)
        await trio.sleep(0.5)
        await run.servers.pause(PauseMode.RETRACT)
        await trio.sleep(10)
        assert run.fake.generates == []
        await run.servers.resume()
        await run.fake.until(lambda: run.fake.generates)


@pytest.mark.parametrize("action", [Fault.HANG, Reply(status=500, body={"error": "boom"}), Fault.NOT_HTTP])
async def test_f039_a_server_that_cannot_be_paused_is_named_lost_and_resumed_and_the_others_too(autojump_clock, action):
    """Bounded by the control budget; the next pause goes on without it."""
    async with memory_world((), {"/pause_generation": [action]}, ()) as run:
        view = run.servers.under(Deadlines(control=3.0))
        bad = run.fakes[1]
        with pytest.raises(ServerError, match=f"1 of 3.*{bad.url}"):
            await view.pause(PauseMode.RETRACT)
        assert trio.current_time() <= 6
        assert not any(fake.paused for fake in run.fakes)
        assert [len(sent(fake, "/continue_generation")) for fake in run.fakes] == [1, 1, 1]
        assert [server.usable for server in run.servers.statistics().servers] == [True, False, True]
        await view.pause(PauseMode.RETRACT)
        assert [fake.paused for fake in run.fakes] == [True, False, True]
        await view.resume()


async def test_a_lost_server_gets_no_work_back_while_the_window_is_open(autojump_clock):
    async with memory_world((), {"/pause_generation": [Reply(status=500)]}) as run:
        with pytest.raises(ServerError):
            await run.servers.pause(PauseMode.RETRACT)
        await run.servers.pause(PauseMode.RETRACT)
        await trio.sleep(10)  # the probe finds it well
        assert not any(server.usable for server in run.servers.statistics().servers)
        await run.servers.resume()
        await trio.sleep(10)
        assert all(server.usable for server in run.servers.statistics().servers)


@pytest.mark.parametrize("action", [Reply(status=500), Fault.CLOSE, Fault.RESET])
async def test_a_resume_that_fails_is_repeated(autojump_clock, action):
    async with memory_world({"/continue_generation": [action, action, action]}) as run:
        await run.servers.pause(PauseMode.RETRACT)
        await run.servers.resume()
        assert not run.fake.paused
        assert len(sent(run.fake, "/continue_generation")) == 4
        assert run.servers.statistics().servers[0].usable


async def test_a_server_that_cannot_be_resumed_is_named_and_tried_again_for_good(autojump_clock, caplog):
    """Said loudly, with its URL; the others work at once; it comes back when it can be resumed."""
    async with memory_world({"/continue_generation": [Fault.HANG] * 2}, ()) as run:
        view = run.servers.under(Deadlines(control=3.0))
        await view.pause(PauseMode.RETRACT)
        with pytest.raises(ServerError, match=run.fake.url):
            await view.resume()
        assert run.fake.url in caplog.text
        assert [server.usable for server in run.servers.statistics().servers] == [False, True]
        await view.generate(PROMPT, FIVE)
        await trio.sleep(40)
        assert not run.fake.paused
        assert all(server.usable for server in run.servers.statistics().servers)


async def test_a_server_that_died_while_paused_is_no_failure_to_resume(autojump_clock):
    async with memory_world((), ()) as run:
        await run.servers.pause(PauseMode.RETRACT)
        run.host().kill()
        await run.servers.resume()
        assert [server.usable for server in run.servers.statistics().servers] == [False, True]


async def test_a_resume_that_was_cancelled_is_finished_by_the_probe(autojump_clock):
    async with memory_world({"/continue_generation": [Fault.HANG]}) as run:
        await run.servers.pause(PauseMode.RETRACT)
        with trio.move_on_after(1):
            await run.servers.resume()
        await trio.sleep(40)
        assert not run.fake.paused
        assert run.servers.statistics().servers[0].usable


@pytest.mark.parametrize(
    "plan", [(), {"/pause_generation": [Reply(status=500)]}, {"/continue_generation": [Fault.HANG]}]
)
@pytest.mark.parametrize("cancelled", ["pause", "resume"])
def test_cancelled_at_any_step_of_a_window_every_server_is_resumed(plan, cancelled):
    """The pause or the resume is cancelled before any of its steps; afterwards one resume, or the probe, gets them all going."""

    async def scenario(arm):
        async with memory_world(plan, ()) as run:
            with trio.CancelScope() as scope:
                if cancelled == "pause":
                    arm(scope)
                with suppress(ServerError):
                    await run.servers.pause(PauseMode.RETRACT)
            with trio.CancelScope() as scope:
                if cancelled == "resume":
                    arm(scope)
                with suppress(ServerError):
                    await run.servers.resume()
            await trio.sleep(60)
            turns = [await run.servers.generate(PROMPT, FIVE) for _ in range(2)]
            return [fake.paused for fake in run.fakes], [len(fake.generates) for fake in run.fakes], len(turns)

    def check(state, _point):
        assert state == ([False, False], [1, 1], 2)

    sweep = cancel_everywhere(scenario, check)
    assert not sweep.failures, sweep


# --- versions


async def test_versions_are_read_from_every_server(autojump_clock):
    async with memory_world((), ()) as run:
        assert await run.servers.versions() == {"http://fake0:1": None, "http://fake1:1": None}
        run.fakes[1].version = "7"
        assert await run.servers.versions() == {"http://fake0:1": None, "http://fake1:1": 7}
        run.fakes[1].version = "default"
        assert await run.servers.versions() == {"http://fake0:1": None, "http://fake1:1": 0}


async def test_a_server_that_does_not_name_its_version_is_lost(autojump_clock):
    async with memory_world((), {"/model_info": [None, Fault.HANG]}) as run:
        assert await run.servers.under(Deadlines(control=2)).versions() == {"http://fake0:1": None}
        assert trio.current_time() <= 2
        assert not run.servers.statistics().servers[1].usable


async def test_only_servers_at_the_required_version_get_work(autojump_clock):
    """One behind, or ahead, gets none until it names the version; one that never named a number is taken at its word."""
    async with memory_world((), (), ()) as run:
        run.fakes[0].version = "1"
        run.fakes[1].version = "2"
        await run.servers.versions()
        run.servers.require_version(2)
        for _ in range(6):
            await run.servers.generate(PROMPT, FIVE)
        assert [len(fake.generates) for fake in run.fakes] == [0, 3, 3]
        run.servers.require_version(1)
        for _ in range(6):
            await run.servers.generate(PROMPT, FIVE)
        assert [len(fake.generates) for fake in run.fakes] == [3, 3, 6]  # and the second gets none


async def test_a_restarted_server_with_old_weights_gets_no_work_until_it_has_the_new_ones(autojump_clock):
    async with memory_world((), ()) as run:
        for fake in run.fakes:
            fake.version = "3"
        await run.servers.versions()
        run.servers.require_version(3)
        run.host().kill()
        await trio.sleep(10)
        await run.servers.generate(PROMPT, FIVE, affinity="x")
        await run.servers.generate(PROMPT, FIVE)
        run.fake.version = "default"
        run.host().start()
        await trio.sleep(10)
        for _ in range(4):
            await run.servers.generate(PROMPT, FIVE)
        assert run.fake.generates == []
        assert (await run.servers.versions())[run.fake.url] == 0  # it is asked again, so a window can bring it back
        run.fake.version = "4"
        run.fakes[1].version = "4"
        await run.servers.versions()
        run.servers.require_version(4)
        for _ in range(2):
            await run.servers.generate(PROMPT, FIVE)
        assert len(run.fake.generates) == 1


async def test_a_server_whose_answers_name_another_version_is_asked_and_set_aside(autojump_clock):
    """The server restarted so quickly that no request failed."""
    async with memory_world((), ()) as run:
        for fake in run.fakes:
            fake.version = "3"
        await run.servers.versions()
        run.servers.require_version(3)
        run.fake.version = "default"
        turns = [await run.servers.generate(PROMPT, FIVE) for _ in range(2)]
        assert sorted(turn.weight_version for turn in turns) == [0, 3]
        await trio.sleep(5)
        for _ in range(4):
            assert (await run.servers.generate(PROMPT, FIVE)).weight_version == 3


async def test_spans_say_under_which_version_each_token_was_sampled(autojump_clock):
    """An update while a request is retracted splits its tokens."""
    done = trio.Event()
    async with memory_world([Run(until=done, partial=40)]) as run:
        run.fake.version = "1"
        turns = []

        async def one() -> None:
            turns.append(await run.servers.generate(PROMPT, LONG))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await run.fake.until(lambda: run.fake.in_flight == 1)
            await run.servers.pause(PauseMode.RETRACT)
            run.fake.version = "2"
            done.set()
            await run.servers.resume()
        assert turns[0].versions == ((0, 40, 1), (40, 100, 2))
        assert turns[0].weight_version == 2


# --- the rest


async def test_f057_a_flush_is_asked_again_while_the_server_refuses(autojump_clock):
    async with memory_world({"/flush_cache": [Reply(status=400, body=b"Flush cache failed.\n")] * 3}) as run:
        await run.servers.flush_cache()
        assert len(sent(run.fake, "/flush_cache")) == 4


async def test_f057_a_flush_that_never_succeeds_is_an_error_with_the_servers_words(autojump_clock):
    async with memory_world(
        (), lambda seen: Reply(status=400, body=b"busy") if seen.path == "/flush_cache" else None
    ) as run:
        with pytest.raises(ServerError, match=rf"1 of 2 servers.*{run.fakes[1].url}"):
            await run.servers.under(Deadlines(control=3)).flush_cache()
        assert trio.current_time() <= 3


async def test_abort_until_idle_ends_everything(autojump_clock):
    async with memory_world([Run()] * 3, [Run()] * 3) as run:
        turns = []

        async def one() -> None:
            turns.append(await run.servers.generate(PROMPT, FIVE))

        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(one)
            await run.fake.until(lambda: run.fake.in_flight == 3)
            await run.servers.abort_until_idle()
        assert [turn.stop for turn in turns] == [Stop.ABORT] * 6
        assert [fake.in_flight for fake in run.fakes] == [0, 0]


async def test_abort_until_idle_is_bounded(autojump_clock):
    plan = lambda seen: Fault.HANG if seen.path == "/generate" else None
    async with memory_world(plan) as run, trio.open_nursery() as nursery:
        nursery.start_soon(run.servers.generate, PROMPT, FIVE)
        await run.fake.until(lambda: run.fake.in_flight == 1)
        with pytest.raises(ServerError, match="abort until idle"):
            await run.servers.under(Deadlines(control=3)).abort_until_idle()
        nursery.cancel_scope.cancel()


async def test_health_is_readiness_by_url(autojump_clock):
    async with memory_world((), ()) as run:
        assert await run.servers.health() == {"http://fake0:1": True, "http://fake1:1": True}
        run.fakes[1].pause("retract")
        assert await run.servers.health() == {"http://fake0:1": True, "http://fake1:1": False}


async def test_control_calls_never_wait_behind_generation(autojump_clock):
    """Two hundred requests hang; pause, versions and health take no time."""
    async with memory_world(lambda seen: Run() if seen.path == "/generate" else None) as run:
        async with trio.open_nursery() as nursery:
            for _ in range(200):
                nursery.start_soon(run.servers.generate, PROMPT, FIVE)
            await run.fake.until(lambda: run.fake.in_flight == 200)
            began = trio.current_time()
            await run.servers.versions()
            await run.servers.pause(PauseMode.ABORT)
            assert trio.current_time() - began < 0.1
        await run.servers.resume()


async def test_f065_requests_survive_a_server_that_resets_everything_at_each_update(autojump_clock):
    async with memory_world() as run:
        for version in range(1, 6):
            await run.servers.pause(PauseMode.ABORT)
            run.fake.version = str(version)
            await run.servers.versions()
            run.servers.require_version(version)
            await run.servers.resume()
            turn = await run.servers.generate(PROMPT, FIVE)
            assert turn.output_ids.tolist() == EXPECTED
            assert turn.weight_version == version


def test_statistics_and_repr_tell_the_state(autojump_clock):
    async def look() -> None:
        async with memory_world([Run()]) as run, trio.open_nursery() as nursery:
            nursery.start_soon(run.servers.generate, PROMPT, FIVE)
            await run.fake.until(lambda: run.fake.in_flight == 1)
            (server,) = run.servers.statistics().servers
            assert (server.url, server.usable, server.paused, server.in_flight) == (run.fake.url, True, False, 1)
            assert repr(run.servers) == "<SGLangServers 1 of 1 usable, 1 requests, 2 connections>"
            nursery.cancel_scope.cancel()

    trio.run(look, clock=autojump_clock)


async def test_a_pause_that_comes_true_after_its_resume_is_resumed_by_the_probe(autojump_clock):
    """A server that hung carries it out when it wakes up; it was never asked to stay paused."""
    async with memory_world({"/pause_generation": [Fault.HANG]}) as run:
        with pytest.raises(ServerError, match="no answer within"):
            await run.servers.pause(PauseMode.RETRACT)
        assert not run.fake.paused
        run.fake.pause("retract")
        with trio.fail_after(60):
            await run.fake.until(lambda: not run.fake.paused)
            assert (await run.servers.generate(PROMPT, FIVE)).stop is Stop.LENGTH


async def test_a_cancelled_pause_is_awaited_before_the_resume(autojump_clock):
    """They go over two connections: the later one may arrive first, and the server would stay paused."""
    async with memory_world({"/pause_generation": [Fault.DRIP]}) as run:
        began = trio.current_time()
        with trio.move_on_after(0.1) as scope:
            await run.servers.pause(PauseMode.RETRACT)
        assert scope.cancel_called
        assert trio.current_time() - began > 0.5  # the answer has over a hundred bytes, 0.01 s each
        await run.servers.resume()
        assert not run.fake.paused
