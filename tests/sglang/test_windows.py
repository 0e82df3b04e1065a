"""Windows over servers that refuse a pause, were found paused, restarted with other weights, or are another engine's too."""

import random
from contextlib import asynccontextmanager

import attrs
import pytest
import trio

from trio_rollout import (
    CacheSalt,
    Deadlines,
    EngineSettings,
    PauseMode,
    Retry,
    ServerSettings,
    SingleTurn,
    open_ledger,
    open_rollout_engine,
    open_sglang_servers,
)
from trio_rollout.errors import RequestRejected, ServerError, SettingsError
from trio_rollout.sources import IterableSource
from trio_rollout.testing import Fault, Reply, Run, prompts
from trio_rollout.testing._sim.disk import SimDisk
from trio_rollout.testing._sim.world import SimIO

from .helpers import FIVE, PROMPT, memory_world, sent

MODES = list(PauseMode)
CONTROL_S = 6.0
SETTINGS = EngineSettings(
    samples_per_prompt=2,
    max_running=4,
    max_ready=4,
    retry=Retry(backoff_base=0.01, backoff_max=0.1),
    deadlines=Deadlines(control=CONTROL_S, abort=2.0),
)


async def one(trajectory):
    return 1.0


@asynccontextmanager
async def engine_on(servers, *, disk=None, count=40, settings=SETTINGS):
    """An engine on these servers, with a ledger if there is a disk."""
    arguments = {"servers": servers, "reward": one, "settings": settings}
    if disk is None:
        async with open_rollout_engine(IterableSource(prompts(count)), SingleTurn(FIVE), **arguments) as engine:
            yield engine
        return
    async with (
        open_ledger("sim", disk=disk, io=SimIO(rng=random.Random(1))) as ledger,
        open_rollout_engine(IterableSource(prompts(count)), SingleTurn(FIVE), ledger=ledger, **arguments) as engine,
    ):
        yield engine


async def update(engine, fakes, version, mode=PauseMode.RETRACT, *, names=True):
    """A window that pushes a version to these fakes."""
    async with engine.weight_update(version=version, mode=mode):
        for fake in fakes:
            fake.version = str(version) if names else fake.version


def versions_of(batch):
    return {group.oldest_version for group in batch.groups} | {group.newest_version for group in batch.groups}


# --- F126: weights that the ledger's version does not name


@pytest.mark.parametrize("word", ["default", "base"])
@pytest.mark.parametrize("others", [0, 1])
async def test_f126_servers_that_restarted_with_the_base_model_get_no_work_until_a_window(autojump_clock, word, others):
    """Everything restarts, the ledger is at version 5; what the base model samples must not be called version 5."""
    disk = SimDisk()
    async with memory_world((), ()) as run, engine_on(run.servers, disk=disk) as engine:
        await update(engine, run.fakes, 5)
        assert versions_of(await engine.next_batch(2)) == {5}
    async with memory_world((), ()) as run:
        for fake in run.fakes[others:]:
            fake.version = word
        for fake in run.fakes[:others]:
            fake.version = "5"
        async with engine_on(run.servers, disk=disk) as engine:
            assert engine.weight_version == 5
            for number in range(3):
                if others:
                    await engine.next_batch(4)
                elif number:
                    with pytest.raises(ServerError, match="until a weight update"):
                        await engine.next_batch(20)
            assert [len(fake.generates) for fake in run.fakes[others:]] == [0] * (2 - others)
            await update(engine, run.fakes, 6)
            while 6 not in versions_of(await engine.next_batch(4)):
                pass
            assert all(fake.generates for fake in run.fakes)


async def test_f126_servers_that_never_named_a_number_are_taken_at_the_trainers_word_after_a_restart_too(
    autojump_clock,
):
    disk = SimDisk()
    async with memory_world() as run, engine_on(run.servers, disk=disk) as engine:
        await update(engine, run.fakes, 5, names=False)
        await engine.next_batch(2)
    async with memory_world() as run, engine_on(run.servers, disk=disk) as engine:
        assert versions_of(await engine.next_batch(20)) == {5}


