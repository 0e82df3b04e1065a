"""GroupCommit: one writer, bounded batches, and each caller gets the result of its write alone."""

from collections.abc import Sequence
from functools import partial

import attrs
import pytest
import trio
import trio.testing

from trio_rollout.errors import LedgerError
from trio_rollout.ledger._group_commit import BatchLimits, GroupCommit


@attrs.define(eq=False)
class Writer:
    """A writer that takes a second for a batch, refuses negative numbers, and fails the whole batch on 0."""

    batches: list[list[int]] = attrs.field(factory=list)
    times: list[float] = attrs.field(factory=list)
    compacted: int = 0
    compaction_error: Exception | None = None

    async def __call__(self, batch: Sequence[int]) -> list[LedgerError | None]:
        self.batches.append(list(batch))
        self.times.append(trio.current_time())
        await trio.sleep(1)
        if 0 in batch:
            raise LedgerError("disk full") from OSError(28, "no space")
        return [LedgerError(f"{number} refused") if number < 0 else None for number in batch]

    async def after_batch(self) -> None:
        self.compacted += 1
        if self.compaction_error is not None:
            raise self.compaction_error


def commits(writer: Writer, **limits) -> GroupCommit[int]:
    return GroupCommit(writer, writer.after_batch, BatchLimits(**limits))


async def submit_all(commit: GroupCommit[int], *numbers: int, size: int = 1) -> dict[int, LedgerError | None]:
    """Submit each number from its own task; return the result of each."""
    results: dict[int, LedgerError | None] = {}

    async def one(number: int) -> None:
        try:
            await commit.submit(number, size)
        except LedgerError as error:
            results[number] = error
        else:
            results[number] = None

    async with trio.open_nursery() as server:
        server.start_soon(commit.serve)
        await trio.testing.wait_all_tasks_blocked()
        async with trio.open_nursery() as callers:
            for number in numbers:
                callers.start_soon(one, number)
                await trio.lowlevel.checkpoint()  # in this order, and without giving the clock time to jump
                await trio.lowlevel.checkpoint()
        server.cancel_scope.cancel()
    return results


async def test_a_batch_waits_ten_milliseconds_for_company(autojump_clock):
    writer = Writer()
    commit = commits(writer)
    start = trio.current_time()
    await submit_all(commit, 1)
    assert [round(at - start, 6) for at in writer.times] == [0.01]


async def test_a_write_that_arrives_during_another_goes_with_the_next_batch_at_once(autojump_clock):
    writer = Writer()
    commit = commits(writer)
    async with trio.open_nursery() as server:
        server.start_soon(commit.serve)
        await trio.testing.wait_all_tasks_blocked()
        async with trio.open_nursery() as callers:
            callers.start_soon(commit.submit, 1, 1)
            await trio.sleep(0.5)
            callers.start_soon(commit.submit, 2, 1)
            await trio.sleep(0.2)
            callers.start_soon(commit.submit, 3, 1)
        server.cancel_scope.cancel()
    assert writer.batches == [[1], [2, 3]]
    assert writer.times[1] - writer.times[0] == pytest.approx(1)


async def test_batches_are_bounded_in_number(autojump_clock):
    writer = Writer()
    results = await submit_all(commits(writer, items=3), *range(1, 8))
    assert writer.batches == [[1, 2, 3], [4, 5, 6], [7]]
    assert set(results.values()) == {None}


async def test_batches_are_bounded_in_bytes(autojump_clock):
    """A write that is larger than the limit goes alone."""
    writer = Writer()
    await submit_all(commits(writer, bytes=100), 1, 2, 3, size=40)
    assert writer.batches == [[1, 2], [3]]
    writer = Writer()
    await submit_all(commits(writer, bytes=100), 1, 2, size=101)
    assert writer.batches == [[1], [2]]


async def test_a_full_batch_does_not_wait_for_company(autojump_clock):
    writer = Writer()
    commit = commits(writer, items=2)
    start = trio.current_time()
    await submit_all(commit, 1, 2)
    assert writer.times == [start]


async def test_a_refusal_is_its_own_callers_only(autojump_clock):
    results = await submit_all(commits(Writer()), 1, -2, 3)
    assert results[1] is None
    assert results[3] is None
    assert str(results[-2]) == "-2 refused"


async def test_after_a_failed_write_nothing_is_written_and_every_caller_gets_the_cause(autojump_clock):
    writer = Writer()
    commit = commits(writer, items=2)
    results = await submit_all(commit, 1, 0, 3, 4)
    assert writer.batches == [[1, 0]]
    assert all(isinstance(error.__cause__, OSError) for error in results.values() if error is not None)
    assert None not in results.values()
    assert len(set(map(id, results.values()))) == 4  # an exception shared by tasks would mix their tracebacks
    with pytest.raises(LedgerError, match="disk full"):
        await commit.submit(5, 1)


async def test_an_unexpected_error_of_the_writer_is_reported_too(autojump_clock):
    writer = Writer(compaction_error=ZeroDivisionError("a bug"))
    commit = commits(writer)
    assert await submit_all(commit, 1) == {1: None}  # the write was on disk before the compaction failed
    with pytest.raises(LedgerError, match="a bug") as caught:
        await commit.submit(2, 1)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


async def test_cancelled_before_acceptance_it_is_withdrawn(autojump_clock):
    writer = Writer()
    commit = commits(writer)
    async with trio.open_nursery() as server:
        server.start_soon(commit.serve)
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(0.005) as scope:
            await commit.submit(1, 1)
        assert scope.cancelled_caught
        await commit.submit(2, 1)
        server.cancel_scope.cancel()
    assert writer.batches == [[2]]


async def test_cancelled_after_acceptance_it_waits_and_reports_success(autojump_clock):
    writer = Writer()
    commit = commits(writer)
    async with trio.open_nursery() as server:
        server.start_soon(commit.serve)
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(0.5) as scope:
            await commit.submit(1, 1)
            assert trio.current_time() == writer.times[0] + 1
            with pytest.raises(trio.Cancelled):
                await trio.lowlevel.checkpoint()
        assert scope.cancel_called
        server.cancel_scope.cancel()


async def test_cancelled_after_acceptance_the_writes_own_error_comes_first(autojump_clock):
    commit = commits(Writer())
    async with trio.open_nursery() as server:
        server.start_soon(commit.serve)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(LedgerError, match="disk full"), trio.move_on_after(0.5):
            await commit.submit(0, 1)
        server.cancel_scope.cancel()


async def test_a_server_that_is_cancelled_finishes_the_write_it_began(autojump_clock):
    writer, results = Writer(), []
    commit = commits(writer)

    async def caller() -> None:
        await commit.submit(1, 1)
        results.append("written")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(caller)
        with trio.move_on_after(0.5):
            await commit.serve()
        await trio.testing.wait_all_tasks_blocked()
        assert results == ["written"]


async def test_a_closed_writer_refuses_waiting_and_later_callers(autojump_clock):
    commit = commits(Writer())
    results: list[str] = []

    async def caller(number: int) -> None:
        try:
            await commit.submit(number, 1)
        except LedgerError as error:
            results.append(str(error))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(caller, 1)
        await trio.testing.wait_all_tasks_blocked()
        commit.refuse(LedgerError("closed"))
        nursery.start_soon(partial(caller, 2))
    assert results == ["closed", "closed"]
