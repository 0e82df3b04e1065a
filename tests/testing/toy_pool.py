"""A toy pool with bugs to plant, for the tests of the testing tools.

Groups go from ``source`` through a worker into a channel; the consumer takes them. A group is in exactly one place: in the
source, on its way, or delivered. Cancelled, a worker puts its group back.
"""

import attrs
import trio

from trio_rollout.testing import Arm

GROUPS = 6


@attrs.define
class Toy:
    """The place of each group."""

    source: list[int] = attrs.field(factory=lambda: list(range(GROUPS)))
    delivered: list[int] = attrs.field(factory=list)
    marked: set[int] = attrs.field(factory=set)
    bug: str = ""

    def require_nothing_lost(self) -> None:
        """Check that every group is in the source or delivered, once, and only delivered ones are marked."""
        if sorted(self.source + self.delivered) != list(range(GROUPS)):
            raise AssertionError(f"in the source {sorted(self.source)}, delivered {sorted(self.delivered)}")


async def worker(toy: Toy, send: trio.MemorySendChannel[int]) -> None:
    """Take groups and send them on."""
    while toy.source:
        group = toy.source.pop()
        if toy.bug == "await before try":
            await trio.lowlevel.checkpoint()
        try:
            await trio.sleep(0.1)
            if toy.bug == "marked first":
                toy.marked.add(group)
            await send.send(group)
        except trio.Cancelled:
            if toy.bug == "unshielded requeue":
                await trio.lowlevel.checkpoint()
            if group not in toy.marked:
                toy.source.append(group)
            raise


async def run_toy(arm: Arm[Toy], *, bug: str = "", consumer_s: float = 1.0) -> Toy:
    """Run the pool and its consumer inside one armed scope, and the workers inside another one."""
    toy = arm.keep(Toy(bug=bug))
    send, receive = trio.open_memory_channel[int](0)
    with send, receive, trio.CancelScope() as scope:
        arm(scope, "pool")
        async with trio.open_nursery() as nursery:
            arm(nursery.cancel_scope, "workers")
            for _ in range(2):
                nursery.start_soon(worker, toy, send)
            for _ in range(GROUPS):
                toy.delivered.append(await receive.receive())
                arm.sometimes("both in hand", len(toy.source) < GROUPS - 2)
                await trio.sleep(consumer_s)
    return toy
