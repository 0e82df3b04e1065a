"""Acked bodies are reclaimed: the disk holds the unacked bodies and at most two segments more."""

import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from trio_rollout._core.ledger_events import Acked, Delivered, Pulled, Ready, SampleKept, SamplesDropped
from trio_rollout._core.values import Group, GroupId, Prompt, Trajectory
from trio_rollout.ledger import open_ledger, read_ledger
from trio_rollout.ledger._codec import packed
from trio_rollout.ledger._disk import RealDisk
from trio_rollout.ledger._store import Store, StoreLimits
from trio_rollout.ledger._transaction import EncodedEvent, Transaction

from ._samples import BIG, IDENTITY, acked, delivered, group, pulled, ready

SEGMENT = 8 * 2**20
BATCH = 500


def used(path: Path) -> int:
    """Return the bytes of all files of the ledger."""
    return sum(entry.stat().st_size for entry in path.iterdir())


@attrs.define(eq=False)
class Trainer:
    """A trainer that acks most batches soon, and holds every twentieth one for a long time."""

    rng: random.Random
    step: int = 0
    soon: deque[Delivered] = attrs.field(factory=deque)
    held: deque[Delivered] = attrs.field(factory=deque)

    def deliver(self, ids: tuple[GroupId, ...]) -> list[Transaction]:
        """Deliver these groups, and ack the batches that are due."""
        event = Delivered(step=self.step, ids=ids)
        (self.held if self.step % 20 == 0 else self.soon).append(event)
        self.step += 1
        due = [self.soon.popleft()] if len(self.soon) > 4 else []
        due += [self.held.popleft()] if len(self.held) > 5 else []
        return [
            (EncodedEvent(event=event),),
            *((EncodedEvent(event=Acked(step=one.step, ids=one.ids)),) for one in due),
        ]

    @property
    def unacked(self) -> set[GroupId]:
        """The groups that are delivered and not acked."""
        return {gid for one in (*self.soon, *self.held) for gid in one.ids}


def transactions(first: int, rng: random.Random, sizes: dict[GroupId, int]) -> Iterator[Transaction]:
    """Pull and finish a batch of groups of some 1 to 3 KB."""
    prompts = tuple(Prompt(id=str(number), text="x") for number in range(first, first + BATCH))
    yield (EncodedEvent(event=Pulled(prompts=prompts, source_state={}), bodies=(b"prompt",) * BATCH, note=packed({})),)
    bodies = {prompt.group_id: bytes(rng.randrange(500, 3000)) for prompt in prompts}
    groups = (Group(id=prompt.group_id, attempt=1, prompt=prompt, trajectories=()) for prompt in prompts)
    yield tuple(EncodedEvent(event=Ready(group=one), bodies=(bodies[one.id],), note=packed([])) for one in groups)
    sizes.update((gid, len(body)) for gid, body in bodies.items())


def run(path: Path, groups: int) -> None:
    store = Store(where=str(path), disk=RealDisk(path), limits=StoreLimits(inline=1000, together=0, segment=SEGMENT))
    store.open()
    rng, sizes = random.Random(1), dict[GroupId, int]()
    trainer = Trainer(rng)
    try:
        store.begin(IDENTITY)
        for first in range(0, groups, BATCH):
            ready = list(transactions(first, rng, sizes))
            assert set(store.commit(ready)) == {None}
            ids = tuple(GroupId(0, str(number)) for number in range(first, first + BATCH))
            assert set(store.commit(trainer.deliver(ids))) == {None}
            store.compact()
            unacked = trainer.unacked
            sizes = {gid: size for gid, size in sizes.items() if gid in unacked}
            assert used(path) <= sum(sizes.values()) + 2 * SEGMENT
    finally:
        store.close()
    store.open()
    try:
        assert len(trainer.unacked) == len(sizes)
        assert used(path) <= sum(sizes.values()) + 2 * SEGMENT
    finally:
        store.close()


