"""With a ledger a run takes up the work of the one before, which may have ended in any way (P7, P8)."""

import json
import random
from contextlib import asynccontextmanager

import attrs
import pytest
import trio

from trio_rollout import Batch, Cause, Drop, EngineSettings, Keep, SamplingParams, SingleTurn
from trio_rollout.errors import LedgerError, RolloutError
from trio_rollout.ledger import open_ledger
from trio_rollout.sources import IterableSource, JsonlSource
from trio_rollout.testing import HANG, Fail, FakeServers, Say, SimWorld, prompts, run_inline
from trio_rollout.testing._sim.disk import SimDisk, disk_full_from
from trio_rollout.testing._sim.world import SimIO

from .conftest import take_all, world


@attrs.define
class Runs:
    """Engines one after the other over the same simulated disk."""

    disk: SimDisk = attrs.field(factory=SimDisk)
    count: int = 8

    @asynccontextmanager
    async def open(self, **changes):
        source = changes.pop("source", None) or IterableSource(prompts(self.count))
        keep, io = changes.pop("keep_acked", False), SimIO(rng=random.Random(1))
        again, named = changes.pop("retry_quarantined", False), changes.pop("ledger_settings", None)
        async with (
            open_ledger(
                "sim", keep_acked=keep, settings=named, retry_quarantined=again, disk=self.disk, io=io
            ) as ledger,
            world(source=source, ledger=ledger, **changes) as w,
        ):
            yield w


class Killed(Exception):
    """Ends a run: it stands for the end of the process."""


async def test_what_was_not_settled_runs_again_and_what_was_acked_is_never_seen_again():
    runs, first = Runs(), []
    with pytest.raises(Killed):
        async with runs.open() as w:
            batch = await w.engine.next_batch(2)
            first = [group.prompt.id for group in batch.groups]
            await batch.ack()
            raise Killed
    async with runs.open() as w:
        second = [group.prompt.id for group in await take_all(w.engine)]
        counts = w.engine.statistics()

    assert sorted(first + second) == [f"p{n}" for n in range(8)]
    assert (counts.pulled, counts.acked) == (8, 8)


async def test_what_was_delivered_and_not_acked_is_offered_again_as_redelivered():
    runs = Runs()
    with pytest.raises(Killed):
        async with runs.open() as w:
            first = await w.engine.next_batch(2)
            raise Killed
    async with runs.open() as w:
        again = await w.engine.next_batch(2)

    assert again.redelivered
    assert {group.id for group in again.groups} == {group.id for group in first.groups}
    assert not first.redelivered


async def test_steps_go_on_where_they_were():
    runs = Runs()
    async with runs.open() as w:
        for _ in range(2):
            await (await w.engine.next_batch(2)).ack()
    async with runs.open() as w:
        assert (await w.engine.next_batch(2)).step == 2


async def test_attempts_that_were_used_up_are_remembered():
    """F042: a poison prompt does not start over after a restart."""
    plan = lambda _, prompt: Fail(ValueError("poison"), 1.0) if prompt[2] == 3 else HANG
    runs = Runs(count=1)
    for _ in range(2):
        with pytest.raises(Killed):
            async with runs.open(plan=plan) as w:
                while not w.engine.statistics().retries[Cause.ERROR]:
                    await trio.sleep(0.1)
                await trio.sleep(0.4)  # tries are written in the background, several at a time
                raise Killed
    async with runs.open(plan=plan) as w:
        await take_all(w.engine)
        (report,) = w.engine.quarantined()
        assert w.servers.calls == 2  # the third failure that counts was this run's first
    assert report.attempts == 5  # and two that the ends of the runs before had cut short
    async with runs.open(plan=plan) as w:
        assert await take_all(w.engine) == []
        assert [report.error.message for report in w.engine.quarantined()] == ["poison"]


async def test_filtered_groups_stay_filtered():
    async def odd_only(group):
        return Keep() if int(group.prompt.label) % 2 else Drop("even")

    runs = Runs()
    async with runs.open(group_filter=odd_only) as w:
        await take_all(w.engine)
    async with runs.open(group_filter=odd_only) as w:
        assert await take_all(w.engine) == []
        assert w.engine.statistics().filtered == 4


