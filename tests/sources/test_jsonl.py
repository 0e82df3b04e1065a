"""Prompts from a JSONL file: three kinds of them, ids, epochs, orders."""

import json
from pathlib import Path

import numpy as np
import pytest
import trio

from trio_rollout.errors import SettingsError, SourceError
from trio_rollout.sources import JsonlSource
from trio_rollout.testing import run_inline

from ._files import ids, questions, written


async def test_the_kind_of_a_prompt_follows_its_value(tmp_path: Path):
    """A list of ints is ids, a string is text, a list of objects is messages; label and metadata come along."""
    messages = [{"role": "user", "content": "hi"}]
    path = written(
        tmp_path / "a.jsonl",
        [{"prompt": [1, 2, 3], "label": 7, "metadata": {"k": [1]}}, {"prompt": "text"}, {"prompt": messages, "x": 1}],
    )

    one, two, three = await JsonlSource(path).take(10)

    assert one.input_ids is not None
    assert np.array_equal(one.input_ids, [1, 2, 3])
    assert (one.label, one.metadata) == (7, {"k": [1]})
    assert (two.text, two.label, two.metadata) == ("text", None, {})
    assert three.messages == ({"role": "user", "content": "hi"},)
    assert ids([one, two, three]) == ["0/0", "0/1", "0/2"]


async def test_keys_can_be_named(tmp_path: Path):
    path = written(tmp_path / "a.jsonl", [{"q": "x", "gold": 1, "info": {"a": 1}, "uid": 12}])

    (prompt,) = await JsonlSource(path, prompt_key="q", label_key="gold", metadata_key="info", id_key="uid").take(1)

    assert (prompt.id, prompt.text, prompt.label, prompt.metadata) == ("12", "x", 1, {"a": 1})


async def test_no_label_and_no_metadata_are_read_where_their_key_is_none(tmp_path: Path):
    path = written(tmp_path / "a.jsonl", [{"prompt": "x", "label": 1, "metadata": "not even an object"}])

    (prompt,) = await JsonlSource(path, label_key=None, metadata_key=None).take(1)

    assert (prompt.label, prompt.metadata) == (None, {})


