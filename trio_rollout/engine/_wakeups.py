"""The wake-ups of an engine's waiting tasks, one condition for each kind of waiter.

See docs/decisions/0032-the-setters-of-the-state-wake-the-waiters.md.
"""

from typing import final

import attrs

from .._util.condition import Condition


@final
@attrs.frozen(eq=False)
class WakeUps:
    """Two conditions over the engine's state. The objects that own a part of that state notify them in their setters.

    ``consumers``: ``next_batch``, ``evaluate`` and ``drain`` wait on it, for ready groups or for the reason why none will
    come. ``admission``: the pool waits on it, for slots, for room and for groups that may start; so do finished groups
    that wait for room in the ready buffer.
    """

    consumers: Condition = attrs.field(factory=Condition, init=False)
    admission: Condition = attrs.field(factory=Condition, init=False)

    def notify(self) -> None:
        """Wake every waiter of either kind whose condition holds now."""
        self.consumers.notify()
        self.admission.notify()
