"""User data as msgpack: labels, metadata and extras that users attach, written so that they come back equal.

What JSON can say is stored as it is, and so are integers of any size, lone surrogates (models produce them), numpy
numbers (as Python numbers) and numeric arrays. Tuples come back as lists. Anything else is refused with the path to it.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

_DEEPEST = 200  # far above any real data, far below Python's recursion limit
_BIG_INT, _SURROGATES, _ARRAY = 1, 2, 3
_INT64 = range(-(2**63), 2**64)


class UnencodableError(Exception):
    """A value that has no place on disk. ``path`` leads to it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.path: list[str] = []

    def __str__(self) -> str:
        return f"{''.join(self.path)}: {self.args[0]}"


def text(value: str) -> str | msgspec.msgpack.Ext:
    """A string as msgpack can hold it, lone surrogates included."""
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return msgspec.msgpack.Ext(_SURROGATES, value.encode("utf-8", "surrogatepass"))
    return value


def array(value: npt.NDArray[Any]) -> list[Any]:
    """A numeric array as dtype, shape and bytes."""
    if value.dtype.kind not in "biufcmMSU":
        raise UnencodableError(f"an array of dtype {value.dtype} can't be stored, only numbers, times and strings")
    return [value.dtype.str, list(value.shape), value.tobytes()]


def array_from(stored: list[Any]) -> npt.NDArray[Any]:
    """The array of ``array``, read-only."""
    dtype, shape, data = stored
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)


def _number(value: int) -> int | msgspec.msgpack.Ext:
    return int(value) if value in _INT64 else msgspec.msgpack.Ext(_BIG_INT, hex(value).encode())


def _key(key: object) -> object:
    if isinstance(key, str):
        found = text(key)
        if isinstance(found, str):
            return found
    elif key is None or isinstance(key, bool | float) or (isinstance(key, int) and key in _INT64):
        return key
    raise UnencodableError(f"the key {key!r} can't be stored, only valid text and 64-bit numbers")


def _items(value: Mapping[Any, object], depth: int) -> dict[object, object]:
    found: dict[object, object] = {}
    key: object = None
    try:
        for key, inner in value.items():
            found[_key(key)] = plain(inner, depth + 1)
    except UnencodableError as error:
        error.path.insert(0, f"[{key!r}]")
        raise
    return found


def _elements(value: list[Any] | tuple[Any, ...], depth: int) -> list[object]:
    found: list[object] = []
    try:
        for inner in value:
            found.append(plain(inner, depth + 1))  # ruff: ignore[manual-list-comprehension]  the index is needed on failure
    except UnencodableError as error:
        error.path.insert(0, f"[{len(found)}]")
        raise
    return found


def _scalar(value: str | float | np.generic) -> object:
    """Bases of the JSON scalars, their subclasses included (string enums, numpy numbers)."""
    match value:
        case str():
            return text("".join(value) if type(value) is not str else value)
        case int():
            return _number(value)
        case float():
            return float(value)
        case _ if value.dtype.kind in "biuf":
            return float(value) if value.dtype.char == "g" else _scalar(value.item())  # g: wider than any in Python
    raise UnencodableError(f"a number of dtype {value.dtype} can't be stored")


def plain(value: object, depth: int = 0) -> object:
    """The value as the msgpack encoder takes it.

    Raises:
      UnencodableError: names the part that can't be stored.

    """
    if value is None or isinstance(value, bool):
        return value
    if depth > _DEEPEST:
        raise UnencodableError(f"nested deeper than {_DEEPEST} levels")
    if isinstance(value, str | int | float | np.generic):
        return _scalar(value)
    if isinstance(value, Mapping):
        return _items(value, depth)
    if isinstance(value, list | tuple):
        return _elements(value, depth)
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(array(value)))
    raise UnencodableError(f"a value of type {type(value).__qualname__} can't be stored, only what JSON can say")


def _restored(code: int, data: memoryview) -> object:
    match code:
        case 1:
            return int(bytes(data), 16)
        case 2:
            return bytes(data).decode("utf-8", "surrogatepass")
        case 3:
            return array_from(msgspec.msgpack.decode(data))
    raise AssertionError(f"unknown extension type {code}")


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ext_hook=_restored)


def packed(value: object) -> bytes:
    """Plain data as msgpack."""
    return _encoder.encode(value)


def unpacked(data: bytes | memoryview) -> Any:
    """What ``packed`` was given."""
    return _decoder.decode(data)