async def test_blank_lines_a_byte_order_mark_and_windows_line_ends_are_no_items(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \n{"prompt": "b"}\r\n{"prompt": "\xc3\xa9"}')

    prompts = await JsonlSource(path).take(10)

    assert [(prompt.id, prompt.text) for prompt in prompts] == [("0", "a"), ("1", "b"), ("2", "é")]


async def test_epochs_follow_each_other_within_one_take_then_the_data_ends(tmp_path: Path):
    source = JsonlSource(written(tmp_path / "a.jsonl", questions(3)), epochs=2)

    assert ids(await source.take(4)) == ["0/0", "0/1", "0/2", "1/0"]
    assert ids(await source.take(4)) == ["1/1", "1/2"]
    assert await source.take(4) == ()
    assert await source.take(4) == ()
    assert source.total == 6


async def test_without_a_number_of_epochs_it_never_ends(tmp_path: Path):
    source = JsonlSource(written(tmp_path / "a.jsonl", questions(2)), epochs=None)

    assert ids(await source.take(7))[-1] == "3/0"
    assert source.total is None


async def test_shuffled_each_epoch_has_an_order_of_its_own_with_every_prompt_once(tmp_path: Path):
    path = written(tmp_path / "a.jsonl", questions(20))
    source = JsonlSource(path, id_key="uid", epochs=3, shuffle_seed=5)

    epochs = [[prompt.id for prompt in await source.take(20)] for _ in range(3)]

    assert all(sorted(epoch) == sorted(f"q{n}" for n in range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


async def test_the_order_of_a_seed_is_the_same_everywhere(tmp_path: Path):
    """Saved positions rely on these orders, so they must not change."""
    path = written(tmp_path / "a.jsonl", questions(8))

    order = [prompt.id for prompt in await JsonlSource(path, shuffle_seed=0).take(8)]

    assert "".join(order) == "32160745"


async def test_returned_prompts_come_first_the_last_returned_before_the_others(tmp_path: Path):
    source = JsonlSource(written(tmp_path / "a.jsonl", questions(6)), id_key="uid")
    taken = list(await source.take(5))

    await source.give_back(taken[1:3])
    await source.give_back(taken[4:])
    again = await source.take(10)

    assert ids(again) == ["0/q4", "0/q1", "0/q2", "0/q5"]
    assert list(again[:3]) == [taken[4], *taken[1:3]]


async def test_after_the_end_a_returned_prompt_comes_out_once_more(tmp_path: Path):
    source = JsonlSource(written(tmp_path / "a.jsonl", questions(1)))
    taken = await source.take(2)
    assert await source.take(1) == ()

    await source.give_back(taken)

    assert ids(await source.take(2)) == ["0/0"]
    assert await source.take(1) == ()


async def test_giving_back_twice_is_refused_and_changes_nothing(tmp_path: Path):
    source = JsonlSource(written(tmp_path / "a.jsonl", questions(3)))
    taken = await source.take(2)
    await source.give_back(taken[:1])
    before = source.state()

    with pytest.raises(SourceError, match="prompt 0/0 was given back twice"):
        await source.give_back(taken)
    with pytest.raises(SourceError, match="prompt 0/1 was given back twice"):
        await source.give_back([taken[1], taken[1]])

    assert source.state() == before


async def test_a_file_that_changes_while_it_is_used_is_an_error(tmp_path: Path):
    path = written(tmp_path / "a.jsonl", questions(3))
    source = JsonlSource(path)
    await source.take(1)

    written(path, questions(4))
    with pytest.raises(SourceError, match=r"a\.jsonl: changed while it was in use: \d+ bytes when .*, \d+ now"):
        await source.take(1)
    path.unlink()
    with pytest.raises(SourceError, match=r"could not be read again: .*No such file"):
        await source.take(1)


async def test_a_returned_prompt_of_another_source_is_found_out_by_the_next_take(tmp_path: Path):
    source = JsonlSource(written(tmp_path / "a.jsonl", questions(2)), id_key="uid")
    other = JsonlSource(written(tmp_path / "b.jsonl", [{"prompt": "x", "uid": "other"}]), id_key="uid")

    await source.give_back(await other.take(1))

    with pytest.raises(SourceError, match="has no prompt with the id 'other'"):
        await source.take(1)


async def test_ids_that_share_a_hash_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Only hashes are kept in memory, so two ids may meet: they are read again before anybody speaks of duplicates."""
    path = written(tmp_path / "a.jsonl", questions(5))
    source = JsonlSource(path, id_key="uid")
    await source.check()
    assert source._file is not None
    source._file.id_hashes[:] = hash("q3")

    await source.give_back([(await source.take(4))[3]])

    assert ids(await source.take(1)) == ["0/q3"]


def test_repr_says_where_it_is(tmp_path: Path):
    path = written(tmp_path / "a.jsonl", questions(1))
    assert repr(JsonlSource(path)) == f"<JsonlSource {str(path)!r} epoch 0, position 0, 0 returned>"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "JsonlSource.epochs: got 0, allowed: an integer >= 1"),
        ({"shuffle_seed": -1}, "JsonlSource.shuffle_seed: got -1, allowed: an integer >= 0"),
        ({"epochs": True}, "JsonlSource.epochs: got True"),
    ],
)
def test_options_are_checked_at_construction(tmp_path: Path, options: dict[str, int], message: str):
    path = written(tmp_path / "a.jsonl", questions(1))
    with pytest.raises(SettingsError) as caught:
        JsonlSource(path, **options)
    assert message in str(caught.value)


async def test_it_never_blocks_the_loop(tmp_path: Path):
    """Every access to the file after construction goes through ``run_sync``."""
    calls: list[str] = []

    async def run_sync(fn, /, *args):
        calls.append(fn.__name__)
        return await run_inline(fn, *args)

    source = JsonlSource(written(tmp_path / "a.jsonl", questions(3)), run_sync=run_sync)
    await source.give_back(await source.take(2))
    await source.take(3)

    assert calls == ["scan", "_read", "_read"]


def test_a_large_file_costs_few_bytes_an_item(tmp_path: Path):
    """An item costs 8 bytes, or 24 with ids: the items stay on disk."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in questions(1000)))
    source = JsonlSource(path, id_key="uid", run_sync=run_inline)

    trio.run(source.check)

    assert source._file is not None
    kept = source._file.starts.nbytes + source._file.id_hashes.nbytes + source._file.id_items.nbytes
    assert kept <= 24 * 1001
