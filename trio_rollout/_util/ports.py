"""The source of randomness and ids: the one place that a simulation seeds.

No module draws from a global generator: an object that needs randomness is given a ``Ports`` by the scope that opened it.
"""

import secrets
from random import Random
from typing import final

import attrs


@final
@attrs.frozen(eq=False)
class Ports:
    """A source of random numbers and of request ids.

    ``random`` seeded makes a whole run repeatable. ``new_rid`` gives 32 hex digits: of fixed length because SGLang
    matches aborts by prefix, and fresh for every try because it refuses an active duplicate.
    """

    random: Random = attrs.field(factory=lambda: Random(secrets.randbits(128)))

    def new_rid(self) -> str:
        """Return a fresh request id: 32 hex digits."""
        return f"{self.random.getrandbits(128):032x}"
