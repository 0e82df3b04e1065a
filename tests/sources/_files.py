"""Helpers of the sources' tests: JSONL files, and a blocking call that takes several steps."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import trio

from trio_rollout._core.values import Prompt

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def written(path: Path, items: Iterable[object]) -> Path:
    """Write a file with one item a line."""
    path.write_text("".join(f"{json.dumps(item)}\n" for item in items), encoding="utf-8")
    return path


def questions(count: int) -> list[dict[str, object]]:
    """Return items with a text prompt, a label, metadata and an id."""
    return [
        {"prompt": f"What is {n} + {n}?", "label": str(2 * n), "metadata": {"n": n}, "uid": f"q{n}"}
        for n in range(count)
    ]


def ids(prompts: Sequence[Prompt]) -> list[str]:
    """Return the group ids as text."""
    return [str(prompt.group_id) for prompt in prompts]


async def run_slowly(fn: Callable[[*Ts], T], /, *args: *Ts) -> T:
    """Stand in for a thread: take a step before the call, and one after it that loses the result when cancelled."""
    await trio.lowlevel.checkpoint()
    result = fn(*args)
    await trio.lowlevel.checkpoint()
    return result
