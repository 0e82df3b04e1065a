"""The read-write lock: readers share, a writer is alone, first come first served, and cancelled waiters leave."""

import pytest
import trio

from trio_rollout._util.read_write_lock import ReadWriteLock


class Visitors:
    """Readers and writers that enter, stay until they are told to leave, and can be cancelled."""

    def __init__(self, nursery):
        self.lock = ReadWriteLock()
        self.inside = []
        self.nursery = nursery
        self.out = {}
        self.scopes = {}

    async def visit(self, name):
        """A reader if ``name`` begins with r, else a writer. Return once every task is blocked."""
        self.out[name], self.scopes[name] = trio.Event(), trio.CancelScope()

        async def go():
            with self.scopes[name]:
                async with self.lock.reading() if name.startswith("r") else self.lock.writing():
                    self.inside.append(name)
                    try:
                        await self.out[name].wait()
                    finally:
                        self.inside.remove(name)

        self.nursery.start_soon(go)
        await trio.sleep(1)

    async def leave(self, name):
        self.out[name].set()
        await trio.sleep(1)

    async def give_up(self, name):
        self.scopes[name].cancel()
        await trio.sleep(1)


@pytest.fixture
async def visitors(nursery):
    return Visitors(nursery)


async def test_readers_overlap(autojump_clock, visitors):
    for name in ("r1", "r2", "r3"):
        await visitors.visit(name)

    assert visitors.inside == ["r1", "r2", "r3"]


async def test_a_writer_is_alone(autojump_clock, visitors):
    await visitors.visit("w1")
    await visitors.visit("r1")
    await visitors.visit("w2")
    assert visitors.inside == ["w1"]

    await visitors.leave("w1")
    assert visitors.inside == ["r1"]

    await visitors.leave("r1")
    assert visitors.inside == ["w2"]


async def test_a_reader_behind_a_queued_writer_waits(autojump_clock, visitors):
    for name in ("r1", "w1", "r2"):
        await visitors.visit(name)
    assert visitors.inside == ["r1"]

    await visitors.leave("r1")
    assert visitors.inside == ["w1"]


async def test_a_cancelled_writer_leaves_the_queue_and_lets_in_the_readers_behind_it(autojump_clock, visitors):
    for name in ("r1", "w1", "r2", "r3"):
        await visitors.visit(name)
    await visitors.give_up("w1")

    assert sorted(visitors.inside) == ["r1", "r2", "r3"]
    assert repr(visitors.lock) == "<ReadWriteLock 3 readers, 0 waiting>"


async def test_admitted_and_cancelled_in_the_same_tick_the_lock_is_not_kept(autojump_clock, visitors):
    await visitors.visit("w1")
    await visitors.visit("w2")
    await visitors.visit("r1")
    visitors.out["w1"].set()
    await trio.lowlevel.checkpoint()
    visitors.scopes["w2"].cancel()
    await trio.sleep(1)

    assert visitors.inside == ["r1"]
    await visitors.leave("r1")
    assert repr(visitors.lock) == "<ReadWriteLock 0 readers, 0 waiting>"
