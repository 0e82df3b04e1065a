"""Rewards as user code returns them, and the floats that they become: pure, and shared by everything that scores.

A value is a number if it has ``item()`` (numpy's scalars, arrays and tensors of one element), ``__float__`` or ``__index__``
(Python's numbers, Decimal, Fraction). The reward is the nearest float. Text and bytes are never numbers, although
``float("10")`` and ``list(b"10")`` would make some of them.

Within one group the rewards are all numbers, or all mappings with the same names: an advantage is computed over a group, and
a name that one sample lacks would silently count as something.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from ..errors import RewardError

Score: TypeAlias = float | Mapping[str, float]

_TEXT: Final = (str, bytes, bytearray, memoryview)
_LONGEST_SHOWN: Final = 80
"""Characters of a value in an error."""


def score_of(value: object, what: str) -> Score:
    """Return a reward as a float, or as floats by name. ``what`` names it in errors.

    Raises:
      RewardError: it is neither a finite number nor a mapping from names to finite numbers, or it has no name at all.
    """
    # What most scorers return, first: each look at an abstract class costs a microsecond.
    if type(value) is float and math.isfinite(value):
        return value
    if not isinstance(value, Mapping):
        return _number(value, what)
    if not value:
        raise RewardError(f"{what}: a number or at least one number by name wanted, got {{}}")
    named = {str(name): _number(number, f"{what}, {name!r}") for name, number in value.items()}
    if len(named) < len(value):
        raise RewardError(f"{what}: names must differ as text, got {shown(list(value))}")
    return named


def scores_of(values: object, count: int, what: str, each: Callable[[int], str]) -> list[Score]:
    """Return the rewards of a group of ``count`` samples: from a sequence, or an array or tensor with one dimension.

    ``what`` names the whole in errors, ``each(index)`` one reward.

    Raises:
      RewardError: it is something else, or of another length, or one of its rewards is none.
    """
    listed = _listed(values)
    if listed is None or len(listed) != count:
        raise RewardError(f"{what}: {count} rewards wanted, got {shown(values)}")
    return [score_of(value, each(index)) for index, value in enumerate(listed)]


def require_alike(scores: Sequence[tuple[int, Score]], what: str) -> None:
    """Refuse rewards of one group that differ in kind or in their names. ``scores``: by the index of the sample.

    Raises:
      RewardError: names the two samples that differ, and how.
    """
    for index, score in scores[1:]:
        first, known = scores[0]
        if type(known) is type(score) is float:
            continue
        if _names(known) != _names(score):
            raise RewardError(
                f"{what}: the rewards of one group must have the same names, but sample {first} has {_described(known)} and "
                f"sample {index} has {_described(score)}"
            )


def shown(value: object) -> str:
    """Return a value's type and the beginning of its repr, for errors."""
    try:
        text = " ".join(repr(value).split())
    except Exception as error:  # noqa: BLE001  the user's __repr__
        text = f"(its repr raised {type(error).__name__})"
    return f"{type(value).__name__} {text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 4] + ' ...'}"


def _number(value: object, what: str) -> float:
    try:
        number = _as_float(value)
    except Exception as error:
        raise RewardError(f"{what}: a finite number wanted, got {shown(value)}: {error}") from error
    if number is None or not math.isfinite(number):
        raise RewardError(f"{what}: a finite number wanted, got {shown(value)}")
    return number


def _as_float(value: Any) -> float | None:
    """Return a number as a float; None if the value is no number. Raises what the value's own methods raise."""
    item = getattr(value, "item", None)
    if callable(item) and not isinstance(value, type):
        value = item()  # of an array or tensor with more than one element, this raises
    is_number = not isinstance(value, (*_TEXT, type)) and (hasattr(value, "__float__") or hasattr(value, "__index__"))
    number: Any = value
    return float(number) if is_number else None


def _listed(values: Any) -> Sequence[object] | None:
    if isinstance(values, _TEXT):
        return None
    if isinstance(values, Sequence):
        return values
    if getattr(values, "ndim", None) != 1 or not callable(getattr(values, "tolist", None)):
        return None
    listed = values.tolist()
    return listed if isinstance(listed, list) else None


def _names(score: Score) -> frozenset[str] | None:
    return frozenset(score) if isinstance(score, Mapping) else None


def _described(score: Score) -> str:
    return f"the names {sorted(score)}" if isinstance(score, Mapping) else f"the number {score:g}"