async def test_f126_a_version_that_the_servers_had_at_the_start_is_remembered_with_its_namers(autojump_clock):
    """No window was opened in the first life: its version is what the servers named."""
    disk = SimDisk()
    async with memory_world() as run:
        run.fake.version = "7"
        async with engine_on(run.servers, disk=disk) as engine:
            await engine.next_batch(2)
    async with memory_world() as run, engine_on(run.servers, disk=disk) as engine:
        assert engine.weight_version == 7
        with pytest.raises(ServerError, match="until a weight update"):
            await engine.next_batch(20)
        assert run.fake.generates == []


async def test_f126_a_server_that_says_another_word_after_numbers_gets_no_work_until_a_window(autojump_clock):
    """The same inside one process, for a server whose first weights have a name."""
    async with memory_world((), ()) as run, engine_on(run.servers) as engine:
        await update(engine, run.fakes, 5)
        await engine.next_batch(2)
        run.host().kill()
        await trio.sleep(1)
        run.fake.version = "base"
        run.host().start()
        await trio.sleep(10)
        before = len(run.fake.generates)
        await engine.next_batch(10)
        assert len(run.fake.generates) == before
        await update(engine, run.fakes, 6)
        await engine.next_batch(10)
        assert len(run.fake.generates) > before


# --- F130: two engines on the same servers


@pytest.mark.parametrize("mode", MODES)
async def test_f130_two_engines_on_the_same_servers_have_one_window_at_a_time(autojump_clock, mode):
    async with (
        memory_world((), ()) as run,
        engine_on(run.servers) as first,
        engine_on(run.servers, count=400) as second,
    ):
        await second.next_batch(2)
        async with first.weight_update(version=1, mode=mode):
            before = [len(fake.generates) for fake in run.fakes]
            for _ in range(3):
                with pytest.raises(trio.BusyResourceError, match="another user of these servers"):
                    async with second.weight_update(version=2, mode=mode):
                        raise AssertionError("a second window")
                with pytest.raises(trio.BusyResourceError):
                    await run.servers.resume()
            await trio.sleep(20)
            assert all(fake.paused for fake in run.fakes)
            assert [len(fake.generates) for fake in run.fakes] == before
            for fake in run.fakes:
                fake.version = "1"
        assert not any(fake.paused for fake in run.fakes)
        await first.next_batch(2)
        await second.next_batch(4)
        with pytest.raises(ValueError, match="must be above"):
            await update(second, run.fakes, 1, mode)
        await update(second, run.fakes, 2, mode)
        for engine in (first, second):
            while 2 not in versions_of(await engine.next_batch(2)):
                pass


@pytest.mark.parametrize("names", [True, False])
async def test_f130_the_second_engine_starts_at_the_version_of_the_servers(autojump_clock, names):
    """Its ledger knows an older one; required again, that would leave the first engine without a server."""
    disk = SimDisk()
    async with memory_world() as run, engine_on(run.servers, disk=disk) as engine:
        await update(engine, run.fakes, 2, names=names)
        await engine.next_batch(2)
    async with memory_world() as run, engine_on(run.servers, count=400) as first:
        await update(first, run.fakes, 5, names=names)
        await first.next_batch(4)
        async with engine_on(run.servers, disk=disk) as second:
            assert second.weight_version == 5
            assert 5 in versions_of(await second.next_batch(8))
            assert versions_of(await first.next_batch(8)) == {5}
    async with memory_world() as run:
        run.fake.version = "5" if names else "default"
        async with engine_on(run.servers, disk=disk) as engine:
            assert engine.weight_version == 5


