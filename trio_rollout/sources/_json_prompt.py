"""One item of a data set, a JSON object, as a prompt. A JSONL file has one item a line."""

from collections.abc import Mapping
from typing import Any

import attrs

from .._core.values import Prompt

DEFAULT_LABEL_KEY = "label"
DEFAULT_METADATA_KEY = "metadata"

_MOST_SHOWN = 80  # characters of a wrong value in an error


@attrs.frozen(kw_only=True)
class Keys:
    """The keys of prompt, label, metadata and id in an item. An item may lack the default keys of label and metadata."""

    prompt: str
    label: str | None
    metadata: str | None
    id: str | None


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


def _kind(value: object, key: str) -> str:
    """Return the field of Prompt that takes this value."""
    if isinstance(value, str):
        return "text"
    if isinstance(value, list):
        types = set(map(type, value))
        if types <= {int}:
            return "input_ids"
        if types == {dict}:
            _require_roles(value, key)
            return "messages"
    raise ValueError(
        f"the prompt under {key!r} must be a string, a list of token ids or a list of messages, got {_shown(value)}"
    )


def _require_roles(messages: list[dict[str, Any]], key: str) -> None:
    for place, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise TypeError(f"message {place} under {key!r} lacks a 'role' that is a string: {_shown(message)}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
