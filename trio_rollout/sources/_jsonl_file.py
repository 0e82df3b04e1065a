"""A JSONL file on disk: one full check, then reads of single items by their byte offsets. An item is a prompt as JSON.

Blocking, so call it in a thread. Only offsets stay in memory, 8 bytes an item, and 16 more for hashes of ids where the items
have ids. The file must not change while it is in use: every read compares its size and modification time.
"""

import json
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import msgspec
import numpy as np
import numpy.typing as npt

from .._core.values import Prompt
from ..errors import SourceError
from ..tokenizer._messages import normalized, normalized_tools

DEFAULT_LABEL_KEY = "label"
DEFAULT_METADATA_KEY = "metadata"
DEFAULT_TOOLS_KEY = "tools"
_MOST_SHOWN = 80  # characters of a wrong value in an error
_BOM = b"\xef\xbb\xbf"
_ARRAY = "this is a JSON array; a JSONL file has one object a line, without brackets and commas around the objects"
_KINDS = {  # by the first bytes of a file
    b"\x1f\x8b": "a gzip file",
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ": "an xz file",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"PK\x03\x04": "a zip file",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x93NUMPY": "a numpy file",
    b"SQLite format 3": "an SQLite database",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_BUFFER = 1 << 20  # bytes, for the scan, which reads the file once from end to end


@attrs.frozen(kw_only=True)
class Keys:
    """The keys of an item. An item may lack the default keys of label, metadata and tools."""

    prompt: str
    label: str | None
    metadata: str | None
    tools: str | None
    id: str | None


@attrs.frozen(kw_only=True)
class FileMark:
    """The content of a file: its size in bytes and a digest."""

    size: int
    digest: str


@attrs.frozen(kw_only=True, eq=False)
class JsonlFile:
    """A checked file. ``starts`` are the byte offsets of the items; item ``n`` ends before ``starts[n + 1]``."""

    path: Path
    keys: Keys
    mark: FileMark
    mtime_ns: int
    starts: npt.NDArray[np.int64]
    id_hashes: npt.NDArray[np.int64]
    """Sorted hashes of the ids; ``id_items`` has the items' numbers. Both are empty where the ids are item numbers."""
    id_items: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def read(self, wanted: Iterable[tuple[int, int | str]]) -> list[Prompt]:
        """Return the prompts of these (epoch, item number or id) pairs, in this order.

        Raises:
          SourceError: the file is gone, has changed since it was checked, or has no item with this id.
        """
        try:
            with self.path.open("rb") as file:
                self._require_unchanged(file)
                return [self._prompt(file, epoch, which) for epoch, which in wanted]
        except (OSError, TypeError, ValueError) as error:
            raise SourceError(f"{self.path}: could not be read again: {error}") from error

    def _prompt(self, file: BinaryIO, epoch: int, which: int | str) -> Prompt:
        number = which if isinstance(which, int) else self._number_of(file, which)
        return prompt_of(self._item(file, number), self.keys, number=number, epoch=epoch)

    def _number_of(self, file: BinaryIO, prompt_id: str) -> int:
        for number in self._candidates(prompt_id):
            if id_of(self._item(file, number), self.keys, number) == prompt_id:
                return number
        raise SourceError(f"{self.path}: has no prompt with the id {prompt_id!r}")

    def _candidates(self, prompt_id: str) -> Iterator[int]:
        if self.keys.id is None:
            if prompt_id.isdecimal() and str(int(prompt_id)) == prompt_id and int(prompt_id) < len(self):
                yield int(prompt_id)
            return
        wanted = hash(prompt_id)
        first, stop = np.searchsorted(self.id_hashes, wanted, "left"), np.searchsorted(self.id_hashes, wanted, "right")
        yield from map(int, self.id_items[first:stop])

    def _item(self, file: BinaryIO, number: int) -> object:
        start, stop = int(self.starts[number]), int(self.starts[number + 1])
        file.seek(start)
        return msgspec.json.decode(file.read(stop - start))

    def _require_unchanged(self, file: BinaryIO) -> None:
        now = os.fstat(file.fileno())
        if (now.st_size, now.st_mtime_ns) != (self.mark.size, self.mtime_ns):
            raise SourceError(
                f"{self.path}: changed while it was in use: {self.mark.size} bytes when it was checked, {now.st_size} now"
            )


def require_file(path: Path) -> os.stat_result:
    """Return the status of a file that exists and is not empty.

    Raises:
      SourceError: there is no such file, or it is empty.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror or error}") from error
    if path.is_dir():
        raise SourceError(f"{path}: is a directory, not a JSONL file")
    if status.st_size == 0:
        raise SourceError(f"{path}: is empty")
    return status


def scan(path: Path, keys: Keys) -> JsonlFile:
    """Read the whole file once and check every line.

    Raises:
      SourceError: a line is no prompt, two lines have the same id, or the file is empty or unreadable. The message names
        the file, the line and the mistake.
    """
    status = require_file(path)
    digest = blake2b(digest_size=16)
    starts, hashes = array("q"), array("q")
    offset = 0
    try:
        with path.open("rb", buffering=_BUFFER) as file:
            for line_number, line in enumerate(file, 1):
                digest.update(line)
                text_at = len(_BOM) if line_number == 1 and line.startswith(_BOM) else 0
                if not line[text_at:].isspace() and len(line) > text_at:
                    prompt = _checked(path, line_number, line[text_at:], keys, len(starts))
                    starts.append(offset + text_at)
                    if keys.id is not None:
                        hashes.append(hash(prompt.id))
                offset += len(line)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror or error}") from error
    if not starts:
        raise SourceError(f"{path}: has only blank lines")
    starts.append(offset)
    mark = FileMark(size=offset, digest=digest.hexdigest())
    if offset != status.st_size:
        raise SourceError(f"{path}: changed while it was read: {status.st_size} bytes at first, {offset} at the end")
    return _indexed(path, keys, mark, status.st_mtime_ns, starts, hashes)


def _checked(path: Path, line_number: int, line: bytes, keys: Keys, number: int) -> Prompt:
    try:
        item = msgspec.json.decode(line)
        if line_number == 1 and isinstance(item, list):
            raise SourceError(f"{path}, line 1: {_ARRAY}")
        return prompt_of(item, keys, number=number, epoch=0)
    except (msgspec.DecodeError, RecursionError) as error:
        why = _what_it_is(line, first=line_number == 1) or f"is not JSON: {error}"
        raise SourceError(f"{path}, line {line_number}: {why}") from error
    except (TypeError, ValueError) as error:
        raise SourceError(f"{path}, line {line_number}: {error}") from error


def _what_it_is(line: bytes, *, first: bool) -> str | None:
    """Return what a line is that is no JSON; None if nothing better is known. ``first``: it begins the file."""
    kind = _kind_of_file(line) if first else None
    if kind is None and line.lstrip().startswith(b"{'"):
        kind = "is not JSON: it is a Python dict; JSON has double quotes"
    return kind or _foreign_json(line)


def _kind_of_file(line: bytes) -> str | None:
    """Return the kind of a file that begins with this line, if that kind is known and is no JSONL."""
    for begin, what in _KINDS.items():
        if line.startswith(begin):
            return f"this is {what}, not a JSONL file; convert it first"
    if b"\0" in line[:2]:
        return "this is UTF-16 or UTF-32; a JSONL file is UTF-8"
    if line.lstrip().startswith(b"["):
        return _ARRAY
    return "this is a JSON object over several lines; a JSONL file has one a line" if line.strip() == b"{" else None


def _foreign_json(line: bytes) -> str | None:
    """Return what Python's parser takes in this line, and JSON does not have."""
    constants: list[str] = []
    try:
        item = json.loads(line, parse_constant=constants.append)
        json.dumps(item, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return f"is no text: it has half a character, \\u{ord(error.object[error.start]):04x} (a lone surrogate)"
    except (ValueError, RecursionError):
        return None
    return f"is not JSON: it has {constants[0]}; write null" if constants else None


def _indexed(
    path: Path, keys: Keys, mark: FileMark, mtime_ns: int, starts: "array[int]", hashes: "array[int]"
) -> JsonlFile:
    found = np.frombuffer(hashes, np.int64)
    order = np.argsort(found, kind="stable")
    index = JsonlFile(
        path=path,
        keys=keys,
        mark=mark,
        mtime_ns=mtime_ns,
        starts=np.frombuffer(starts, np.int64),
        id_hashes=found[order],
        id_items=order,
    )
    _require_unique_ids(index)
    return index


def _require_unique_ids(index: JsonlFile) -> None:
    """Refuse two items with the same id. Only items with the same hash are read again."""
    (equal,) = np.nonzero(index.id_hashes[1:] == index.id_hashes[:-1])
    if not equal.size:
        return
    seen: dict[str, int] = {}
    with index.path.open("rb") as file:
        for number in sorted({int(n) for at in equal for n in index.id_items[at : at + 2]}):
            found = id_of(index._item(file, number), index.keys, number)
            if found in seen:
                lines = [_line_at(file, int(index.starts[n])) for n in (seen[found], number)]
                raise SourceError(f"{index.path}: lines {lines[0]} and {lines[1]} have the same id {found!r}")
            seen[found] = number


def _line_at(file: BinaryIO, offset: int) -> int:
    """Return the number of the line, from 1, that has this byte."""
    file.seek(0)
    return file.read(offset).count(b"\n") + 1


def id_of(item: object, keys: Keys, number: int) -> str:
    """Return the id of item ``number``: the value under the id key, or the number itself if there is no id key.

    Raises:
      ValueError, TypeError: the item is no object, lacks the key, or has neither a string nor an integer there.
    """
    if keys.id is None:
        return str(number)
    value = _member(_as_object(item), keys.id)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError(f"the id under {keys.id!r} must be a string or an integer, got {_shown(value)}")
    return str(value)


def prompt_of(item: object, keys: Keys, *, number: int, epoch: int) -> Prompt:
    """Return the prompt that an item describes.

    Raises:
      ValueError, TypeError: the item describes no prompt; the message says why, the caller adds the line.
    """
    fields = _as_object(item)
    prompt = _member(fields, keys.prompt)
    return Prompt(
        id=id_of(fields, keys, number),
        label=_optional(fields, keys.label, DEFAULT_LABEL_KEY),
        metadata=_metadata(fields, keys.metadata),
        tools=_tools(fields, keys),
        epoch=epoch,
        **{_kind(prompt, keys.prompt): prompt},
    )


def _as_object(item: object) -> Mapping[str, Any]:
    if not isinstance(item, dict):
        raise TypeError(f"must be a JSON object, got {_shown(item)}")
    return item


def _member(item: Mapping[str, Any], key: str) -> Any:
    if key not in item:
        raise ValueError(f"lacks the key {key!r} (it has: {', '.join(map(repr, item)) or 'none'})")
    return item[key]


def _optional(item: Mapping[str, Any], key: str | None, default_key: str) -> Any:
    """Return an optional value. A key that the user named is not optional: a typo would give None for every item."""
    if key is None:
        return None
    return item.get(key) if key == default_key else _member(item, key)


def _metadata(item: Mapping[str, Any], key: str | None) -> dict[str, Any]:
    value = _optional(item, key, DEFAULT_METADATA_KEY)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TypeError(f"the metadata under {key!r} must be an object, got {_shown(value)}")
    return value


def _tools(item: Mapping[str, Any], keys: Keys) -> list[dict[str, Any]]:
    """Return the tools, which only a chat template shows to a model."""
    value = _optional(item, keys.tools, DEFAULT_TOOLS_KEY)
    if value is None:
        return []
    try:
        tools = normalized_tools(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the tools under {keys.tools!r}: {error}") from error
    if tools and _kind(item[keys.prompt], keys.prompt) != "messages":
        raise ValueError(f"the tools under {keys.tools!r} need a prompt of messages under {keys.prompt!r}")
    return tools


def _kind(value: object, key: str) -> str:
    """Return the field of Prompt that takes this value."""
    if isinstance(value, str):
        return "text"
    if isinstance(value, list):
        types = set(map(type, value))
        if types <= {int}:
            return "input_ids"
        if types == {dict}:
            normalized(value, under=f" under {key!r}")  # checked only: agents send messages on as they are
            return "messages"
    raise ValueError(
        f"the prompt under {key!r} must be a string, a list of token ids or a list of messages, got {_shown(value)}"
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
