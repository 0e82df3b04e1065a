"""In which order an epoch reads its records."""

import attrs
import numpy as np
import numpy.typing as npt


@attrs.define(eq=False)
class EpochOrder:
    """File order, or without repetition a shuffled one for each (seed, epoch), the same on every machine.

    Sorted random keys in place of ``Generator.permutation``: numpy keeps the streams of its bit generators for good, but
    not what its generators make of them, and a saved position means an order.
    """

    count: int
    seed: int | None
    _epoch: int = attrs.field(default=-1, init=False)
    _shuffled: npt.NDArray[np.int64] = attrs.field(factory=lambda: np.empty(0, np.int64), init=False)

    def record(self, epoch: int, position: int) -> int:
        """The number of the record at this position of the epoch. Slow once an epoch, when it is shuffled."""
        if self.seed is None:
            return position
        if epoch != self._epoch:
            bits = np.random.PCG64(np.random.SeedSequence((self.seed, epoch)))
            self._shuffled = np.argsort(bits.random_raw(self.count), kind="stable")
            self._epoch = epoch
        return int(self._shuffled[position])
