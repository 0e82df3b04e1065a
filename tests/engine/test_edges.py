"""The engine's edges: windows left elsewhere, foreign errors, versions half written, refused takes, stalls that grow."""

import logging
import random
import sys
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import attrs
import pytest
import trio

from trio_rollout import (
    Cause,
    Discard,
    PauseMode,
    Staleness,
    open_ledger,
)
from trio_rollout.errors import EngineClosed, LedgerError, RolloutError, ServerError, SettingsError, SourceError
from trio_rollout.sources import IterableSource
from trio_rollout.testing import HANG, FakeServers, Say, prompts
from trio_rollout.testing._sim.disk import SimDisk, disk_full_from
from trio_rollout.testing._sim.world import SimIO

from .conftest import one, settings, take_all, world
from .test_leaving import Remembering

MODES = list(PauseMode)


def ledger_on(disk):
    return open_ledger("sim", disk=disk, io=SimIO(rng=random.Random(1)))


@attrs.define
class Told:
    """An instrument that keeps what it is told."""

    events: list = attrs.field(factory=list)

    def event(self, event):
        self.events.append(event)


# --- F128: windows that are left in another task


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fails", [False, True])
async def test_f128_a_window_may_be_left_in_another_task(mode, fails):
    """Twice, and what the tasks around it are afterwards: inside no window."""
    async with world(8) as w:
        for version in (1, 2):
            stack = AsyncExitStack()

            async def enter(stack=stack, version=version):
                await stack.enter_async_context(w.engine.weight_update(version=version, mode=mode))
                w.servers.set_version(version)

            async def leave(stack=stack):
                if not fails:
                    await stack.aclose()
                elif await stack.__aexit__(OSError, OSError("push"), None):
                    raise AssertionError("the body's exception was swallowed")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(enter)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(leave)
            assert w.servers.paused is None
            assert w.engine.weight_version == (0 if fails else version)
            assert len((await w.engine.next_batch(2)).groups) == 2
        await stack.aclose()
        assert len(await take_all(w.engine)) == 4


async def test_f128_a_window_that_is_entered_here_and_left_elsewhere_leaves_this_task_outside():
    async with world(6) as w:
        manager = w.engine.weight_update(version=1)
        await manager.__aenter__()  # noqa: PLC2801  it is left elsewhere
        w.servers.set_version(1)
        with pytest.raises(RuntimeError, match="weight_update block"):
            await w.engine.next_batch(6)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(manager.__aexit__, None, None, None)
        assert len((await w.engine.next_batch(6)).groups) == 6


# --- F129: the user's own servers raise other errors


class Own(FakeServers):
    """Servers of a user, of which one call raises."""

    broken = ()

    async def pause(self, mode):
        self._check("pause")
        await super().pause(mode)

    async def resume(self):
        await super().resume()
        self._check("resume")

    async def versions(self):
        self._check("versions")
        return await super().versions()

    def require_version(self, version, **more):
        super().require_version(version, **more)
        self._check("require_version")

    def _check(self, call):
        if call in self.broken:
            raise self.broken[call]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("error", [OSError("no route"), ExceptionGroup("all", [OSError("no route"), ValueError("x")])])
@pytest.mark.parametrize("call", ["pause", "resume", "versions", "require_version"])
async def test_f129_an_error_of_the_users_servers_closes_no_gate(caplog, call, error, mode):
    """That of resume() is reported; those of the others come out of the window, and the next window works."""
    told = Told()
    async with world(6, servers=Own(), instruments=[told]) as w:
        w.servers.broken = {call: error}
        raised = None
        try:
            async with w.engine.weight_update(version=1, mode=mode):
                w.servers.set_version(1)
        except (OSError, ExceptionGroup) as one_of_them:
            raised = one_of_them
        w.servers.broken = ()
        assert raised is (None if call == "resume" else error)
        assert ("no route" in caplog.text) == (call == "resume")
        assert w.engine.weight_version == (1 if call in {"resume", "require_version"} else 0)
        with trio.fail_after(100):
            first = await w.engine.next_batch(2)
            async with w.engine.weight_update(version=2, mode=mode):
                w.servers.set_version(2)
            assert len([*first.groups, *await take_all(w.engine)]) == 6