def test_disk_use_is_bounded_over_a_hundred_thousand_groups(tmp_path):
    run(tmp_path / "ledger", 100_000)


@pytest.mark.soak
def test_disk_use_is_bounded_over_a_million_groups(tmp_path):
    run(tmp_path / "ledger", 1_000_000)


def run_samples(path: Path, groups: int) -> None:
    """Finish two samples a group; every hundredth group keeps waiting for ten batches, the others are ready and acked."""
    store = Store(where=str(path), disk=RealDisk(path), limits=StoreLimits(inline=1000, together=0, segment=SEGMENT))
    store.open()
    rng, held = random.Random(1), deque[tuple[GroupId, int]]()
    try:
        store.begin(IDENTITY)
        for first in range(0, groups, BATCH):
            pull, finish = transactions(first, rng, {})
            kept = {
                (item.event.group.id, index): bytes(rng.randrange(500, 3000)) for item in finish for index in (0, 1)
            }
            samples = tuple(EncodedEvent(event=kept_sample(*key), bodies=(body,)) for key, body in kept.items())
            assert set(store.commit([pull, samples])) == {None}
            held += [(gid, len(body)) for (gid, _), body in kept.items() if int(gid.prompt) % 100 == 0]
            settled = tuple(item for item in finish if int(item.event.group.id.prompt) % 100)
            ids = tuple(item.event.group.id for item in settled)
            deliver, ack = Delivered(step=first, ids=ids), Acked(step=first, ids=ids)
            late = [held.popleft()[0] for _ in range(len(held) - 100)]
            dropped = tuple(EncodedEvent(event=SamplesDropped(id=gid, indices=(0, 1))) for gid in late)
            batch = [settled, (EncodedEvent(event=deliver),), (EncodedEvent(event=ack),), dropped]
            assert set(store.commit(batch)) == {None}
            store.compact()
            assert used(path) <= sum(size for _, size in held) + 2 * SEGMENT
    finally:
        store.close()


def kept_sample(gid: GroupId, index: int) -> SampleKept:
    return SampleKept(
        id=gid, attempt=1, trajectory=Trajectory(prompt=Prompt(id=gid.prompt, text="x"), index=index, segments=())
    )


def test_disk_use_is_bounded_while_samples_are_kept(tmp_path):
    """Bodies of samples are dead bytes as soon as their group settles, and those of waiting groups move on."""
    run_samples(tmp_path / "ledger", 20_000)


async def test_acked_bodies_go_with_their_segment(tmp_path):
    """A segment is deleted when the dead bytes exceed the size of one segment; its live bodies move to another."""
    sizes = StoreLimits(segment=1_200_000)
    async with open_ledger(tmp_path, sizes=sizes) as ledger:
        await ledger.begin(IDENTITY)
        await ledger.record([pulled(*range(8))])
        for number in range(8):
            await ledger.record([ready(number, size=BIG)])
        assert len(list(tmp_path.glob("*.seg"))) == 4
        await ledger.record([delivered(0, 0, 2, 3, 4, 5, 6)])
        await ledger.record([acked(0, 0, 2, 3, 4, 5, 6)])
        await ledger.record([])  # the call before returned before its space was reclaimed
        found = await ledger.begin(IDENTITY)
    assert found.ready == (group(1, size=BIG), group(7, size=BIG))
    assert len(list(tmp_path.glob("*.seg"))) < 4
    assert used(tmp_path) < 2 * 480_000 + 2 * 1_200_000


async def test_keep_acked_keeps_them_for_the_export(tmp_path):
    async with open_ledger(tmp_path, keep_acked=True) as ledger:
        await ledger.begin(IDENTITY)
        await ledger.record([pulled(0, 1)])
        await ledger.record([ready(0, size=BIG), ready(1)])
        await ledger.record([delivered(0, 0, 1)])
        await ledger.record([acked(0, 0, 1)])
    with read_ledger(tmp_path) as reader:
        assert [found for _, found in reader.groups()] == [group(0, size=BIG), group(1)]
