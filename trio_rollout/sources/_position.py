"""Saved positions of sources: attrs values to JSON data and back, with the same errors in every source."""

from collections.abc import Mapping
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from ..errors import SourceError

T = TypeVar("T")
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


def dumped(position: object) -> dict[str, object]:
    """Return the position as plain dicts, lists, strings and numbers."""
    return msgspec.json.decode(msgspec.json.encode(position), type=dict[str, object])


def loaded(state: Mapping[str, object], shape: type[T], *, kind: str, source: object) -> T:
    """Return the position from which ``dumped`` made this state.

    Raises:
      SourceError: the state belongs to another kind of source, or is damaged.
    """
    if state.get("kind") != kind:
        raise SourceError(f"{source!r}: can't be restored from a state of kind {state.get('kind')!r}, only {kind!r}")
    try:
        return msgspec.convert(state, shape)
    except msgspec.ValidationError as error:
        raise SourceError(f"{source!r}: can't be restored from a damaged state: {error}") from error


def require_same(saved: object, own: object, *, what: str, source: object) -> None:
    """Refuse a state that was saved with other options or from other data.

    Raises:
      SourceError: names both values.
    """
    if saved != own:
        raise SourceError(
            f"{source!r}: the state belongs to another {what}: the state has {saved}, this source has {own}"
        )