# --- F138: a server that can't be paused


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("refusal", [Reply(status=500), Reply(status=400), Fault.NOT_HTTP, Fault.RESET, Fault.HANG])
async def test_f138_a_server_that_refuses_to_be_paused_is_left_out_until_it_has_new_weights(
    autojump_clock, refusal, mode
):
    plan = lambda seen: refusal if seen.path == "/pause_generation" else None
    async with memory_world((), plan) as run, engine_on(run.servers, count=400) as engine:
        good, bad = run.fakes
        await update_with(engine, run.servers, good, bad, mode)
        await engine.next_batch(4)
        await trio.sleep(20)
        assert bad.generates, "it had been brought to the version, so it works again"
        await update_with(engine, run.servers, good, bad, mode, version=2)


async def update_with(engine, servers, good, bad, mode, version=1):
    """The first try raises, the next goes on without the bad server, which works once a window has brought it the version."""
    with pytest.raises(ServerError, match=bad.url):
        async with engine.weight_update(version=version, mode=mode):
            raise AssertionError("the body ran")
    await trio.sleep(20)  # the probe finds it well
    before = len(bad.generates)
    await engine.next_batch(4)
    assert [server.usable for server in servers.statistics().servers] == [True, False]
    assert len(bad.generates) == before
    pauses = len(sent(bad, "/pause_generation"))
    async with engine.weight_update(version=version, mode=mode):
        assert good.paused
        good.version = bad.version = str(version)
    assert len(sent(bad, "/pause_generation")) == pauses
    await trio.sleep(5)
    assert [server.usable for server in servers.statistics().servers] == [True, True]


async def test_f138_a_server_that_refused_and_got_no_new_weights_blocks_no_later_update(autojump_clock):
    plan = lambda seen: Reply(status=500) if seen.path == "/pause_generation" else None
    async with memory_world((), plan) as run, engine_on(run.servers, count=400) as engine:
        good, bad = run.fakes
        bad.version = "0"
        with pytest.raises(ServerError, match=bad.url):
            await update(engine, [good], 1)
        for version in range(1, 4):
            await update(engine, [good], version)
            await trio.sleep(20)
            before = len(bad.generates)
            await engine.next_batch(4)
            assert len(bad.generates) == before


async def test_f138_the_only_server_refuses_and_the_trainer_is_told(autojump_clock):
    plan = lambda seen: Reply(status=500) if seen.path == "/pause_generation" else None
    async with memory_world(plan) as run, engine_on(run.servers, count=400) as engine:
        with pytest.raises(ServerError, match=run.fake.url):
            await update(engine, run.fakes, 1)
        with pytest.raises(ServerError, match="could not be paused"):
            await engine.next_batch(40)
        await update(engine, run.fakes, 1)
        assert 1 in versions_of(await engine.next_batch(40))


# --- F140b: servers that a killed run has left paused


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("left", MODES)
@pytest.mark.parametrize("pushed", [True, False])
async def test_f140b_a_window_takes_over_servers_that_were_found_paused(autojump_clock, left, mode, pushed):
    """Killed inside a window: with default settings the next run's first window brings them back."""
    disk = SimDisk()
    async with memory_world((), ()) as run, engine_on(run.servers, disk=disk) as engine:
        await update(engine, run.fakes, 1)
        await engine.next_batch(2)
    async with memory_world([Run()] * 2, ()) as run:
        for fake in run.fakes:
            fake.version = "2" if pushed else "1"
        async with trio.open_nursery() as killed:  # its requests run on
            for _ in range(4):
                killed.start_soon(run.servers.generate, PROMPT, FIVE)
            await run.fake.until(lambda: run.fake.in_flight == 2)
            for fake in run.fakes:
                fake.pause(left.value)
            async with reopened(run) as servers, engine_on(servers, disk=disk) as engine:
                version = max(engine.weight_version, 2 if pushed else 0) + 1
                assert not any(server.usable for server in servers.statistics().servers)
                async with engine.weight_update(version=version, mode=mode):
                    assert [fake.mode for fake in run.fakes] == [mode.value] * 2
                    for fake in run.fakes:
                        fake.version = str(version)
                with trio.fail_after(60):
                    while version not in versions_of(await engine.next_batch(4)):
                        pass
                assert not any(fake.paused for fake in run.fakes)
                assert all(server.usable for server in servers.statistics().servers)
            killed.cancel_scope.cancel()