async def test_f129_a_log_handler_that_raises_closes_no_gate():
    """The report of the error of resume() fails too."""

    class Raising(logging.Handler):
        def emit(self, record):
            raise RuntimeError("the log is broken")

    handler = Raising()
    async with world(6, servers=Own()) as w:
        w.servers.broken = {"resume": OSError("no route")}
        logging.getLogger("trio_rollout").addHandler(handler)
        try:
            with suppress(RuntimeError):
                async with w.engine.weight_update(version=1):
                    w.servers.set_version(1)
        finally:
            logging.getLogger("trio_rollout").removeHandler(handler)
        with trio.fail_after(100):
            assert len(await take_all(w.engine)) == 6


# --- F131: one ledger, two engines


@pytest.mark.parametrize("count", [4, 400])
async def test_f131_a_second_engine_on_an_open_ledger_is_refused_while_the_first_is_open(count):
    disk, source = SimDisk(), IterableSource(prompts(count))
    async with ledger_on(disk) as ledger:
        async with world(source=IterableSource(prompts(count)), ledger=ledger) as first:
            batch = await first.engine.next_batch(2)
            for _ in range(2):
                with pytest.raises(LedgerError, match="one engine at a time"):
                    async with world(source=source, ledger=ledger):
                        raise AssertionError("opened")
            await batch.ack()
            assert len((await first.engine.next_batch(2)).groups) == 2
        assert len(await source.take(count)) == count
        async with world(source=IterableSource(prompts(count)), ledger=ledger, deadlines={"drain": 6.0}) as second:
            assert second.engine.statistics().acked == 2
            assert (await second.engine.next_batch(2)).redelivered


async def test_f131_an_engine_that_could_not_be_opened_keeps_no_ledger():
    """Its source is refused; another engine may have the ledger then."""

    class Bad(IterableSource):
        async def check(self):
            raise SourceError("line 3 is no JSON")

    async with ledger_on(SimDisk()) as ledger:
        with pytest.raises(SourceError):
            async with world(source=Bad(prompts(2)), ledger=ledger):
                raise AssertionError("opened")
        async with world(2, ledger=ledger) as w:
            assert len(await take_all(w.engine)) == 2


# --- F132: failures that are told once


CALLS = ["ack", "next_batch", "restore", "weight_update", "note_weight_version"]


async def called(engine, servers, batch, call):
    if call == "ack":
        await batch.ack()
    elif call == "next_batch":
        await engine.next_batch(2)
    elif call == "restore":
        await engine.restore(-1)
    elif call == "note_weight_version":
        await engine.note_weight_version(7)
    else:
        async with engine.weight_update(version=7):
            servers.set_version(7)


@pytest.mark.parametrize("call", CALLS)
async def test_f132_a_broken_ledger_is_told_by_the_call_that_meets_it_and_not_again_on_leaving(call):
    disk = SimDisk()
    async with ledger_on(disk) as ledger, world(4, ledger=ledger) as w:
        batch = await w.engine.next_batch(2)
        while len(w.engine.ready_ids()) < 2:
            await trio.sleep(1)
        await trio.sleep(10)
        disk.fault = disk_full_from(0)
        with pytest.raises(LedgerError):
            await called(w.engine, w.servers, batch, call)


@pytest.mark.parametrize("how", ["exception", "cancelled", "none"])
async def test_f132_a_failure_that_no_call_has_told_is_logged_beside_another_end_of_the_block(caplog, how):
    class Broken(IterableSource):
        async def take(self, count):
            await trio.sleep(5)
            raise OSError("the source's disk is gone")

    error, caught = KeyError("the body's own"), None
    with trio.CancelScope() as scope:
        try:
            async with world(source=Broken([])):
                await trio.sleep(10)
                if how == "cancelled":
                    scope.cancel()
                    await trio.sleep(1)
                if how == "exception":
                    raise error
        except (KeyError, SourceError) as raised:
            caught = raised
    if how == "none":
        assert isinstance(caught, SourceError)
        assert "disk is gone" not in caplog.text
        return
    assert caught is (error if how == "exception" else None)
    assert caplog.text.count("the engine had failed when its block was left") == 1
    assert "the source's disk is gone" in caplog.text


