"""The process that test_kill kills: it takes groups through their lives and prints each write.

A line ``> 17 ready 2`` before a write, ``< 17 ready 2`` when the write is confirmed to be on disk.
"""

import os
import random
import sys

import trio

from trio_rollout._core.enums import Cause
from trio_rollout._core.ledger_events import LedgerEvent, Recovered
from trio_rollout.ledger import open_ledger
from trio_rollout.ledger._open import DiskLedger
from trio_rollout.ledger._store import StoreLimits

from ._samples import IDENTITY, acked, delivered, finished, pulled, ready, requeued

WORKERS = 6


def size_of(number: int) -> int:
    """Return the tokens of a group: every other group is in a segment."""
    return 0 if number % 2 else 20_000


def say(mark: str, number: int, state: str, attempt: int) -> None:
    os.write(1, f"{mark} {number} {state} {attempt}\n".encode())


async def record(ledger: DiskLedger, number: int, state: str, attempt: int, event: LedgerEvent) -> None:
    say(">", number, state, attempt)
    await ledger.record([event])
    say("<", number, state, attempt)


async def life(ledger: DiskLedger, rng: random.Random, number: int, state: str, attempt: int, step: int) -> None:
    """Take a group from its state to the end of its life."""
    if state == "new":
        await record(ledger, number, "waiting", 0, pulled(number))
        state = "waiting"
    while state == "waiting":
        attempt += 1
        if rng.random() < 0.5:
            await record(ledger, number, "kept", attempt, finished(number, 0, attempt, size=size_of(number)))
        if rng.random() < 0.3:
            await record(ledger, number, "waiting", attempt, requeued(number, attempt, Cause.DEADLINE))
        else:
            await record(ledger, number, "ready", attempt, ready(number, attempt, size=size_of(number)))
            state = "ready"
    if state == "ready":
        await record(ledger, number, "delivered", attempt, delivered(step, number))
    await record(ledger, number, "acked", attempt, acked(step, number))


def left(found: Recovered) -> list[tuple[int, str, int, int]]:
    """Return number, state, attempt and step of the groups that the last process left."""
    waiting = [(int(one.prompt.id), "waiting", one.attempt, int(one.prompt.id)) for one in found.unfinished]
    finished = [(int(one.id.prompt), "ready", one.attempt, int(one.id.prompt)) for one in found.ready]
    taken = [(int(one.id.prompt), "delivered", one.attempt, step) for step, groups in found.delivered for one in groups]
    return waiting + finished + taken


async def worker(ledger: DiskLedger, rng: random.Random, todo: list[tuple[int, str, int, int]], place: int) -> None:
    while todo:
        await life(ledger, rng, *todo.pop())
    number = rng.randrange(10**6) * 100 + place
    while True:
        await life(ledger, rng, number, "new", 0, number)
        number += 100


async def main(path: str, seed: str, keep: str) -> None:
    rng = random.Random(seed)
    async with open_ledger(path, keep_acked=keep == "keep", sizes=StoreLimits(together=0, segment=10**6)) as ledger:
        todo = left(await ledger.begin(IDENTITY))
        async with trio.open_nursery() as nursery:
            for place in range(WORKERS):
                nursery.start_soon(worker, ledger, rng, todo, place)


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
