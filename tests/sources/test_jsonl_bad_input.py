"""Each mistake in a JSONL file has an error that names the file, the line and the mistake."""

import re
from pathlib import Path

import pytest

from trio_rollout.errors import SourceError
from trio_rollout.sources import JsonlSource

from ._files import questions, written

GOOD = b'{"prompt": "fine"}\n'

BAD_SECOND_LINES = {
    "not JSON": (b"{prompt: 1}", "line 2: is not JSON: JSON is malformed"),
    "cut short": (b'{"prompt": "x', "line 2: is not JSON: JSON is malformed"),
    "two objects": (b'{"prompt": "x"} {"prompt": "y"}', "line 2: is not JSON"),
    "NaN": (b'{"prompt": "x", "label": NaN}', "line 2: is not JSON"),
    "not UTF-8": (b'{"prompt": "\xff"}', "line 2: is not JSON: Invalid UTF-8"),
    "too deep": (b'{"prompt": ' + b"[" * 100_000, "line 2: is not JSON"),
    "an array": (b"[1, 2]", "line 2: must be a JSON object, got [1, 2]"),
    "a number": (b"5", "line 2: must be a JSON object, got 5"),
    "no prompt": (b'{"text": "x", "label": 1}', "line 2: lacks the key 'prompt' (it has: 'text', 'label')"),
    "nothing": (b"{}", "line 2: lacks the key 'prompt' (it has: none)"),
    "null": (b'{"prompt": null}', "line 2: the prompt under 'prompt' must be a string, a list of token ids or a list"),
    "an object": (b'{"prompt": {"role": "user"}}', "line 2: the prompt under 'prompt' must be a string"),
    "a mixture": (b'{"prompt": [1, "a"]}', "list of token ids or a list of messages, got [1, 'a']"),
    "booleans": (b'{"prompt": [true, false]}', "got [True, False]"),
    "floats": (b'{"prompt": [1.0, 2.0]}', "got [1.0, 2.0]"),
    "empty text": (b'{"prompt": ""}', "line 2: prompt '1': text is empty"),
    "no ids": (b'{"prompt": []}', "line 2: prompt '1': input_ids is empty"),
    "a negative id": (b'{"prompt": [5, -1]}', "line 2: token ids must lie in 0..2147483647, got -1"),
    "a huge id": (b'{"prompt": [5, 4294967296]}', "line 2: token ids must lie in 0..2147483647, got 4294967296"),
    "no role": (b'{"prompt": [{"content": "x"}]}', "line 2: message 0 under 'prompt' lacks a 'role' that is a string"),
    "metadata": (
        b'{"prompt": "x", "metadata": [1]}',
        "line 2: the metadata under 'metadata' must be an object, got [1]",
    ),
}


@pytest.mark.parametrize("what", BAD_SECOND_LINES)
async def test_a_bad_line_is_named(tmp_path: Path, what: str):
    line, message = BAD_SECOND_LINES[what]
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + line + b"\n" + GOOD)

    with pytest.raises(SourceError, match=re.escape(message)) as caught:
        await JsonlSource(path).check()

    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert len(str(caught.value)) < len(str(path)) + 200


@pytest.mark.parametrize(
    ("items", "options", "message"),
    [
        ([{"prompt": "a", "uid": "x"}, {"prompt": "b"}], {"id_key": "uid"}, "line 2: lacks the key 'uid'"),
        (
            [{"prompt": "a", "uid": None}],
            {"id_key": "uid"},
            "line 1: the id under 'uid' must be a string or an integer, got",
        ),
        (
            [{"prompt": "a", "uid": True}],
            {"id_key": "uid"},
            "line 1: the id under 'uid' must be a string or an integer, got",
        ),
        ([{"prompt": "a"}], {"prompt_key": "q"}, "line 1: lacks the key 'q' (it has: 'prompt')"),
        ([{"prompt": "a"}], {"label_key": "answer"}, "line 1: lacks the key 'answer'"),
        ([{"prompt": "a"}], {"metadata_key": "info"}, "line 1: lacks the key 'info'"),
    ],
)
async def test_a_key_that_was_named_must_be_on_every_line(tmp_path: Path, items, options, message: str):
    path = written(tmp_path / "a.jsonl", items)
    with pytest.raises(SourceError, match=re.escape(message)):
        await JsonlSource(path, **options).check()


async def test_two_lines_with_one_id_are_both_named(tmp_path: Path):
    """Blank lines count in line numbers; 7 and "7" are the same id."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "uid": 7}\n\n{"prompt": "b", "uid": 8}\n{"prompt": "c", "uid": "7"}\n')
    with pytest.raises(SourceError, match="lines 1 and 4 have the same id '7'"):
        await JsonlSource(path, id_key="uid").check()


def test_a_missing_file_is_refused_at_construction(tmp_path: Path):
    with pytest.raises(SourceError, match=r"none\.jsonl: No such file or directory"):
        JsonlSource(tmp_path / "none.jsonl")


def test_a_directory_is_refused_at_construction(tmp_path: Path):
    with pytest.raises(SourceError, match="is a directory, not a JSONL file"):
        JsonlSource(tmp_path)


def test_an_empty_file_is_refused_at_construction(tmp_path: Path):
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(SourceError, match=r"a\.jsonl: is empty"):
        JsonlSource(tmp_path / "a.jsonl")


async def test_a_file_of_blank_lines_is_refused(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text("\n \n")
    with pytest.raises(SourceError, match="has only blank lines"):
        await JsonlSource(tmp_path / "a.jsonl").take(1)


async def test_a_bad_last_line_is_found_before_the_first_prompt_is_given(tmp_path: Path):
    path = written(tmp_path / "a.jsonl", questions(500))
    with path.open("a") as file:
        file.write("oops\n")
    source = JsonlSource(path)

    with pytest.raises(SourceError, match="line 501: is not JSON"):
        await source.take(1)
    with pytest.raises(SourceError, match="line 501: is not JSON"):
        await source.take(1)


async def test_a_file_that_was_deleted_after_construction_is_named(tmp_path: Path):
    path = written(tmp_path / "a.jsonl", questions(1))
    source = JsonlSource(path)
    path.unlink()
    with pytest.raises(SourceError, match=r"a\.jsonl: No such file or directory"):
        await source.take(1)
