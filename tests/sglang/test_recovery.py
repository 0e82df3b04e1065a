"""Servers that are lost, paused or in doubt: late answers, calls that overtake each other, and what the probe and the reaper do."""

from contextlib import suppress

import httpx
import pytest
import trio

from trio_rollout import (
    Deadlines,
    EngineSettings,
    PauseMode,
    SamplingParams,
    SingleTurn,
    Stop,
    open_rollout_engine,
    open_sglang_servers,
)
from trio_rollout.errors import ServerError
from trio_rollout.sglang import ServerSettings
from trio_rollout.sources import IterableSource
from trio_rollout.testing import Fault, Link, Reply, Run, prompts

from .helpers import FIVE, PROMPT, SETTINGS, memory_world, sent

LONG = SamplingParams(max_new_tokens=100)
RESUMING = ServerSettings(vocab_size=1000, resume_at_start=True)


async def one(trajectory):
    return 1.0


async def update_and_use(run, version):
    """A whole window; the servers give answers under the new version after it, and still do a minute later."""
    await run.servers.pause(PauseMode.RETRACT)
    for fake in run.fakes:
        fake.version = str(version)
    assert set((await run.servers.versions()).values()) == {version}
    run.servers.require_version(version)
    await run.servers.resume()
    assert (await run.servers.generate(PROMPT, FIVE)).weight_version == version
    await trio.sleep(60)
    with trio.fail_after(60):
        assert (await run.servers.generate(PROMPT, FIVE)).weight_version == version


# --- a window that begins while the probe resumes a server


async def test_a_window_that_begins_while_the_probe_resumes_a_server_leaves_it_running(autojump_clock):
    """The probe's resume is answered inside the window: the server is paused all the same, and the window's end resumes it."""
    async with memory_world({"/continue_generation": [Fault.DRIP]}) as run:
        run.fake.pause("retract")
        async with open_sglang_servers([run.fake.url], settings=RESUMING, connect=run.net.connect) as late:
            await run.fake.until(lambda: not run.fake.paused)
            await late.pause(PauseMode.RETRACT)
            await trio.sleep(5)
            assert run.fake.paused
            await late.resume()
            assert not run.fake.paused
            with trio.fail_after(60):
                assert (await late.generate(PROMPT, FIVE)).stop is Stop.LENGTH


@pytest.mark.parametrize("moment", range(24))
async def test_a_window_may_begin_at_any_moment_of_a_servers_recovery(autojump_clock, moment):
    """It is paused as long as the window lasts, and not a moment longer, whatever the probe was about to ask."""
    async with memory_world() as run:
        run.fake.pause("retract")
        run.net.link = Link(latency=(0.1, 0.1))
        async with open_sglang_servers([run.fake.url], settings=RESUMING, connect=run.net.connect) as late:
            await trio.sleep(0.05 * moment)
            await late.pause(PauseMode.RETRACT)
            for _ in range(40):
                assert run.fake.paused
                await trio.sleep(0.05)
            await late.resume()
            assert not run.fake.paused
            with trio.fail_after(60):
                assert (await late.generate(PROMPT, FIVE)).stop is Stop.LENGTH


async def test_a_servers_version_that_was_asked_before_it_changed_is_asked_again(autojump_clock):
    """The answer to the first question comes after the update, and is of before it: the server would never get work again."""
    async with memory_world({"/model_info": [None, None, Fault.DRIP]}) as run:
        run.fake.version = "1"
        await run.servers.versions()
        run.servers.require_version(3)
        await run.fake.until(lambda: len(sent(run.fake, "/model_info")) == 3)
        await trio.sleep(0.1)
        run.fake.version = "4"
        run.servers.require_version(4)
        with trio.fail_after(60):
            assert (await run.servers.generate(PROMPT, FIVE)).weight_version == 4


async def test_a_lost_servers_version_that_was_asked_before_it_changed_is_asked_again(autojump_clock):
    async with memory_world({"/model_info": [None, Fault.DRIP], "/pause_generation": [Reply(status=500)]}) as run:
        run.fake.version = "1"
        with pytest.raises(ServerError):
            await run.servers.pause(PauseMode.RETRACT)
        await run.fake.until(lambda: len(sent(run.fake, "/model_info")) == 2)
        await trio.sleep(0.1)
        run.fake.version = "4"
        run.servers.require_version(4)
        with trio.fail_after(60):
            assert (await run.servers.generate(PROMPT, FIVE)).weight_version == 4


