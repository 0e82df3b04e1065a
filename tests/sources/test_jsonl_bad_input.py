"""Each mistake in a JSONL file has an error that names the file, the line and the mistake."""

import bz2
import gzip
import lzma
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
    "NaN": (b'{"prompt": "x", "label": NaN}', "line 2: is not JSON: it has NaN; write null"),
    "an infinity": (b'{"prompt": "x", "metadata": {"a": [-Infinity]}}', "line 2: is not JSON: it has -Infinity; write"),
    "half a character": (b'{"prompt": "x \\ud83d"}', "line 2: is no text: it has half a character, \\ud83d (a lone"),
    "a Python dict": (b"{'prompt': 'x'}", "line 2: is not JSON: it is a Python dict"),
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


LINE = '{"prompt": "x"}\n'
PRETTY = '{\n  "prompt": "x"\n}\n'
FILES = {
    "gzip": (gzip.compress(LINE.encode()), "this is a gzip file, not a JSONL file"),
    "bzip2": (bz2.compress(LINE.encode()), "this is a bzip2 file"),
    "xz": (lzma.compress(LINE.encode()), "this is an xz file"),
    "zstd": (b"\x28\xb5\x2f\xfd\x00\x01\n", "this is a zstd file"),
    "zip": (b"PK\x03\x04\x14\x00\n", "this is a zip file"),
    "Parquet": (b"PAR1\x15\x04\x15\n\x00PAR1", "this is a Parquet file, not a JSONL file; convert it first"),
    "Arrow": (b"ARROW1\x00\x00\n", "this is an Arrow file"),
    "UTF-16": (LINE.encode("utf-16"), "this is UTF-16"),
    "UTF-16 without a mark": (LINE.encode("utf-16-le"), "this is UTF-16 or UTF-32; a JSONL file is UTF-8"),
    "UTF-16, big-endian": (LINE.encode("utf-16-be"), "this is UTF-16 or UTF-32"),
    "UTF-32": (LINE.encode("utf-32"), "this is UTF-16"),
    "an array on one line": (b'[{"prompt": "x"}, {"prompt": "y"}]\n', "line 1: this is a JSON array"),
    "an array over several lines": (b'[\n{"prompt": "x"},\n{"prompt": "y"}\n]\n', "line 1: this is a JSON array"),
    "an array that begins on the line": (b'[{"prompt": "x"},\n{"prompt": "y"}]\n', "line 1: this is a JSON array"),
    "an object over several lines": (PRETTY.encode(), "line 1: this is a JSON object over several lines"),
}


@pytest.mark.parametrize("what", FILES)
async def test_f168_a_file_of_another_kind_is_said_to_be_one(tmp_path: Path, what: str):
    data, words = FILES[what]
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    with pytest.raises(SourceError, match=re.escape(words)) as caught:
        await JsonlSource(path).check()
    assert str(caught.value).startswith(f"{path}, line 1: ")


@pytest.mark.parametrize("what", ["NaN", "an infinity", "half a character", "a Python dict"])
async def test_f168_what_only_looks_like_json_is_named(tmp_path: Path, what: str):
    """On the first line too, which other kinds of files are told by."""
    line, message = BAD_SECOND_LINES[what]
    path = tmp_path / "a.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(SourceError, match=re.escape(message.replace("line 2", "line 1"))):
        await JsonlSource(path).check()
