"""Copies of values that have been checked: ``attrs.evolve`` checks and converts every field again, for each rollout."""

from typing import Any, TypeVar

import attrs

T = TypeVar("T", bound=Any)


def copied(value: T, kind: type[T], changes: dict[str, object]) -> T:
    """A copy of a frozen attrs value with other values in some fields, which must be what a converter would make of them.

    A value of a users' class that extends ``kind`` is made anew, as its class says: it may compute or check what it likes.
    """
    if type(value) is not kind:
        again: T = attrs.evolve(value, **changes)
        return again
    copy: T = object.__new__(kind)
    put = object.__setattr__
    for field in kind.__attrs_attrs__:
        name = field.name
        put(copy, name, changes[name] if name in changes else getattr(value, name))
    return copy