async def test_a_server_that_leaves_its_resume_unanswered_is_lost_and_a_window_goes_on_without_it(autojump_clock):
    """Sent then, a pause might be followed by the resume that it had come after."""
    settings = ServerSettings(vocab_size=1000, resume_at_start=True, control=3.0)
    async with memory_world({"/continue_generation": [Fault.HANG]}, ()) as run:
        run.fake.pause("retract")
        urls = [fake.url for fake in run.fakes]
        async with open_sglang_servers(urls, settings=settings, connect=run.net.connect) as late:
            view = late.under(Deadlines(control=10.0))
            await trio.sleep(1)
            await view.pause(PauseMode.RETRACT)
            assert [len(sent(fake, "/pause_generation")) for fake in run.fakes] == [0, 1]
            await view.resume()
            await trio.sleep(40)
            assert [fake.paused for fake in run.fakes] == [False, False]
            assert all(server.usable for server in late.statistics().servers)


async def test_a_server_that_another_client_pauses_is_found_out_by_the_first_request_that_it_does_not_let_go(
    autojump_clock, caplog
):
    """It parks requests without a word and acknowledges no abort; without a look, each request would wait there for its deadline."""
    async with memory_world((), ()) as run:
        run.fake.pause("retract")
        with trio.move_on_after(10) as limit:
            await run.servers.generate(PROMPT, FIVE)
        assert limit.cancelled_caught
        await trio.sleep(1)
        with trio.fail_after(60):
            for _ in range(4):
                await run.servers.generate(PROMPT, FIVE)
        assert [len(fake.generates) for fake in run.fakes] == [1, 4]
        assert run.fake.url in caplog.text
        assert sent(run.fake, "/continue_generation") == []  # the client that paused it has reasons
        run.fake.resume()
        await trio.sleep(5)
        assert all(server.usable for server in run.servers.statistics().servers)


# --- an answer of versions() that is older than a weight update is applied after it


async def test_versions_asked_before_an_update_and_answered_after_it(autojump_clock):
    """One slow server keeps the answers of all back; then they overwrite what the update has brought."""
    async with memory_world((), {"/model_info": [None, None, Fault.DRIP]}) as run, trio.open_nursery() as nursery:
        for fake in run.fakes:
            fake.version = "1"
        await run.servers.versions()
        run.servers.require_version(1)
        nursery.start_soon(run.servers.versions)  # a look by a user
        await trio.sleep(0.1)
        await update_and_use(run, 2)


async def test_a_probes_stale_answer_when_the_required_version_is_the_same_again(autojump_clock):
    """The update repeats the version that was required before (after restore, or after one that failed)."""
    async with memory_world({"/model_info": [None, None, Fault.DRIP]}) as run:
        run.fake.version = "1"
        await run.servers.versions()
        run.servers.require_version(3)
        await run.fake.until(lambda: [s.path for s in run.fake.seen].count("/model_info") == 3)
        await trio.sleep(0.1)
        await update_and_use(run, 3)


# --- a pause that is carried out after its resume


async def test_a_pause_that_is_cancelled_behind_the_probe_remembers_who_owes_an_answer(autojump_clock):
    """One server is being resumed by the probe, another hangs in its pause; the pause is cancelled, then all are resumed."""
    async with memory_world({"/continue_generation": [Fault.DRIP]}, {"/pause_generation": [Fault.HANG]}) as run:
        run.fake.pause("retract")
        urls = [fake.url for fake in run.fakes]
        async with open_sglang_servers(urls, settings=RESUMING, connect=run.net.connect) as late:
            await run.fake.until(lambda: not run.fake.paused)
            view = late.under(Deadlines(control=3.0))
            with trio.move_on_after(0.1), suppress(ServerError):
                await view.pause(PauseMode.RETRACT)
            await view.resume()
            run.fakes[1].pause("retract")  # it wakes up, and does what it was asked
            with trio.fail_after(120):
                for _ in range(4):
                    assert (await late.generate(PROMPT, FIVE)).stop is Stop.LENGTH


@pytest.mark.parametrize("fault", [Fault.RESET, Fault.CLOSE, Fault.NOT_HTTP])
async def test_a_pause_whose_connection_broke_and_that_comes_true_later(autojump_clock, fault):
    """The connection breaks (a balancer restarts), the server runs on and carries the pause out after the resume."""
    async with memory_world({"/pause_generation": [fault, fault]}) as run:
        with pytest.raises(ServerError):
            await run.servers.pause(PauseMode.RETRACT)
        assert not run.fake.paused
        run.fake.pause("retract")
        with trio.fail_after(120):
            assert (await run.servers.generate(PROMPT, FIVE)).stop is Stop.LENGTH


