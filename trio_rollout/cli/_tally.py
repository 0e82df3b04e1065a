"""What a run has seen of its groups' rewards: sums by name, so that a mean costs nothing to show."""

from collections.abc import Iterable, Mapping
from typing import final

import attrs

from .._core.values import Group


@final
@attrs.define(eq=False)
class RewardTally:
    """Sums and counts of rewards, by name; a plain number goes by the name ``reward``."""

    groups: int = 0
    rollouts: int = 0
    _sums: dict[str, float] = attrs.field(factory=dict)
    _counts: dict[str, int] = attrs.field(factory=dict)

    def add(self, groups: Iterable[Group]) -> None:
        """Count these groups."""
        for group in groups:
            self.groups += 1
            for trajectory in group.trajectories:
                self.rollouts += 1
                self._add(trajectory.reward)

    def _add(self, reward: float | Mapping[str, float] | None) -> None:
        if reward is None:
            return
        named = reward if isinstance(reward, Mapping) else {"reward": reward}
        for name, value in named.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0) + 1

    def means(self) -> dict[str, float]:
        """The mean of each reward, in the order in which the names appeared."""
        return {name: total / self._counts[name] for name, total in self._sums.items()}
