"""Validators of settings: one message form, ``field: got value, allowed range``."""

import difflib
import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import attrs

from ..errors import SettingsError, SettingsTypeError

T = TypeVar("T")

Validator: TypeAlias = Callable[[Any, "attrs.Attribute[Any]", Any], None]


def _refuse(instance: object, field: str, value: object, allowed: str) -> None:
    raise SettingsError(f"{type(instance).__name__}.{field}: got {value!r}, allowed: {allowed}")


def names_suggested(kind: type[T]) -> type[T]:
    """Decorate a class of settings: an unknown name is refused with the closest one that the class has."""
    init: Callable[..., None] = kind.__init__

    @functools.wraps(init)
    def checked(self: object, *args: Any, **options: Any) -> None:
        try:
            init(self, *args, **options)
        except TypeError:
            fields: Any = attrs.fields(kind)  # type: ignore[arg-type]
            known = [field.alias for field in fields if field.init]
            for name in options.keys() - known:
                longer = [it for it in known if it.startswith(f"{name}_")] or [
                    it for it in known if name in it.split("_")
                ]
                close = list(dict.fromkeys([*longer, *difflib.get_close_matches(name, known, n=1)]))[:2]
                hint = f"did you mean {' or '.join(close)}?" if close else f"allowed: {', '.join(known)}"
                raise SettingsTypeError(f"{kind.__name__} has no setting {name!r}: {hint}") from None
            raise

    kind.__init__ = checked  # type: ignore[method-assign]
    return kind


def instance(*kinds: type) -> Validator:
    """An object of one of these classes."""

    def check(instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        if not isinstance(value, kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise SettingsTypeError(f"{type(instance).__name__}.{attribute.name}: got {value!r}, allowed: {names}")

    return check


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def is_whole(value: object, low: float = -math.inf) -> bool:
    """Return True if this is an integer not below ``low``; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def at_least(low: float) -> Validator:
    """A number not below ``low``."""

    def check(instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        if not _is_number(value) or value < low:
            _refuse(instance, attribute.name, value, f"a number >= {low}")

    return check


def whole(low: int) -> Validator:
    """An integer not below ``low``."""

    def check(instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        if not is_whole(value, low):
            _refuse(instance, attribute.name, value, f"an integer >= {low}")

    return check


def between(low: float, high: float, *, open_low: bool = False) -> Validator:
    """A number in [low, high], or in (low, high]."""

    def check(instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        if not _is_number(value) or not (low < value if open_low else low <= value) or value > high:
            _refuse(instance, attribute.name, value, f"a number in {'(' if open_low else '['}{low}, {high}]")

    return check


def seconds_or_none(instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    """A number of seconds; None, zero and negative numbers mean: no deadline."""
    if value is not None and not _is_number(value):
        _refuse(instance, attribute.name, value, "seconds as a number, or None for no deadline (<= 0 means the same)")


def seconds(instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    """A finite positive number of seconds."""
    if not _is_number(value) or value <= 0 or math.isinf(value):
        _refuse(instance, attribute.name, value, "a finite number of seconds > 0")