async def test_f132_a_failure_after_the_first_is_logged_once(caplog):
    class Broken(Remembering):
        async def give_back(self, prompts):
            raise OSError("can't take them")

    disk = SimDisk()
    with suppress(RolloutError):
        async with ledger_on(disk) as ledger, world(source=IterableSource(prompts(400)), ledger=ledger) as w:
            await w.engine.next_batch(2)
            w.engine._state.failure.fail(SourceError("first"))
            disk.fault = disk_full_from(0)
            await trio.sleep(30)
    assert caplog.text.count("the engine had failed already") == 1


# --- F133: a log handler that raises


class Fussy(logging.Handler):
    """Raises at every warning; standard handlers print such an error, a user's may not."""

    def emit(self, record):
        if record.levelno >= logging.WARNING:
            raise RuntimeError("the log is broken")


@pytest.mark.parametrize("shown", ["handler", "tree"])
async def test_f133_a_log_handler_that_raises_ends_no_run_at_a_groups_deadline(monkeypatch, shown):
    """Nor does an object of user code whose text the report asks for."""

    class Unspeakable:
        def __repr__(self):
            raise RuntimeError("no text")

        __str__ = __repr__

    async def generate(prompt, rollout):
        secret = Unspeakable()
        turn = await rollout.generate(rollout.input)
        del secret
        return rollout.finish([turn])

    handler, logger = Fussy(), logging.getLogger("trio_rollout")
    plan = lambda number, _: HANG if number < 4 else Say()
    async with world(2, plan=plan, generate=generate, deadlines={"group": 10.0}) as w:
        if shown == "handler":
            logger.addHandler(handler)
        try:
            await trio.sleep(30)
        finally:
            logger.removeHandler(handler)
        assert len(await take_all(w.engine)) == 2
        assert w.engine.statistics().requeues[Cause.DEADLINE] == 2


# --- F134: stalls that grow with size


def calls_of(name, body):
    """Return a coroutine that runs ``body`` and counts the Python calls of functions of this name."""

    async def counted():
        count = 0

        def profile(frame, event, _):
            nonlocal count
            count += event == "call" and frame.f_code.co_name == name

        sys.setprofile(profile)
        try:
            await body()
        finally:
            sys.setprofile(None)
        return count

    return counted()


@pytest.mark.parametrize("policy", [None, Discard()])
async def test_f134_a_large_batch_under_staleness_looks_at_each_group_a_few_times(policy):
    """Looking at all ready groups whenever another becomes ready cost the square: 1,024 groups took three times as long."""
    staleness = Staleness(max_versions=2) if policy is None else Staleness(max_versions=2, policy=policy)
    async with world(
        200, plan=lambda *_: Say(seconds=0.1), samples_per_prompt=1, max_running=32, staleness=staleness
    ) as w:
        assert await calls_of("oldest_version", lambda: w.engine.next_batch(200)) <= 5 * 200


async def test_f134_an_evaluation_takes_prompts_as_slots_become_free():
    """An endless source is not taken whole, and prompts that wait for their turn are no tasks."""
    taken = 0

    class Endless:
        async def take(self, count):
            nonlocal taken
            await trio.lowlevel.checkpoint()
            taken += count
            return [attrs.evolve(prompts(1)[0], id=f"e{taken + n}") for n in range(count)]

    async with world(2, plan=lambda *_: Say(seconds=10), max_running=8) as w:
        with trio.move_on_after(35) as limit:
            await w.engine.evaluate(Endless(), samples_per_prompt=2)
        assert limit.cancelled_caught
        assert taken <= 8 * 4
        await take_all(w.engine)


