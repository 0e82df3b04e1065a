"""Prompts from an iterable: endless ones, failing ones, and the states that can and can't be restored."""

import itertools
import json
import re
from collections.abc import Iterator

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_rollout._core.values import Prompt
from trio_rollout.errors import SourceError
from trio_rollout.sources import IterableSource

from ._files import ids


def prompt(number: int) -> Prompt:
    return Prompt(id=str(number), text=f"text {number}")


class Numbers:
    """An endless iterable that can be begun again."""

    def __iter__(self) -> Iterator[Prompt]:
        return map(prompt, itertools.count())


async def test_a_list_is_given_once():
    source = IterableSource([prompt(0), prompt(1), prompt(2)])
    assert ids(await source.take(2)) == ["0/0", "0/1"]
    assert ids(await source.take(2)) == ["0/2"]
    assert await source.take(2) == []


async def test_an_endless_iterable_is_advanced_no_further_than_asked():
    given: list[int] = []

    def numbers() -> Iterator[Prompt]:
        for number in itertools.count():
            given.append(number)
            yield prompt(number)

    source = IterableSource(numbers())
    await source.take(3)
    await source.take(2)

    assert given == [0, 1, 2, 3, 4]


async def test_returned_prompts_come_first():
    source = IterableSource(Numbers())
    taken = await source.take(3)
    await source.give_back(taken[1:])
    assert ids(await source.take(4)) == ["0/1", "0/2", "0/3", "0/4"]


async def test_prompts_before_a_failure_come_out_first_then_every_call_raises_the_error():
    """A generator that has raised looks like one that has ended; it must not be taken for the end of data."""

    def failing() -> Iterator[Prompt]:
        yield prompt(0)
        raise OSError("disk gone")

    source = IterableSource(failing())
    assert ids(await source.take(3)) == ["0/0"]
    for _ in range(2):
        with pytest.raises(SourceError, match="the iterable failed: OSError: disk gone") as caught:
            await source.take(3)
        assert isinstance(caught.value.__cause__, OSError)


async def test_after_a_failure_returned_prompts_still_come_out():
    source = IterableSource([prompt(0), "oops"])  # type: ignore[list-item]  what is refused
    taken = await source.take(2)
    await source.give_back(taken)
    assert ids(await source.take(2)) == ["0/0"]
    with pytest.raises(SourceError, match="TypeError: item 1 is of type str, not a Prompt"):
        await source.take(1)


def test_what_is_no_iterable_is_refused():
    with pytest.raises(SourceError, match="needs an iterable of Prompt, got int"):
        IterableSource(5)  # type: ignore[arg-type]  what is refused


@settings(max_examples=60, deadline=None)
@given(data=st.data(), count=st.none() | st.integers(0, 9))
def test_a_restored_source_goes_on_like_the_first(data: st.DataObject, count: int | None):
    prompts = Numbers() if count is None else [prompt(number) for number in range(count)]

    async def main() -> None:
        source = IterableSource(prompts)
        held = list(await source.take(data.draw(st.integers(1, 9))))
        back = [item for item in held if data.draw(st.booleans())]
        await source.give_back(back)
        state = json.loads(json.dumps(source.state()))
        other = IterableSource(prompts)
        other.restore(state)
        assert other.state() == source.state() == state
        assert list(await other.take(12)) == list(await source.take(12))
        source.restore(state)
        assert source.state() == state

    trio.run(main)


async def test_long_sequences_are_restored():
    """The sequence is longer than a restore holds in memory at once."""
    source = IterableSource(Numbers())
    taken = await source.take(5000)
    await source.give_back([taken[7], taken[4711]])
    other = IterableSource(Numbers())

    other.restore(source.state())

    assert ids(await other.take(3)) == ["0/7", "0/4711", "0/5000"]


@pytest.mark.parametrize(
    ("prompts", "change", "message"),
    [
        ([prompt(0), prompt(5)], {}, "the state belongs to another sequence of prompts (count, digest)"),
        ([prompt(0)], {}, "the state belongs to another sequence of prompts (count, digest): the state has (2, "),
        ([prompt(0), None], {}, "the state belongs to another sequence of prompts"),
        ([prompt(0), prompt(1)], {"kind": "jsonl"}, "can't be restored from a state of kind 'jsonl', only 'iterable'"),
        ([prompt(0), prompt(1)], {"taken": -1}, "damaged state: Expected `int` >= 0 - at `$.taken`"),
        ([prompt(0), prompt(1)], {"returned": [[0, "9"]]}, "the state gives back prompts that were never taken: 0/9"),
    ],
)
async def test_what_does_not_fit_is_refused_and_changes_nothing(prompts, change, message: str):
    first = IterableSource([prompt(0), prompt(1)])
    await first.take(2)
    other = IterableSource(prompts)
    await other.take(1)
    before = other.state()

    with pytest.raises(SourceError, match=re.escape(message)):
        other.restore(first.state() | change)

    assert other.state() == before
    assert repr(other) == "<IterableSource 1 taken, 0 returned>"


async def test_an_advanced_iterator_can_not_be_restored_a_fresh_one_can():
    first, fresh = IterableSource(iter(Numbers())), IterableSource(iter(Numbers()))
    await first.take(2)
    state = first.state()
    with pytest.raises(SourceError, match="an iterator can't be restored once it was advanced; pass an iterable"):
        first.restore(state)

    fresh.restore(state)

    assert ids(await fresh.take(1)) == ["0/2"]