async def test_a_trainer_that_went_back_gets_everything_after_its_checkpoint_again():
    runs = Runs()
    async with runs.open() as w:
        batches = [await w.engine.next_batch(2) for _ in range(3)]
        await batches[0].ack()
        await w.engine.restore(0)
        again = await take_all(w.engine)
        with pytest.raises(RolloutError, match=r"acked|taken back"):
            await batches[1].ack()
    ids = {group.id for batch in batches[1:] for group in batch.groups}
    assert ids <= {group.id for group in again}
    assert len(again) == 6


async def test_a_restore_before_the_last_ack_is_refused():
    async with Runs().open() as w:
        for _ in range(2):
            await (await w.engine.next_batch(2)).ack()
        with pytest.raises(RolloutError, match="acked"):
            await w.engine.restore(0)


async def test_an_ack_is_accepted_once():
    """F096."""
    async with Runs().open() as w:
        batch = await w.engine.next_batch(2)
        await batch.ack()
        with pytest.raises(RolloutError, match="acked already"):
            await batch.ack()
        assert w.engine.statistics().acked == 2


async def test_an_ack_of_another_run_is_refused_and_changes_nothing():
    """A trainer that kept a batch over a restart: its groups are offered again, and only the new batch can be acked."""
    runs = Runs()
    async with runs.open() as w:
        kept = await w.engine.next_batch(2)
    async with runs.open() as w:
        again = await w.engine.next_batch(2)
        with pytest.raises(LedgerError, match="is closed"):
            await kept.ack()
        assert (w.engine.statistics().delivered, w.engine.statistics().acked) == (2, 0)
        await again.ack()
    assert {group.id for group in kept.groups} == {group.id for group in again.groups}


async def test_leaving_with_a_ledger_gives_running_groups_the_grace():
    """Decision 3: their results are kept for the next run."""
    runs, servers = Runs(count=2), FakeServers(plan=lambda *_: Say(seconds=5))
    async with runs.open(servers=servers):
        await trio.sleep(1)
    async with runs.open(servers=servers) as w:
        assert len(await take_all(w.engine)) == 2
    assert servers.calls == 4


async def test_the_weight_version_is_remembered():
    runs = Runs()
    async with runs.open() as w:
        async with w.engine.weight_update(version=4):
            w.servers.set_version(4)
        await take_all(w.engine)
    async with runs.open(servers=FakeServers(version=4)) as w:
        assert w.engine.weight_version == 4


async def test_a_ledger_that_breaks_stops_the_engine_and_says_so():
    """Nothing counts as committed, and the consumer is told of the failure."""
    runs = Runs(disk=SimDisk(fault=disk_full_from(400)), count=200)
    with pytest.raises(LedgerError):
        async with runs.open() as w:
            await take_all(w.engine)
    runs.disk.fault = None  # there is room again
    async with runs.open() as w:
        await take_all(w.engine)
        assert w.engine.statistics().acked == 200


async def test_other_samples_per_prompt_are_refused_before_anything_is_pulled():
    runs = Runs()
    async with runs.open() as w:
        await take_all(w.engine)
    source = IterableSource(prompts(8))
    with pytest.raises(LedgerError, match="samples"):
        async with runs.open(source=source, samples_per_prompt=4):
            raise AssertionError("opened")
    assert len(await source.take(8)) == 8


async def test_another_source_is_refused_before_anything_is_pulled(tmp_path):
    """The same file may move; other content, or the same in another order, is another source."""

    def source(name, *texts, **options):
        (tmp_path / name).write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), "utf-8")
        return JsonlSource(tmp_path / name, run_sync=run_inline, **options)

    runs = Runs()
    async with runs.open(source=source("a.jsonl", "1", "2")) as w:
        await (await w.engine.next_batch(1)).ack()
    others = [source("b.jsonl", "1", "3"), source("c.jsonl", "1", "2", shuffle_seed=1), IterableSource(prompts(2))]
    for other in others:
        before = other.state()
        with pytest.raises(LedgerError, match=r"belongs to another run: its source is 'JSONL of 2 .* Use another dir"):
            async with runs.open(source=other):
                raise AssertionError("opened")
        assert {**other.state(), "file": None} == {**before, "file": None}
    async with runs.open(source=source("moved.jsonl", "1", "2")) as w:
        assert len(await take_all(w.engine)) == 1


