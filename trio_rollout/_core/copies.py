"""Copies of values that have been checked: ``attrs.evolve`` checks and converts every field again, for each rollout."""

from typing import Any, TypeVar

T = TypeVar("T", bound=Any)


def copied(value: T, changes: dict[str, object]) -> T:
    """A copy of a frozen attrs value with other values in some fields, which must be what a converter would make of them."""
    cls: Any = type(value)
    copy = cls.__new__(cls)
    put = object.__setattr__
    for field in cls.__attrs_attrs__:
        name = field.name
        put(copy, name, changes[name] if name in changes else getattr(value, name))
    return copy  # type: ignore[no-any-return]
