"""Exceptions as values: type, message and traceback, safe to keep and to write down."""

import traceback

from .enums import Cause
from .values import Failure, GroupId


def failure_of(
    error: BaseException, cause: Cause = Cause.ERROR, *, group: GroupId | None = None, attempt: int | None = None
) -> Failure:
    """Describe an exception. Holds no reference to it, its frames or anything in them."""
    return Failure(
        cause=cause,
        type=type(error).__qualname__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        group=group,
        attempt=attempt,
    )
