"""slime's data source as the engine's source. All calls come from the engine's thread, so there are no locks."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import attrs
import trio

from trio_rollout import Prompt
from trio_rollout.errors import SourceError
from trio_rollout.lowlevel import wait_s

from ._samples import KEY, HostGroup, prompt_of

_log: Final = logging.getLogger("trio_rollout.compat")
_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0


@final
@attrs.define(eq=False)
class HostSource:
    """Takes groups with ``get_samples``; unfinished ones go back with ``add_samples``, all at once, when the engine drains.

    It never ends: slime's sources wrap around. A source that has no group at the moment is asked again, as slime itself would,
    with a pause in between and a warning. Requeued groups wait in the engine.
    """

    _data_source: Any
    _samples: int
    _taken: int = attrs.field(default=0, init=False)

    async def take(self, count: int) -> Sequence[Prompt]:
        """Return up to ``count`` groups. Blocks the loop as long as the data source does, and waits while it has none."""
        await trio.lowlevel.checkpoint()
        tries, groups = 0, self._data_source.get_samples(count)
        while not groups:
            tries += 1
            if tries.bit_count() == 1:  # 1, 2, 4, 8, ...
                _log.warning("get_samples(%d) gave no group %d times in a row; asking again", count, tries)
            await wait_s(min(_LONGEST_PAUSE_S, _PAUSE_S * tries))
            groups = self._data_source.get_samples(count)
        wrong = {len(group) for group in groups} - {self._samples}
        if wrong:
            raise SourceError(
                f"get_samples({count}): groups of {self._samples} samples wanted, got one of {min(wrong)}"
            )
        prompts = [prompt_of(self._taken + number, HostGroup(group)) for number, group in enumerate(groups)]
        self._taken += len(prompts)
        return prompts

    async def give_back(self, prompts: Sequence[Prompt]) -> None:
        """Hand back unfinished groups, as they were taken."""
        await trio.lowlevel.checkpoint()
        returned = [list(group.samples) for prompt in prompts if isinstance(group := prompt.metadata[KEY], HostGroup)]
        if returned:
            self._data_source.add_samples(returned)

    def state(self) -> dict[str, object]:
        """Return nothing: the host saves its own data source."""
        return {}

    def restore(self, state: Mapping[str, object]) -> None:
        """Restore nothing."""
        del state
