"""What a rescoring does to a ledger: each group in one transaction, the bodies that it needs kept, its place remembered."""

from pathlib import Path

import attrs
import pytest
import trio

from trio_rollout._core.enums import Cause
from trio_rollout._core.ledger_events import LedgerEvent, Rescored, Retried
from trio_rollout._core.lifecycle import State
from trio_rollout.errors import LedgerError
from trio_rollout.ledger import RESCORED_STATES, GroupSamples, open_ledger, read_ledger
from trio_rollout.ledger._store import StoreLimits

from ._samples import (
    BIG,
    IDENTITY,
    acked,
    delivered,
    finished,
    gid,
    group,
    prompt,
    pulled,
    quarantined,
    ready,
    requeued,
    sample,
)

SIZES = StoreLimits(segment=1_200_000)


def better(number: int, *, size: int = 0, reward: float = 9.0) -> Rescored:
    """A finished group with new rewards."""
    was = group(number, size=size)
    rows = [attrs.evolve(row, reward=reward) for row in was.trajectories]
    return Rescored(id=gid(number), number=1, group=attrs.evolve(was, trajectories=rows))


async def record(path: Path, *records: list[LedgerEvent]) -> None:
    async with open_ledger(path, keep_acked=True, sizes=SIZES) as ledger:
        await ledger.begin(IDENTITY)
        for events in records:
            await ledger.record(events)


async def left(path: Path, number: int = 1) -> list[int]:
    """The groups that rescoring ``number`` has not been through."""
    async with open_ledger(path, keep_acked=True) as ledger:
        found = await ledger.stored_after(-1, number, RESCORED_STATES, 100)
    return [int(one.prompt.id) for one in found]


async def everything(path: Path) -> None:
    """Make a ledger of 0 acked, 1 delivered, 2 ready, 3 quarantined with samples, 4 waiting with one, 5 without any."""
    await record(
        path,
        [pulled(*range(7))],
        [ready(0, size=BIG), ready(1), ready(2, size=BIG)],
        [finished(3), finished(3, 1, size=BIG), finished(4, size=BIG)],
        [quarantined(3, sample(3, 2)), delivered(0, 0)],
        [quarantined(6), acked(0, 0), delivered(1, 1)],
    )


async def test_it_finds_every_group_that_has_trajectories_in_the_order_of_their_pulls(tmp_path):
    await everything(tmp_path)
    async with open_ledger(tmp_path, keep_acked=True) as ledger:
        begun = await ledger.begin_rescoring("mine")
        assert (begun.number, begun.goes_on, begun.left) == (1, False, 5)
        assert {reason: count for reason, count in begun.skipped.items() if count} == {"without a finished sample": 2}
        found = await ledger.stored_after(-1, 1, RESCORED_STATES, 2)
        found = [*found, *await ledger.stored_after(found[-1].place, 1, RESCORED_STATES, 9)]
        assert [one.prompt for one in found] == [prompt(number) for number in range(5)]
        assert [one.state.value for one in found] == ["acked", "delivered", "ready", "quarantined", "waiting"]
        assert [one.group for one in found[:3]] == [group(0, size=BIG), group(1), group(2, size=BIG)]
        assert found[3].trajectories == (sample(3), sample(3, 1, size=BIG), sample(3, 2))
        assert found[3].report == quarantined(3).report
        assert found[4].trajectories == (sample(4, size=BIG),)
        only = await ledger.stored_after(-1, 1, [State.READY], 9)
        assert [one.prompt for one in only] == [prompt(2)]


async def test_a_finished_group_has_its_new_body_in_its_state(tmp_path):
    await everything(tmp_path)
    await record(tmp_path, [better(0, size=BIG)], [better(1), better(2, size=BIG)])
    with read_ledger(tmp_path) as reader:
        assert list(reader.groups()) == [
            (state, one.group)
            for state, one in zip(
                (State.ACKED, State.DELIVERED, State.READY),
                (better(0, size=BIG), better(1), better(2, size=BIG)),
                strict=True,
            )
        ]
        assert {one.rewards for one in reader.summaries(State.ACKED, State.READY)} == {(9.0,)}
    assert await left(tmp_path) == [3, 4]
    assert await left(tmp_path, 2) == [0, 1, 2, 3, 4]


async def test_samples_are_replaced_in_their_group_and_what_failed_is_unscored(tmp_path):
    await everything(tmp_path)
    kept, failed = attrs.evolve(sample(3, 2), reward=9.0), attrs.evolve(sample(3), reward=None)
    report = attrs.evolve(quarantined(3).report, cause=Cause.INFRASTRUCTURE)
    await record(tmp_path, [Rescored(id=gid(3), number=1, kept=(kept,), unscored=(failed,), report=report)])
    with read_ledger(tmp_path) as reader:
        assert reader.samples(gid(3)) == GroupSamples(kept=(sample(3, 1, size=BIG), kept), unscored=(failed,))
        assert reader.quarantined()[-1] == report
    await record(tmp_path, [Rescored(id=gid(4), number=1, unscored=(sample(4, size=BIG),), report=report)])
    with read_ledger(tmp_path) as reader:
        assert reader.samples(gid(4)) == GroupSamples(unscored=(sample(4, size=BIG),))


