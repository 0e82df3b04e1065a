"""reasoning-gym's own verifiers as a scorer: synchronous, and picklable for a scorer process.

An entry is generated again from (name, seed, index) rather than read from the prompt's metadata: those went through JSON, and
a verifier that compares tuples then refuses the right answer (seen with arc_agi and rearc of 0.1.25).
"""

from collections import OrderedDict
from typing import Any, final

import attrs

from .._core.values import Trajectory
from ..errors import RewardError, SourceError

_REMEMBERED = 1024
"""Entries kept by a scorer, so that the samples of one prompt cost one generation: up to 1 s each (knight_swap)."""


@final
@attrs.define(eq=False)
class TaskScorer:
    """The verifier of one generated data set, called with a trajectory. Made by ``TaskSource``."""

    name: str
    count: int
    seed: int
    _dataset: Any = attrs.field(default=None, init=False)
    _entries: OrderedDict[int, dict[str, Any]] = attrs.field(factory=OrderedDict, init=False)

    def __reduce__(self) -> tuple[type["TaskScorer"], tuple[str, int, int]]:
        return TaskScorer, (self.name, self.count, self.seed)

    def __call__(self, trajectory: Trajectory, /) -> float:
        """What the data set gives for the last ``<answer>…</answer>`` of the response, or without one for all of it.

        Several verifiers raise on an answer that they can't parse. That is the policy's fault and scores 0.0, as long as
        the data set's own answer does not raise.

        Raises:
          RewardError: the prompt is not one of these tasks, or the verifier itself is broken.

        """
        entry = self._entry_of(trajectory)
        dataset = self._loaded()
        try:
            return float(dataset.score_answer(_answer_in(trajectory.text), entry))
        except Exception:  # ruff: ignore[blind-except]  a verifier may raise anything on what a model wrote
            self._require_working_verifier(entry)
            return 0.0

    def remember(self, index: int, entry: dict[str, Any]) -> None:
        """Keep a generated entry for its scoring; the oldest is forgotten."""
        self._entries[index] = entry
        if len(self._entries) > _REMEMBERED:
            self._entries.popitem(last=False)

    def _loaded(self) -> Any:
        if self._dataset is None:
            self._dataset = open_dataset(self.name, count=self.count, seed=self.seed)
        return self._dataset

    def _entry_of(self, trajectory: Trajectory) -> dict[str, Any]:
        prompt = trajectory.prompt
        if not prompt.id.isdecimal() or not int(prompt.id) < self.count:
            raise RewardError(f"prompt {prompt.group_id} is not one of the {self.count} tasks of {self.name!r}")
        index = int(prompt.id)
        entry = self._entries.get(index)
        if entry is None:
            entry = self._loaded()[index]
            self.remember(index, entry)
        if entry["question"] != prompt.text:
            raise RewardError(
                f"prompt {prompt.group_id} is not task {index} of {self.name!r} with seed {self.seed}: it was made with "
                "another seed, or by another version of reasoning-gym"
            )
        return entry

    def _require_working_verifier(self, entry: dict[str, Any]) -> None:
        try:
            self._loaded().score_answer(entry["answer"], entry)
        except Exception as error:
            raise RewardError(f"the verifier of {self.name!r} fails on its own answer: {error!r}") from error


def open_dataset(name: str, *, count: int, seed: int) -> Any:
    """The data set of this name. The first call imports reasoning-gym: seconds.

    Raises:
      SourceError: reasoning-gym is not installed, or has no such data set that needs no further options.

    """
    try:
        import reasoning_gym  # ruff: ignore[import-outside-top-level]  an extra, and slow to import
        from reasoning_gym.factory import DATASETS  # ruff: ignore[import-outside-top-level]
    except ImportError as error:
        raise SourceError(
            f"TaskSource({name!r}) needs reasoning-gym: pip install 'trio-rollout[tasks]' ({error})"
        ) from error
    if name not in DATASETS:
        raise SourceError(f"reasoning-gym has no data set {name!r}; it has: {', '.join(sorted(DATASETS))}")
    try:
        return reasoning_gym.create_dataset(name, size=count, seed=seed)
    except Exception as error:
        raise SourceError(f"the data set {name!r} can't be made from count and seed alone: {error}") from error


def _answer_in(text: str) -> str:
    _, opened, rest = text.rpartition("<answer>")
    answer, closed, _ = rest.partition("</answer>")
    return (answer if opened and closed else text).strip()
