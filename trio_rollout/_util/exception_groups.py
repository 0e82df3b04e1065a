"""Errors out of a nursery that the caller should not have to know about."""

from collections.abc import Generator
from contextlib import contextmanager

import trio


@contextmanager
def bare_errors() -> Generator[None]:
    """Let a single error come out as itself, where the nursery inside is a detail. Several stay a group."""
    try:
        yield
    except BaseExceptionGroup as group:
        errors = errors_of(group)
        leaves = [] if errors is None else _leaves(errors)
        if len(leaves) == 1:
            raise leaves[0] from leaves[0].__cause__
        raise


def errors_of(error: BaseException) -> BaseException | None:
    """What is left of it without cancellations; None if it was nothing else."""
    if isinstance(error, BaseExceptionGroup):
        _, errors = error.split(trio.Cancelled)
        return errors
    return None if isinstance(error, trio.Cancelled) else error


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
