"""The context of rollouts: the user's functions and what all rollouts share. Frozen, passed down, never looked up."""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import attrs
import trio

from .._core.failure_log import FailureLog
from .._core.settings import EngineSettings
from .._core.values import Prompt, copied
from .._util.ports import Ports
from ..abc import Gateway, Generate, GroupFilter, GroupReward, InferenceServers, Reward
from ._gate import Gate
from ._instruments import Instruments

if TYPE_CHECKING:
    from ..tools import RolloutTools


class NewTools(Protocol):
    """Makes the tools of one rollout; nothing is started before they are used."""

    def __call__(self, *, deadline: float, on_output: Callable[[], None]) -> "RolloutTools":
        """Make the tools, when the rollout first asks for them. They are closed when its generate function is over."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class Scoring:
    """The user's functions that judge what was sampled, and the limits of their calls."""

    reward: Reward | None
    group_reward: GroupReward | None
    group_filter: GroupFilter | None
    settings: EngineSettings
    ports: Ports
    failures: FailureLog = attrs.field(factory=FailureLog)
    """Counts the failures of user code that repeat, so that each is logged in full only once."""


@attrs.frozen(kw_only=True, eq=False)
class RolloutContext(Scoring):
    """The user's functions, the servers behind the gate, and the settings."""

    generate: Generate
    servers: InferenceServers
    gate: Gate
    new_tools: NewTools
    show_tasks: Callable[[trio.lowlevel.Task], str]
    """Renders a task and all tasks below it, with what each waits for, as text."""
    gateway: Gateway | None = None
    instruments: Instruments = attrs.field(factory=Instruments)


def fresh_copy(prompt: Prompt) -> Prompt:
    """Return a copy of the prompt that shares no metadata, label or extra with it: a retry starts clean by construction."""
    return copied(
        prompt,
        Prompt,
        {
            "label": None if prompt.label is None else copy.deepcopy(prompt.label),
            "metadata": copy.deepcopy(dict(prompt.metadata)) if prompt.metadata else {},
            "extra": copy.deepcopy(dict(prompt.extra)) if prompt.extra else {},
        },
    )