@pytest.mark.parametrize("samples", [1, 3, 9])
async def test_f134_an_evaluation_keeps_its_slots_busy(samples):
    """Bounding what is taken must not cost time: 24 prompts on 8 slots, 10 s a sample."""
    async with world(1, plan=lambda *_: Say(seconds=10), max_running=8) as w:
        await take_all(w.engine)
        began = trio.current_time()
        groups = await w.engine.evaluate(IterableSource(prompts(24, prefix="e")), samples_per_prompt=samples)
        assert len(groups) == 24
        assert [group.prompt.id for group in groups] == [f"e{n}" for n in range(24)]
        waves = {1: 3, 3: 12, 9: 48}[samples]
        assert trio.current_time() - began <= 10 * waves + 1


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
@pytest.mark.parametrize("where", ["reward", "generate"])
async def test_f134_a_window_does_not_wait_for_an_evaluation_that_is_only_being_scored(mode, where):
    async def judge(trajectory):
        await trio.sleep(1000)
        return 1.0

    async def generate(prompt, rollout):
        turn = await rollout.generate(rollout.input)
        if where == "generate" and prompt.id.startswith("e"):
            await trio.sleep(1000)
        return rollout.finish([turn])

    reward = judge if where == "reward" else one
    async with world(
        1, generate=generate, reward=reward, deadlines={"abort": 20.0, "drain": 60.0, "reward": 2000.0}
    ) as w:
        with trio.move_on_after(3000):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(w.engine.evaluate, IterableSource(prompts(2, prefix="e")))
                await trio.sleep(20)
                began = trio.current_time()
                async with w.engine.weight_update(version=1, mode=mode):
                    assert trio.current_time() - began < 1
                    w.servers.set_version(1)
                nursery.cancel_scope.cancel()


# --- F135: the step of a restore


@pytest.mark.parametrize("step", [1000, 2, 1.5, 0.5, True, False, -2, None, "0", float("nan")])
@pytest.mark.parametrize("kept", [True, False])
async def test_f135_a_restore_to_no_step_that_was_delivered_is_refused(step, kept):
    disk = SimDisk()

    async def scenario(**more):
        async with world(8, **more) as w:
            for _ in range(2):
                await w.engine.next_batch(2)
            with pytest.raises(ValueError, match=r"from -1 to 1, the last step"):
                await w.engine.restore(step)
            await w.engine.restore(1)
            assert (await w.engine.next_batch(2)).step == 2

    if not kept:
        await scenario()
        return
    async with ledger_on(disk) as ledger:
        await scenario(ledger=ledger)
    async with ledger_on(disk) as ledger, world(8, ledger=ledger) as w:
        assert (await w.engine.next_batch(2)).step == 3


@pytest.mark.parametrize("step", [-1, 0, 1])
async def test_f135_a_restore_to_a_step_that_was_delivered_goes_on_behind_it(step):
    async with world(8) as w:
        for _ in range(2):
            await w.engine.next_batch(2)
        await w.engine.restore(step)
        assert (await w.engine.next_batch(2)).step == step + 1


async def test_f135_a_restore_after_the_block_is_refused():
    async with world(2) as w:
        await w.engine.next_batch(1)
    with pytest.raises(EngineClosed):
        await w.engine.restore(-1)


# --- F136: versions half written


@asynccontextmanager
async def slow_ledger(disk):
    """A ledger whose writes take a second each."""
    async with open_ledger("sim", disk=disk, io=SimIO(rng=random.Random(1), longest_s=2.0)) as ledger:
        yield ledger


@pytest.mark.parametrize("how", ["window", "note"])
@pytest.mark.parametrize("moment", [0.0, 0.2, 0.5, 1.0, 1.5, 2.5])
async def test_f136_a_version_is_required_of_servers_only_once_it_is_on_disk(how, moment):
    """Cancelled at any moment of it, engine, servers and ledger agree."""
    disk = SimDisk()
    async with slow_ledger(disk) as ledger, world(4, ledger=ledger) as w:
        await trio.sleep(30)
        with trio.CancelScope() as scope:
            if how == "note":
                scope.deadline = trio.current_time() + moment
                await w.engine.note_weight_version(7)
            else:
                async with w.engine.weight_update(version=7, mode=PauseMode.RETRACT):
                    w.servers.set_version(7)
                    scope.deadline = trio.current_time() + moment
        assert w.engine.weight_version == w.servers.required
        now = w.engine.weight_version
    async with ledger_on(disk) as ledger, world(4, ledger=ledger, servers=FakeServers(version=now)) as w:
        assert w.engine.weight_version == now


