"""A small program whose order is the scheduler's choice; as a script it prints the digest of one run."""

import sys

import trio

from trio_rollout.testing import sim_run


async def jumble(tasks: int = 6) -> list[int]:
    """Run tasks that sleep equally long."""
    order: list[int] = []

    async def note(number: int) -> None:
        for _ in range(3):
            await trio.sleep(number % 3)
            order.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(tasks):
            nursery.start_soon(note, number)
    return order


def digest(seed: int) -> str:
    """Return the digest of one run."""
    return sim_run(jumble, 10, seed=seed).digest


if __name__ == "__main__":
    sys.stdout.write(digest(1))
