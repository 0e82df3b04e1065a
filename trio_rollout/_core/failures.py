"""Exceptions as values: type, message and traceback, safe to keep and to write down."""

import traceback
from collections.abc import Sequence

from .enums import Cause
from .values import Failure, GroupId

_LONGEST = 16_384
"""Characters of a text. A failure is kept as long as its run, written down and logged; an exception may quote a whole dialogue."""


def failure_of(
    error: BaseException, cause: Cause = Cause.ERROR, *, group: GroupId | None = None, attempt: int | None = None
) -> Failure:
    """Describe an exception. Holds no reference to it, its frames or anything in them. Of a group every leaf is named."""
    return Failure(
        cause=cause,
        type=type(error).__qualname__,
        message=_shortened(words_of(error)),
        traceback=_shortened(_traceback_of(error)),
        group=group,
        attempt=attempt,
    )


def words_of(error: BaseException) -> str:
    """What an exception says, whatever its ``__str__`` does; of a group, what each leaf says."""
    try:
        words = str(error)
    except Exception as another:  # noqa: BLE001  the user's __str__
        words = f"(its text can't be had: __str__ raised {type(another).__name__})"
    if isinstance(error, BaseExceptionGroup):
        return "; ".join([words, *(f"{type(leaf).__name__}: {words_of(leaf)}" for leaf in leaves_of(error))])
    return words


def leaves_of(error: BaseException) -> Sequence[BaseException]:
    """The exceptions in a group, at any depth; the exception itself if it is none."""
    if not isinstance(error, BaseExceptionGroup):
        return (error,)
    return [leaf for inner in error.exceptions for leaf in leaves_of(inner)]


def _shortened(text: str) -> str:
    """Its beginning and its end, if it is too long: the end of a traceback says what was raised."""
    left_out = len(text) - _LONGEST
    if left_out <= 0:
        return text
    half = _LONGEST // 2
    return f"{text[:half]}\n[{left_out} characters are left out]\n{text[-half:]}"


def _traceback_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001  the user's __str__, or __notes__
        return "".join(traceback.format_tb(error.__traceback__))