@pytest.mark.parametrize("version", [2**63, 2**70, 10**18])
@pytest.mark.parametrize("how", ["window", "note"])
@pytest.mark.parametrize("kept", [True, False])
async def test_f136_a_version_that_can_not_be_stored_is_refused_at_the_door(how, version, kept):
    async with AsyncExitStack() as stack:
        more = {"ledger": await stack.enter_async_context(ledger_on(SimDisk()))} if kept else {}
        w = await stack.enter_async_context(world(4, **more))
        with pytest.raises(ValueError, match="allowed: 0 to"):
            if how == "note":
                await w.engine.note_weight_version(version)
            else:
                async with w.engine.weight_update(version=version):
                    raise AssertionError("the body ran")
        assert w.engine.weight_version == w.servers.required == 0
        assert len(await take_all(w.engine)) == 4


async def test_f136_a_version_below_zero_is_refused():
    async with world(2) as w:
        with pytest.raises(ValueError, match="allowed: 0 to"):
            await w.engine.note_weight_version(-1)


async def test_f136_a_note_and_a_window_exclude_each_other():
    async with slow_ledger(SimDisk()) as ledger, world(4, ledger=ledger) as w:
        await trio.sleep(30)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(w.engine.note_weight_version, 3)
            nursery.start_soon(w.engine.note_weight_version, 4)  # notes wait for each other
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                async with w.engine.weight_update(version=5):
                    raise AssertionError("the body ran")
        assert w.engine.weight_version in {3, 4}
        async with w.engine.weight_update(version=5):
            w.servers.set_version(5)
            with pytest.raises(trio.BusyResourceError):
                await w.engine.note_weight_version(6)
        assert w.engine.weight_version == w.servers.required == 5


async def test_f136_a_window_made_before_and_entered_after_closing_is_refused():
    async with world(2) as w:
        window = w.engine.weight_update(version=1)
    calls = w.servers.paused
    with pytest.raises(EngineClosed):
        async with window:
            raise AssertionError("the body ran")
    assert w.servers.paused is calls is None


# --- F137: a take that is refused


class Given(Remembering):
    """Gives these prompts in takes of these sizes."""

    def __init__(self, takes):
        super().__init__(0)
        self.takes = list(takes)
        self.given = []

    async def take(self, count):
        await trio.lowlevel.checkpoint()
        if not self.takes:
            return []
        taken = self.takes.pop(0)
        self.given += taken
        return taken


P = prompts(8)


@pytest.mark.parametrize(
    "takes",
    [
        [[P[0], P[1], P[0], P[2], P[3]]],
        [[P[0], P[0]]],
        [[P[0], P[1]], [P[1], P[2], P[3]]],
        [[P[0], P[1]], [P[2], P[3], P[1]]],
        [[P[0], P[1], P[1], P[0], P[2]]],
        [[P[0]], list(P[1:]) * 9],
        [[P[0], "no prompt", P[1]]],
    ],
)
async def test_f137_every_prompt_of_a_take_that_is_refused_is_given_back(takes):
    """Those behind the duplicate too, and the duplicate itself."""
    source = Given(takes)
    with pytest.raises(SourceError):
        async with world(source=source, plan=lambda *_: HANG, deadlines={"drain": 6.0}):
            await trio.sleep(5)
    given = [prompt.id for prompt in source.given if not isinstance(prompt, str)]
    assert sorted(source.returned) == sorted(given)


# --- F140d: versions only rise