@asynccontextmanager
async def reopened(run, **changes):
    """A second client of the same fake servers, as a new process has."""
    settings = ServerSettings(vocab_size=1000, **changes)
    urls = [fake.url for fake in run.fakes]
    async with open_sglang_servers(urls, settings=settings, connect=run.net.connect) as servers:
        yield servers


async def test_f140b_a_trainer_that_waits_for_servers_that_were_found_paused_is_told(autojump_clock):
    async with memory_world((), ()) as run:
        for fake in run.fakes:
            fake.pause("retract")
        async with reopened(run) as servers, engine_on(servers) as engine:
            for call in (engine.next_batch, lambda n: engine.evaluate(IterableSource(prompts(n)))):
                with (
                    trio.fail_after(60),
                    pytest.raises(ServerError, match=r"(?s)until a weight update.*not ready at the start"),
                ):
                    await call(2)
            run.fake.resume()  # the client that had paused it goes on
            await trio.sleep(5)
            with trio.fail_after(60):
                assert len((await engine.next_batch(2)).groups) == 2


@pytest.mark.parametrize("refusal", [Reply(status=500), Fault.RESET, Fault.HANG])
async def test_f140b_a_server_that_is_not_ready_and_refuses_to_be_paused_holds_up_no_window(autojump_clock, refusal):
    """It was lost before the window, so the window loses nothing by going on without it."""
    plan = lambda seen: refusal if seen.path == "/pause_generation" else None
    async with memory_world((), plan) as run:
        run.fakes[1].pause("retract")
        async with reopened(run) as servers, engine_on(servers) as engine:
            await update(engine, run.fakes, 1)
            assert 1 in versions_of(await engine.next_batch(4))
            await trio.sleep(10)
            assert not run.fakes[1].paused
            assert all(server.usable for server in servers.statistics().servers)


async def test_f140b_a_pause_of_another_client_later_is_left_alone(autojump_clock):
    """Only what was found paused at the start is taken over: an operator's pause of one server outlasts our windows."""
    async with memory_world((), ()) as run, engine_on(run.servers, count=400) as engine:
        await engine.next_batch(4)
        run.fake.pause("retract")
        await trio.sleep(700)
        assert not run.servers.statistics().servers[0].usable
        await update(engine, run.fakes, 1)
        await engine.next_batch(4)
        assert run.fake.paused
        assert sent(run.fake, "/continue_generation") == []


# --- F140f: the cache salt is the version under which a request is sent


