"""How an engine makes a group: the user's functions and what all rollouts share. Frozen, passed down, never looked up."""

import copy

import attrs

from ._core.settings import EngineSettings
from ._core.values import Prompt
from ._gate import Gate
from ._ports import Ports
from .abc import Gateway, Generate, GroupFilter, GroupReward, InferenceServers, Reward


@attrs.frozen(kw_only=True, eq=False)
class Recipe:
    """The user's functions, the servers behind the gate, and the settings."""

    generate: Generate
    reward: Reward | None
    group_reward: GroupReward | None
    group_filter: GroupFilter | None
    servers: InferenceServers
    gate: Gate
    settings: EngineSettings
    ports: Ports
    gateway: Gateway | None = None


def untouched(prompt: Prompt) -> Prompt:
    """A copy of the prompt whose metadata, label and extra nobody else holds: a retry starts clean by construction."""
    return attrs.evolve(
        prompt,
        label=copy.deepcopy(prompt.label),
        metadata=copy.deepcopy(dict(prompt.metadata)),
        extra=copy.deepcopy(dict(prompt.extra)),
    )