@pytest.mark.parametrize("restored", [False, True])
async def test_f140d_no_version_is_named_twice_over_restarts_and_restores(restored):
    disk = SimDisk()
    async with ledger_on(disk) as ledger, world(40, ledger=ledger) as w:
        for version in (1, 5):
            async with w.engine.weight_update(version=version):
                w.servers.set_version(version)
            await w.engine.next_batch(2)
        if restored:
            await w.engine.restore(0)
            await refused(w.engine, range(6))
        await w.engine.note_weight_version(3)  # a host may go back
        await refused(w.engine, range(6))
    async with ledger_on(disk) as ledger, world(40, ledger=ledger, servers=FakeServers(version=3)) as w:
        assert w.engine.weight_version == 3
        if restored:
            await w.engine.restore(-1)
        await refused(w.engine, range(6))
        async with w.engine.weight_update() as window:
            w.servers.set_version(window.version)
        assert w.engine.weight_version == window.version == 6


async def test_f140d_a_version_that_a_server_names_at_the_start_is_not_named_again():
    """A run that was killed in its window had pushed version 6 already; ours would be taken for it."""
    disk = SimDisk()
    async with ledger_on(disk) as ledger, world(40, ledger=ledger) as w, w.engine.weight_update(version=5):
        w.servers.set_version(5)
    async with ledger_on(disk) as ledger, world(40, ledger=ledger, servers=FakeServers(version=6)) as w:
        assert w.engine.weight_version == 5
        await refused(w.engine, range(7))
        async with w.engine.weight_update() as window:
            assert window.version == 7
            w.servers.set_version(7)


async def refused(engine, versions):
    for version in versions:
        with pytest.raises(ValueError, match="must be above"):
            async with engine.weight_update(version=version):
                raise AssertionError("the body ran")


# --- F140e: no request before the first weights


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", ["window", "note", "second window"])
async def test_f140e_with_wait_for_weights_no_request_is_sent_before_the_first_weights(mode, first):
    async with world(8, wait_for_weights=True) as w:
        await trio.sleep(100)
        assert w.servers.calls == 0
        if first == "second window":
            with pytest.raises(KeyError):
                async with w.engine.weight_update(version=1, mode=mode):
                    raise KeyError("the push failed")
            await trio.sleep(100)
            assert w.servers.calls == 0
        if first == "note":
            w.servers.set_version(1)
            await w.engine.note_weight_version(1)
        else:
            async with w.engine.weight_update(version=1, mode=mode):
                w.servers.set_version(1)
                await trio.sleep(100)
                assert w.servers.calls == 0
        groups = await take_all(w.engine)
        assert len(groups) == 8
        assert {group.oldest_version for group in groups} == {1}


async def test_f140e_the_same_weights_may_be_noted_again():
    async with world(2, wait_for_weights=True) as w:
        await w.engine.note_weight_version(0)
        assert len(await take_all(w.engine)) == 2


@pytest.mark.parametrize("call", ["next_batch", "evaluate"])
async def test_f140e_a_call_that_waits_for_the_first_weights_is_told(call):
    """After the time of a control call: another task may open the window meanwhile, and its body may take long."""
    async with world(4, wait_for_weights=True, deadlines={"control": 20.0}) as w:
        made = {"next_batch": lambda: w.engine.next_batch(2), "evaluate": lambda: w.engine.evaluate(IterableSource(P))}[
            call
        ]
        for _ in range(2):
            with trio.fail_after(30), pytest.raises(ServerError, match="wait_for_weights"):
                await made()
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def update():
                async with w.engine.weight_update(version=1):
                    await trio.sleep(100)
                    w.servers.set_version(1)

            await trio.sleep(10)
            await made()


async def test_f140e_no_progress_is_counted_from_the_first_request():
    """The clocks stand still while the gate is closed, also when a window is opened on a closed gate."""
    async with world(2, wait_for_weights=True, deadlines={"no_progress": 10.0}, plan=lambda *_: Say(seconds=8)) as w:
        await trio.sleep(50)
        async with w.engine.weight_update(version=1):
            w.servers.set_version(1)
            await trio.sleep(50)
        assert len(await take_all(w.engine)) == 2
        assert not sum(w.engine.statistics().retries.values())


def test_f140e_it_is_true_or_false():
    with pytest.raises((SettingsError, TypeError)):
        settings(wait_for_weights="yes")
