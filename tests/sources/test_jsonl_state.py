"""Saved positions of a JSONL source: a restored source goes on as the first one would have."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_rollout._core.values import Prompt
from trio_rollout.errors import SourceError
from trio_rollout.sources import IterableSource, JsonlSource
from trio_rollout.testing import run_inline

from ._files import ids, questions, written

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 5)),
        st.tuples(st.just("give back"), st.integers(0, 10**6)),
        st.tuples(st.just("save and restore"), st.booleans()),
    ),
    max_size=12,
)
OPTIONS = st.fixed_dictionaries({
    "epochs": st.integers(1, 3),
    "shuffle_seed": st.none() | st.integers(0, 9),
    "id_key": st.sampled_from([None, "uid"]),
})


def through_json(state: Mapping[str, object]) -> dict[str, Any]:
    """Return the state as a ledger keeps it."""
    text: dict[str, Any] = json.loads(json.dumps(state))
    return text


class Model:
    """A source, and the prompts that were taken from it and not given back."""

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self.path, self.options = path, options
        self.source = self.opened()
        self.held: list[Prompt] = []

    def opened(self) -> JsonlSource:
        """Return a new source over the same file."""
        return JsonlSource(self.path, run_sync=run_inline, **self.options)

    async def step(self, what: str, number: int) -> None:
        """Do one of STEPS."""
        if what == "take":
            self.held += await self.source.take(number)
        elif what == "give back" and self.held:
            prompt = self.held.pop(number % len(self.held))
            await self.source.give_back([prompt])
        elif what == "save and restore":
            state = through_json(self.source.state())
            other = self.opened()
            if number:
                await other.check()
            other.restore(state)
            assert through_json(other.state()) == state | ({} if state["file"] else {"file": other.state()["file"]})
            assert repr(other) == repr(self.source)
            self.source = other


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 7), options=OPTIONS, steps=STEPS)
def test_each_prompt_of_each_epoch_is_given_exactly_once(tmp_path_factory, count, options, steps):
    """The prompts taken and not given back, with those still to come, are every prompt of every epoch once."""
    path = written(tmp_path_factory.mktemp("data") / "a.jsonl", questions(count))

    async def main() -> list[str]:
        model = Model(path, options)
        for step in steps:
            await model.step(*step)
        while more := await model.source.take(3):
            model.held += more
        return ids(model.held)

    names = [f"q{n}" if options["id_key"] else str(n) for n in range(count)]
    assert sorted(trio.run(main)) == sorted(f"{epoch}/{name}" for epoch in range(options["epochs"]) for name in names)


@settings(max_examples=40, deadline=None)
@given(options=OPTIONS, steps=STEPS)
def test_a_restored_source_goes_on_like_the_first(tmp_path_factory, options, steps):
    path = written(tmp_path_factory.mktemp("data") / "a.jsonl", questions(5))

    async def main() -> None:
        model = Model(path, options)
        for step in steps:
            await model.step(*step)
        other = model.opened()
        other.restore(through_json(model.source.state()))
        while taken := list(await model.source.take(3)):
            assert list(await other.take(3)) == taken
        assert await other.take(3) == ()

    trio.run(main)


async def test_a_state_from_before_anything_was_read_fits_every_content(tmp_path: Path):
    """No prompt was taken, so none can be of another file."""
    state = JsonlSource(written(tmp_path / "a.jsonl", questions(3))).state()
    other = JsonlSource(written(tmp_path / "b.jsonl", questions(4)))
    await other.check()

    other.restore(state)

    assert len(await other.take(9)) == 4


async def test_the_file_may_have_moved(tmp_path: Path):
    source = JsonlSource(written(tmp_path / "a.jsonl", questions(3)))
    await source.take(2)
    moved = JsonlSource((tmp_path / "a.jsonl").rename(tmp_path / "b.jsonl"))

    moved.restore(source.state())

    assert ids(await moved.take(9)) == ["0/2"]


async def test_another_size_is_refused_at_once(tmp_path: Path):
    source = JsonlSource(written(tmp_path / "a.jsonl", questions(3)))
    await source.check()
    other = JsonlSource(written(tmp_path / "b.jsonl", questions(4)))
    with pytest.raises(
        SourceError, match=r"the state belongs to another file: the state has \d+ bytes, this source has \d+ bytes"
    ):
        other.restore(source.state())


async def test_another_content_of_the_same_size_is_refused_by_restore_or_by_check(tmp_path: Path):
    """The later of the two calls refuses it; prompts of the other file are never handed out."""
    source = JsonlSource(written(tmp_path / "a.jsonl", [{"prompt": "a"}]))
    await source.take(1)
    path = written(tmp_path / "b.jsonl", [{"prompt": "b"}])
    checked, unchecked = JsonlSource(path), JsonlSource(path)
    await checked.check()

    with pytest.raises(SourceError, match="the state belongs to another file"):
        checked.restore(source.state())
    unchecked.restore(source.state())
    for use in (unchecked.check, unchecked.check, lambda: unchecked.take(1)):
        with pytest.raises(SourceError, match="the state belongs to another file"):
            await use()

    assert ids(await checked.take(5)) == ["0/0"]


@pytest.mark.parametrize(
    "other", [{"epochs": 2}, {"shuffle_seed": 1}, {"id_key": "uid"}, {"prompt_key": "label"}, {"label_key": None}]
)
def test_other_options_are_refused(tmp_path: Path, other: dict[str, Any]):
    path = written(tmp_path / "a.jsonl", questions(3))
    with pytest.raises(SourceError, match="the state belongs to another set of options: the state has "):
        JsonlSource(path, **other).restore(JsonlSource(path).state())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "iterable"}, "can't be restored from a state of kind 'iterable', only 'jsonl'"),
        ({"position": -1}, "damaged state: Expected `int` >= 0 - at `$.position`"),
        ({"epoch": "1"}, "damaged state: Expected `int`, got `str` - at `$.epoch`"),
        ({"returned": [[0]]}, "damaged state: "),
        ({"options": None}, "damaged state: "),
        ({"position": 3}, "damaged state: position 3, but the file has 3 prompts"),
        ({"epoch": 2}, "damaged state: position 1 of epoch 2, of 1 from 0"),
    ],
)
async def test_what_is_no_state_of_it_is_refused_and_changes_nothing(
    tmp_path: Path, change: dict[str, Any], message: str
):
    source = JsonlSource(written(tmp_path / "a.jsonl", questions(3)))
    await source.take(1)
    before = source.state()
    with pytest.raises(SourceError, match=re.escape(message)):
        source.restore(before | change)
    assert source.state() == before


def test_an_empty_state_is_refused(tmp_path: Path):
    source = JsonlSource(written(tmp_path / "a.jsonl", questions(1)))
    with pytest.raises(SourceError, match="a state of kind None"):
        source.restore({})


async def test_a_state_of_another_source_is_refused(tmp_path: Path):
    source = JsonlSource(written(tmp_path / "a.jsonl", questions(1)))
    with pytest.raises(SourceError, match="a state of kind 'iterable'"):
        source.restore(IterableSource([]).state())


async def test_an_unreadable_path_is_named_when_a_state_is_restored(tmp_path: Path):
    path = written(tmp_path / "a.jsonl", questions(1))
    first, second = JsonlSource(path), JsonlSource(path)
    await first.check()
    path.unlink()
    with pytest.raises(SourceError, match="No such file"):
        second.restore(first.state())