# --- what the lock costs: a call that hangs holds it


async def test_leaving_resumes_a_server_although_the_probes_resume_hangs(autojump_clock):
    async with memory_world({"/continue_generation": [Fault.HANG] * 2}) as run:
        async with open_sglang_servers([run.fake.url], settings=SETTINGS, connect=run.net.connect) as late:
            view = late.under(Deadlines(control=3.0))
            await view.pause(PauseMode.RETRACT)
            with pytest.raises(ServerError):
                await view.resume()
            await trio.sleep(5)  # the probe's hangs
        assert not run.fake.paused


async def test_a_pause_goes_on_without_a_server_that_was_lost_while_it_waited(autojump_clock):
    async with memory_world({"/continue_generation": [Fault.HANG]}, ()) as run:
        run.fake.pause("retract")
        async with open_sglang_servers([f.url for f in run.fakes], settings=RESUMING, connect=run.net.connect) as late:
            await run.fake.until(lambda: run.fake.seen[-1].path == "/continue_generation")
            await late.pause(PauseMode.RETRACT)
            await late.resume()


async def test_the_window_ends_a_hanging_resume_of_the_probe(autojump_clock):
    """Probe's hangs since before the window; the window's own resume never goes out."""
    async with memory_world({"/continue_generation": [Fault.HANG] * 2}, ()) as run:
        view = run.servers.under(Deadlines(control=3.0))
        await view.pause(PauseMode.RETRACT)
        with pytest.raises(ServerError):
            await view.resume()
        await trio.sleep(2)  # the probe's hangs
        await view.pause(PauseMode.RETRACT)
        await view.resume()


async def test_a_pause_does_not_fail_for_the_probes_question_that_hangs(autojump_clock):
    """Resumed, the server is asked whether it is ready, and that answer does not come: no pause is ever sent to it."""
    async with memory_world({"/ready": [None, None, Fault.HANG]}, ()) as run:
        run.fake.pause("retract")
        async with open_sglang_servers([run.fake.url], settings=RESUMING, connect=run.net.connect) as late:
            await run.fake.until(lambda: [s.path for s in run.fake.seen].count("/ready") == 3)
            view = late.under(Deadlines(control=3.0))
            run.fake.resume()  # so that a pause shows
            await view.pause(PauseMode.RETRACT)
            assert run.fake.paused
            await view.resume()


# --- a pause after a resume that was cancelled before its answer


async def test_a_pause_after_a_cancelled_resume_pauses_the_server_that_samples(autojump_clock):
    """The resume was carried out, its answer is slow; the next window's body would push weights while the server samples."""
    async with memory_world({"/generate": [Run()], "/continue_generation": [Fault.DRIP]}) as run:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run.servers.generate, PROMPT, SamplingParams(max_new_tokens=100))
            await run.fake.until(lambda: run.fake.in_flight == 1)
            await run.servers.pause(PauseMode.RETRACT)
            with trio.move_on_after(0.1):
                await run.servers.resume()
            assert not run.fake.paused
            await run.servers.pause(PauseMode.RETRACT)
            paused = run.fake.paused
            await run.servers.resume()
            nursery.cancel_scope.cancel()
        assert paused


# --- a server that was lost before the window and comes back inside it, with its old weights


async def test_a_lost_server_that_comes_back_inside_the_window_does_not_fail_the_update(autojump_clock):
    async with memory_world((), ()) as run:
        for fake in run.fakes:
            fake.version = "1"
        async with open_rollout_engine(
            IterableSource(prompts(400)),
            SingleTurn(SamplingParams(max_new_tokens=4)),
            servers=run.servers,
            reward=one,
            settings=EngineSettings(samples_per_prompt=2, max_running=8, max_ready=4),
        ) as engine:
            await engine.next_batch(4)
            run.host(run.fakes[1]).kill()
            while all(server.usable for server in run.servers.statistics().servers):
                await engine.next_batch(1)
            async with engine.weight_update(version=2, mode=PauseMode.RETRACT):
                run.fake.version = "2"  # the trainer pushes to those that are there
                run.fakes[1].version = "default"
                run.host(run.fakes[1]).start()
                await trio.sleep(5)
            with trio.fail_after(60):
                await engine.next_batch(4)


# --- aborts owed to a server that is resumed while it counts as lost


