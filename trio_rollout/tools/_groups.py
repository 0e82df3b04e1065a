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
        _, errors = group.split(trio.Cancelled)
        leaves = [] if errors is None else _leaves(errors)
        if len(leaves) == 1:
            raise leaves[0] from leaves[0].__cause__
        raise


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return found
