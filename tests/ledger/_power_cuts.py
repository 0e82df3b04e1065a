"""The moments at which power may fail, and the unsynced writes that a disk may keep."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from trio_rollout.testing._sim.files import Choice, Edit, Op, SimFiles


def replay(log: Iterable[Op], *, deaf: Callable[[Op], bool] | None = None) -> Iterator[tuple[int, SimFiles]]:
    """Yield the directory before each operation of a log, and after the last one: the moments at which power may fail."""
    files = SimFiles()
    index = -1
    for index, op in enumerate(log):
        yield index, files
        if deaf is None or not deaf(op):
            files.apply(op)
    yield index + 1, files


def nothing(edits: Sequence[Edit]) -> Sequence[Edit]:
    """Keep only what was synced."""
    del edits
    return ()


def everything(edits: Sequence[Edit]) -> Sequence[Edit]:
    """Keep everything: all of it happens to have reached the disk."""
    return edits


def only_last(edits: Sequence[Edit]) -> Sequence[Edit]:
    """Keep the last edit, which overtook all others."""
    return edits[-1:]


def torn_at(length: int) -> Choice:
    """Return a choice that keeps the edits in order, up to so many bytes in all; the last one is torn there."""

    def choose(edits: Sequence[Edit]) -> Iterator[Edit]:
        left = length
        for offset, data in edits:
            size = 0 if data is None else len(data)
            if data is None or size <= left:
                yield offset, data
            elif left:
                yield offset, data[:left]
            left -= size
            if left < 0:
                return

    return lambda edits: list(choose(edits))