@pytest.mark.parametrize("how", ["resumed by the probe", "its version came too late"])
async def test_debts_are_paid_to_a_server_that_was_lost_when_it_was_resumed(autojump_clock, how):
    plan = {"/generate": [Run()]}
    if how == "resumed by the probe":
        plan["/continue_generation"] = [Fault.HANG]
    else:
        plan["/model_info"] = [None, Fault.HANG]
    async with memory_world(plan) as run:
        view = run.servers.under(Deadlines(abort=1.0, control=3.0))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(view.generate, PROMPT, FIVE)
            await run.fake.until(lambda: run.fake.in_flight == 1)
            await view.pause(PauseMode.RETRACT)
            run.fake.disconnect_s = 1e6  # runs on: SGLang under load notices no closed socket
            nursery.cancel_scope.cancel()
        assert run.servers.statistics().owed_aborts == 1
        await view.versions()
        with suppress(ServerError):
            await view.resume()
        await trio.sleep(60)
        assert run.servers.statistics().servers[0].usable
        counts = run.servers.statistics()
        assert (run.fake.in_flight, counts.orphans, counts.owed_aborts) == (0, 0, 0)


# --- one silent server holds up the probe's next round for all others


def hung(seen):
    return Fault.HANG if seen.path in {"/ready", "/model_info"} and seen.time > 0 else None


async def test_a_silent_lost_server_does_not_keep_the_others_from_being_asked_for_their_version(autojump_clock):
    async with memory_world((), hung) as run:
        for fake in run.fakes:
            fake.version = "1"
        await run.servers.versions()
        run.servers.require_version(1)
        await trio.sleep(1)
        await run.servers.under(Deadlines(control=1.0)).versions()  # the second is silent: lost
        await trio.sleep(1)
        run.fake.version = "2"
        run.servers.require_version(2)  # as note_weight_version does
        with trio.fail_after(10):
            assert (await run.servers.generate(PROMPT, FIVE)).weight_version == 2


async def test_the_trainer_is_not_told_that_only_an_update_helps_before_the_servers_were_asked(autojump_clock):
    async with memory_world((), hung) as run:
        for fake in run.fakes:
            fake.version = "1"
        await run.servers.versions()
        async with open_rollout_engine(
            IterableSource(prompts(400)),
            SingleTurn(SamplingParams(max_new_tokens=4)),
            servers=run.servers,
            reward=one,
            settings=EngineSettings(samples_per_prompt=2, max_running=8, max_ready=4),
        ) as engine:
            await trio.sleep(1)
            await run.servers.under(Deadlines(control=1.0)).versions()
            await trio.sleep(0.1)
            run.fake.version = "2"
            await engine.note_weight_version(2)
            for _ in range(20):
                await engine.next_batch(4)


# --- one silent server holds up the payment of what is owed to all others


async def owe(run, fake):
    """Leave one request on this server inside a window."""
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(run.servers.generate, PROMPT, LONG)
        await run.fakes[1].until(lambda: run.fakes[1].in_flight == 1)
        await run.servers.pause(PauseMode.RETRACT)
        nursery.cancel_scope.cancel()


async def test_a_silent_server_does_not_keep_the_others_debts_from_being_paid(autojump_clock):
    def silent(seen):
        if seen.path in {"/abort_request", "/v1/loads"}:
            return Fault.HANG
        return Run() if seen.path == "/generate" else None

    async with memory_world(silent, [Run(), Run()]) as run:
        for fake in run.fakes:
            fake.disconnect_s = 1e6
        await owe(run, run.fakes[1])
        await run.servers.resume()
        await trio.sleep(8)
        assert run.fakes[1].in_flight == 0
        await owe(run, run.fakes[1])
        await run.servers.resume()
        await trio.sleep(5)
        assert run.fakes[1].in_flight == 0


# --- httpx_transport: a request that is connecting when the pause begins


async def test_a_request_of_the_transport_that_is_connecting_when_the_pause_begins_is_not_sent(autojump_clock):
    async with memory_world() as run, trio.open_nursery() as nursery:
        run.net.link = Link(latency=(0.5, 0.5))
        client = httpx.AsyncClient(transport=run.servers.httpx_transport(), timeout=None)

        async def ask():
            await client.post(
                "http://servers/generate", json={"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}}
            )

        nursery.start_soon(ask)
        await trio.sleep(0.5)
        await run.servers.pause(PauseMode.RETRACT)
        await trio.sleep(10)
        sent = list(run.fake.generates)
        await run.servers.resume()
        assert len(sent) == 0
