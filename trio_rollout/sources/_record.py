"""One record of a data set, a JSON object, as a prompt."""

from collections.abc import Mapping
from typing import Any

import attrs

from .._core.values import Prompt

DEFAULT_LABEL_KEY = "label"
DEFAULT_METADATA_KEY = "metadata"

_SHOWN = 80  # characters of a wrong value that a message repeats


@attrs.frozen(kw_only=True)
class Keys:
    """Where a record keeps what. The keys of label and metadata may be absent if they are the default ones."""

    prompt: str
    label: str | None
    metadata: str | None
    id: str | None


def record_id(record: object, keys: Keys, number: int) -> str:
    """The id of record ``number``: the value under the id key, or without such a key the number itself.

    Raises:
      ValueError, TypeError: the record is no object, lacks the key, or has neither a string nor an integer there.

    """
    if keys.id is None:
        return str(number)
    value = _member(_as_object(record), keys.id)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError(f"the id under {keys.id!r} must be a string or an integer, got {_shown(value)}")
    return str(value)


def prompt_of(record: object, keys: Keys, *, number: int, epoch: int) -> Prompt:
    """The prompt that a record describes.

    Raises:
      ValueError, TypeError: it describes none; the message says why, but not where.

    """
    fields = _as_object(record)
    prompt = _member(fields, keys.prompt)
    return Prompt(
        id=record_id(fields, keys, number),
        label=_optional(fields, keys.label, DEFAULT_LABEL_KEY),
        metadata=_metadata(fields, keys.metadata),
        epoch=epoch,
        **{_kind(prompt, keys.prompt): prompt},
    )


def _as_object(record: object) -> Mapping[str, Any]:
    if not isinstance(record, dict):
        raise TypeError(f"must be a JSON object, got {_shown(record)}")
    return record


def _member(record: Mapping[str, Any], key: str) -> Any:
    if key not in record:
        raise ValueError(f"lacks the key {key!r} (it has: {', '.join(map(repr, record)) or 'none'})")
    return record[key]


def _optional(record: Mapping[str, Any], key: str | None, default_key: str) -> Any:
    """A key that was named by the user must be there: a typing error would give None for every record."""
    if key is None:
        return None
    return record.get(key) if key == default_key else _member(record, key)


def _metadata(record: Mapping[str, Any], key: str | None) -> dict[str, Any]:
    value = _optional(record, key, DEFAULT_METADATA_KEY)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TypeError(f"the metadata under {key!r} must be an object, got {_shown(value)}")
    return value


def _kind(value: object, key: str) -> str:
    """Which of the three inputs of a Prompt this value is."""
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
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
