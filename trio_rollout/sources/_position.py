"""Saved positions: JSON-able data out of attrs values, and back with one message form for what does not fit."""

from collections.abc import Mapping
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from ..errors import SourceError

T = TypeVar("T")
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


def dumped(position: object) -> dict[str, object]:
    """The position as plain dicts, lists, strings and numbers."""
    return msgspec.json.decode(msgspec.json.encode(position), type=dict[str, object])


def loaded(state: Mapping[str, object], shape: type[T], *, kind: str, source: object) -> T:
    """The position that ``dumped`` made this state from.

    Raises:
      SourceError: it is the state of another kind of source, or none at all.

    """
    if state.get("kind") != kind:
        raise SourceError(f"{source!r}: cannot be restored from a state of kind {state.get('kind')!r}, only {kind!r}")
    try:
        return msgspec.convert(state, shape)
    except msgspec.ValidationError as error:
        raise SourceError(f"{source!r}: cannot be restored from a damaged state: {error}") from error


def require_same(saved: object, own: object, *, what: str, source: object) -> None:
    """Refuse a state that was made with other options or from another file.

    Raises:
      SourceError: names both.

    """
    if saved != own:
        raise SourceError(f"{source!r}: the state belongs to another {what}: it has {saved}, this source {own}")