async def test_events_that_contradict_the_ledger_are_refused_and_change_nothing(tmp_path):
    await everything(tmp_path)
    stranger = attrs.evolve(better(2), group=attrs.evolve(group(2), attempt=7))
    for event, words in (
        (better(3), "it is quarantined, not ready or delivered or acked"),
        (stranger, "it has attempt 1, not 7"),
        (Rescored(id=gid(0), number=1), "it is acked, not waiting or quarantined"),
        (Rescored(id=gid(4), number=1, kept=(sample(4, 3),)), "the ledger has no such sample"),
        (Retried(id=gid(2)), "it is ready, not quarantined"),
    ):
        with pytest.raises(LedgerError, match=words):
            await record(tmp_path, [event])
    assert await left(tmp_path) == [0, 1, 2, 3, 4]


async def test_a_group_that_is_tried_again_keeps_its_samples_and_forgets_its_tries(tmp_path):
    await record(tmp_path, [pulled(0, 1)], [finished(0), requeued(0, 1, attempts=2)], [quarantined(0, sample(0, 1))])
    await record(tmp_path, [Retried(id=gid(0))])
    async with open_ledger(tmp_path) as ledger:
        first, again = (await ledger.begin(IDENTITY)).unfinished
    assert (first.prompt, again.prompt) == (prompt(1), prompt(0))
    assert (again.attempts, again.samples, again.kept, again.unscored) == (0, (), (sample(0),), (sample(0, 1),))
    assert again.attempt == 1  # the next one must be newer


async def test_a_pass_is_one_of_its_reward_and_its_states_until_it_is_through(tmp_path):
    await everything(tmp_path)
    async with open_ledger(tmp_path, keep_acked=True) as ledger:
        assert (await ledger.begin_rescoring("a")).number == 1
        await ledger.record([better(1)])
        again = await ledger.begin_rescoring("a")
        assert (again.number, again.goes_on, again.left) == (1, True, 4)
        assert again.skipped["scored before the interruption"] == 1
        assert (await ledger.begin_rescoring("a", again=True)).number == 2
        assert (await ledger.begin_rescoring("b")).number == 3
        assert (await ledger.begin_rescoring("b", [State.ACKED])).number == 4
        with pytest.raises(LedgerError, match="under way is 4"):
            await ledger.finish_rescoring(3)
        await ledger.finish_rescoring(4)
        assert (await ledger.begin_rescoring("b", [State.ACKED])).number == 5


async def test_compaction_keeps_what_is_to_be_scored_again_and_gives_back_what_was_replaced(tmp_path):
    """Bodies of acked groups that are kept, and of a quarantined group's samples, move out of segments that are mostly dead."""
    count, rounds = 4, 6
    async with open_ledger(tmp_path, keep_acked=True, sizes=SIZES) as ledger:
        await ledger.begin(IDENTITY)
        await ledger.record([pulled(*range(count + 1))])
        for number in range(count):
            await ledger.record([ready(number, size=BIG), delivered(number, number)])
            await ledger.record([acked(number, number)])
        last = gid(count)
        await ledger.record([finished(count, 0, size=BIG), finished(count, 1, size=BIG), quarantined(count)])
        live = (count + 2) * 490_000
        for reward in range(rounds):
            for number in range(count):
                await ledger.record([better(number, size=BIG, reward=float(reward))])
            kept = tuple(attrs.evolve(sample(count, index, size=BIG), reward=float(reward)) for index in (0, 1))
            await ledger.record([Rescored(id=last, number=1, kept=kept)])
            await ledger.record([])  # the call before returned before its space was reclaimed
            assert sum(one.stat().st_size for one in tmp_path.glob("*.seg")) < live + 2 * SIZES.segment
    with read_ledger(tmp_path) as reader:
        assert [body for _, body in reader.groups()] == [
            better(number, size=BIG, reward=rounds - 1.0).group for number in range(count)
        ]
        assert reader.samples(last).kept == kept


async def test_while_a_ledger_is_scored_again_another_process_is_refused(tmp_path):
    await everything(tmp_path)
    async with open_ledger(tmp_path, keep_acked=True) as ledger:
        await ledger.begin_rescoring("mine")
        with pytest.raises(LedgerError, match="is in use by process"):
            async with open_ledger(tmp_path):
                await trio.lowlevel.checkpoint()
