"""Trouble at times drawn from a seed: hosts die, lose their power, are cut off, and come back.

Separate because the simulated network makes single faults, and a test decides on their times.
"""

import enum
import random
from collections.abc import Sequence
from typing import Never

import trio

from .network import SimHost, SimNet


class Trouble(enum.Enum):
    """What happens to a host."""

    KILL = "kill"
    """Its process dies and is started again."""
    POWER_OFF = "power off"
    """The machine loses its power and starts again; its clients learn of it late."""
    PARTITION = "partition"
    """It is cut off and comes back as it was."""
    RESET = "reset"
    """All its connections are reset; nothing else happens."""


async def disturb(
    net: SimNet,
    *,
    rng: random.Random,
    every: tuple[float, float] = (20.0, 200.0),
    outage: tuple[float, float] = (1.0, 60.0),
    kinds: Sequence[Trouble] = tuple(Trouble),
) -> Never:
    """Disturb one host after another, at most one at a time, until cancelled; the host then stays as it is.

    ``every``: least and longest seconds between two troubles; ``outage``: for how long a host is away.
    """
    while True:
        await trio.sleep(rng.uniform(*every))
        host = rng.choice(net.hosts)
        await _one(host, rng.choice(kinds), rng.uniform(*outage))


async def _one(host: SimHost, kind: Trouble, seconds: float) -> None:
    match kind:
        case Trouble.KILL:
            host.kill()
        case Trouble.POWER_OFF:
            host.power_off()
        case Trouble.PARTITION:
            host.partition()
        case Trouble.RESET:
            host.reset_connections()
    await trio.sleep(seconds)
    if kind is Trouble.PARTITION:
        host.mend()
    elif kind is not Trouble.RESET:
        host.start()