async def test_a_restore_before_the_last_ack_is_refused_after_a_restart_too():
    runs = Runs()
    async with runs.open() as w:
        for _ in range(2):
            await (await w.engine.next_batch(2)).ack()
    async with runs.open() as w:
        with pytest.raises(RolloutError, match="acked"):
            await w.engine.restore(0)


async def test_a_prompt_that_cannot_be_stored_is_given_up_and_the_run_goes_on():
    """The prompt was pulled together with good ones; the next run remembers it as given up."""
    given = [attrs.evolve(one, metadata={"lock": trio.Lock()}) if one.id in {"p2", "p3"} else one for one in prompts(8)]
    runs = Runs()
    async with runs.open(source=IterableSource(given)) as w:
        assert sorted(group.prompt.id for group in await take_all(w.engine)) == ["p0", "p1", "p4", "p5", "p6", "p7"]
        reports = w.engine.quarantined()
    assert [(report.id.prompt, report.attempts, report.error.type) for report in reports] == [
        ("p2", 0, "DataRefused"),
        ("p3", 0, "DataRefused"),
    ]
    assert "metadata['lock']" in reports[0].error.message
    async with runs.open(source=IterableSource(given)) as w:
        assert await take_all(w.engine) == []
        assert w.engine.quarantined() == reports


async def test_a_source_whose_position_cannot_be_stored_fails_the_run():
    class Forgetful(IterableSource):
        def state(self):
            return {"at": object()}

    with pytest.raises(LedgerError, match=r"the source's state can't be written to the ledger: \['at'\]"):
        async with Runs().open(source=Forgetful(prompts(2))) as w:
            await take_all(w.engine)


async def test_a_filters_reason_that_cannot_be_stored_loses_no_group():
    async def odd(group):
        return Drop("\ud800") if group.prompt.id == "p3" else Keep()

    async with Runs().open(group_filter=odd, keep_acked=True) as w:
        assert len(await take_all(w.engine)) == 7
        assert [report.id.prompt for report in w.engine.quarantined()] == ["p3"]


async def test_a_group_that_cannot_be_stored_is_quarantined_and_the_run_goes_on():
    """User code put a lock into one trajectory's metadata: that group is named, the others are delivered."""

    async def generate(prompt, rollout):
        made = rollout.finish([await rollout.generate(rollout.input)])
        return attrs.evolve(made, metadata={"lock": trio.Lock()}) if prompt.id == "p3" else made

    async with Runs().open(generate=generate) as w:
        assert len(await take_all(w.engine)) == 7
        (report,) = w.engine.quarantined()
    assert report.id.prompt == "p3"
    assert "lock" in report.error.message


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("other", ["ack", "restore", "next"])
def test_groups_change_hands_one_change_at_a_time(other, seed):
    """Of two calls that move the same groups while a ledger writes, the later one sees the first as a whole."""

    async def scenario(world):
        servers, refused = FakeServers(), []
        async with (
            world.open_ledger() as ledger,
            world.open_engine(
                IterableSource(prompts(8)),
                SingleTurn(SamplingParams(max_new_tokens=4)),
                servers=servers,
                ledger=ledger,
                settings=EngineSettings(samples_per_prompt=1, max_running=4),
            ) as engine,
        ):
            batch = await engine.next_batch(2)
            got = [batch]

            async def attempted(call, *args):
                try:
                    result = await call(*args)
                except RolloutError as error:
                    refused.append(error)
                else:
                    got.extend([result] if isinstance(result, Batch) else [])

            call = {"ack": (batch.ack,), "restore": (engine.restore, -1), "next": (engine.next_batch, 2)}[other]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(attempted, *((engine.restore, -1) if other == "next" else (batch.ack,)))
                nursery.start_soon(attempted, *call)
            got.extend([later async for later in engine.batches(2)])
            for held in got:
                await attempted(held.ack)
            counts = engine.statistics()
            assert (counts.acked, counts.delivered) == (8, 0), [type(error) for error in refused]
            assert all(type(error) is RolloutError for error in refused)

    SimWorld(seed=seed).run(scenario)
