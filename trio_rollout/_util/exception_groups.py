"""Exceptions that come out of nurseries: their leaves, the errors beside cancellations, and groups of one unwrapped."""

from collections.abc import Generator
from contextlib import contextmanager

import trio

from .._core.failures import leaves_of


@contextmanager
def bare_errors() -> Generator[None]:
    """Raise a block's single error outside its group, where the nursery inside is a detail. Several errors stay a group."""
    try:
        yield
    except BaseExceptionGroup as group:
        errors = errors_of(group)
        leaves = [] if errors is None else leaves_of(errors)
        if len(leaves) == 1:
            raise leaves[0] from leaves[0].__cause__
        raise


def errors_of(error: BaseException) -> BaseException | None:
    """Return the exception without the cancellations in it; None if nothing else is in it."""
    if isinstance(error, BaseExceptionGroup):
        _, errors = error.split(trio.Cancelled)
        return errors
    return None if isinstance(error, trio.Cancelled) else error


def is_cancellation(error: BaseException | None) -> bool:
    """Return True for Cancelled, and for a group of nothing else."""
    return error is not None and errors_of(error) is None