def salts(fake):
    return [seen.body.get("cache_salt") for seen in fake.seen if seen.path == "/generate"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
async def test_f140f_every_request_is_salted_with_the_version_that_is_current_when_it_is_sent(
    autojump_clock, mode, partial, streamed
):
    """Turns that waited out a window, continuations, and those that begin after it; ``rollout.weight_version`` was read before."""
    seen = []

    async def generate(prompt, rollout):
        turns = []
        for _ in range(3):
            before = rollout.weight_version
            turn = await rollout.generate(rollout.input, on_tokens=seen.append if streamed else None)
            turns.append(turn)
            seen.append(before)
            await trio.sleep(3)
        return rollout.finish(turns)

    hold = trio.Event()
    plan = lambda seen: Run(until=hold, partial=2) if seen.path == "/generate" and seen.number in {1, 2} else None
    settings = attrs.evolve(SETTINGS, partial=partial)
    async with (
        memory_world(plan) as run,
        open_rollout_engine(
            IterableSource(prompts(4)), generate, servers=run.servers, reward=one, settings=settings
        ) as engine,
    ):
        await run.fake.until(lambda: run.fake.in_flight == 2)
        await trio.sleep(10)
        assert set(salts(run.fake)) == {"0"}
        before = len(salts(run.fake))
        async with engine.weight_update(version=7, mode=mode):
            run.fake.version = "7"
            await trio.sleep(30)
            assert len(salts(run.fake)) == before
        hold.set()
        batch = await engine.next_batch(4)
        assert set(salts(run.fake)[before:]) == {"7"}
        assert len(batch.groups) == 4


@pytest.mark.parametrize("salt", [CacheSalt.VERSION, CacheSalt.NONE])
async def test_f140f_a_salt_of_the_callers_stays_a_part_of_it(autojump_clock, salt):
    given = [attrs.evolve(prompt, extra={"cache_salt": f"mine/{prompt.id}"}) for prompt in prompts(2)]
    settings = ServerSettings(vocab_size=1000, cache_salt=salt)
    async with (
        memory_world(settings=settings) as run,
        open_rollout_engine(IterableSource(given), SingleTurn(FIVE), servers=run.servers, settings=SETTINGS) as engine,
    ):
        await engine.next_batch(2)
        own = {"mine/p0", "mine/p1"}
        assert set(salts(run.fake)) == ({f"0@{one}" for one in own} if salt is CacheSalt.VERSION else own)
    with pytest.raises((SettingsError, TypeError)):
        ServerSettings(cache_salt="version")


async def test_f140f_without_a_required_version_nothing_is_salted(autojump_clock):
    """A client that is used alone says nothing of versions."""
    async with memory_world() as run:
        await run.servers.generate(PROMPT, FIVE)
        await run.servers.generate(PROMPT, FIVE, extra={"cache_salt": "x"})
        assert salts(run.fake) == [None, "x"]
        with pytest.raises(RequestRejected, match="cache_salt"):
            await run.servers.generate(PROMPT, FIVE, extra={"cache_salt": 3})


# --- F139: rules of the client that no other test would miss


@pytest.mark.parametrize("count", [1, 3])
async def test_f139_an_orphan_is_counted_once_however_often_it_is_seen(autojump_clock, count):
    """It still runs when others are left whose answers come too slowly: they have ended, and the looks at them see it again."""
    async with memory_world([*[Fault.HANG] * count, *[Fault.DRIP] * 2 * count]) as run:
        servers = run.servers.under(Deadlines(abort=1.0))
        run.fake.disconnect_s = 1000.0

        async def left():
            with trio.move_on_after(0.5):
                await servers.generate(PROMPT, FIVE)

        for _ in range(3):
            async with trio.open_nursery() as nursery:
                for _ in range(count):
                    nursery.start_soon(left)
            assert servers.statistics().orphans == count
        assert run.fake.in_flight == count


async def test_f139_a_session_leaves_its_server_while_that_is_full(autojump_clock):
    """Its cached prefix is worth less than a place."""
    busy = Reply(status=503, headers={"retry-after": "20"})
    plan = lambda seen: busy if seen.path == "/generate" and 1 <= seen.number <= 3 else None
    async with memory_world(plan, ()) as run:
        for _ in range(4):
            await run.servers.generate(PROMPT, FIVE, affinity="session")
        assert [len(fake.generates) for fake in run.fakes] == [2, 3]
        assert trio.current_time() < 1


@pytest.mark.parametrize(("asked", "number"), [("/ready", 2), ("/model_info", 4)])
async def test_f139_a_probes_answer_of_before_a_window_is_not_believed_after_it(autojump_clock, asked, number):
    """It says that the server has the old weights; believed, the server would get no work."""
    slow = {asked: [*[None] * (number - 1), Fault.DRIP]}
    async with memory_world(slow, ()) as run, engine_on(run.servers, count=400) as engine:
        await update(engine, run.fakes, 1)
        run.host().kill()
        await trio.sleep(2)
        run.host().start()
        with trio.fail_after(60):
            await run.fake.until(lambda: len(sent(run.fake, asked)) >= number)
        await update(engine, run.fakes, 2)
        before = len(run.fake.generates)
        await trio.sleep(30)
        await engine.next_batch(20)
        assert len(run.fake.generates) > before
        assert all(server.usable for server in run.servers.statistics().servers)
