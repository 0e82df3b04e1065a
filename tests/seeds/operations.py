"""Operations to be cancelled at any of their steps: each public operation of a small engine over two fake servers.

``OPERATIONS`` are run inside an armed scope, on an engine that then goes on as if nothing had happened; ``WHOLE`` are cancelled
together with the engine, its servers and its ledger.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

import attrs
import trio

from trio_rollout import Batch, EngineSettings, IterableSource, PauseMode, RolloutEngine
from trio_rollout.errors import EndOfData, EngineClosed, RolloutError, ServerError
from trio_rollout.sglang import SGLangServers
from trio_rollout.testing import FakeSGLang, SimWorld, prompts

from .whole_world import Story


@attrs.define(eq=False, kw_only=True)
class Scene:
    """A running engine, and what an operation needs of its surroundings."""

    world: SimWorld
    engine: RolloutEngine
    servers: SGLangServers
    fakes: list[FakeSGLang]
    story: Story
    pause: float
    """Seconds that the consumer takes for a batch."""


Operation: TypeAlias = Callable[[Scene], Awaitable[None]]


async def take(scene: Scene, size: int = 1) -> Batch | None:
    """One batch, noted; None at the end."""
    try:
        batch = await scene.engine.next_batch(size)
    except (EndOfData, EngineClosed):
        return None
    scene.story.delivered += [group.prompt.id for group in batch.groups]
    return batch


async def consume(scene: Scene) -> None:
    """Batches to the end, each acked."""
    while (batch := await take(scene)) is not None:
        await batch.ack()
        await trio.sleep(scene.pause)


async def update(scene: Scene, mode: PauseMode) -> None:
    """A window; a server that could not be paused is one of the things that happen."""
    await trio.sleep(0.5)
    version = scene.engine.weight_version + 1
    try:
        async with scene.engine.weight_update(version=version, mode=mode):
            for fake in scene.fakes:
                fake.version = str(version)
            await trio.sleep(1)
    except ServerError:
        scene.world.sometimes("window failed")


async def update_while_consuming(scene: Scene) -> None:
    """A trainer that updates between batches."""
    await take(scene)
    await update(scene, PauseMode.ABORT)
    await take(scene)


async def evaluate(scene: Scene) -> None:
    """Held-out prompts beside production."""
    await scene.engine.evaluate(IterableSource(prompts(2, prefix="e")), samples_per_prompt=2)


async def drain(scene: Scene) -> None:
    """Stop, with a little grace."""
    await trio.sleep(0.3)
    scene.story.ended_early = True
    await scene.engine.drain(grace=1.0)


async def control(scene: Scene) -> None:
    """The calls that a trainer may make itself."""
    try:
        await scene.servers.health()
        await scene.servers.versions()
        await scene.servers.flush_cache()
    except ServerError:
        scene.world.sometimes("a server did not answer")


async def restore(scene: Scene) -> None:
    """A trainer that goes back before its first batch."""
    batch = await take(scene)
    if batch is not None:
        try:
            await scene.engine.restore(-1)
        finally:  # whether it was written or not: what came out once more may come again
            if scene.engine.statistics().delivered == 0:
                for group in batch.groups:
                    scene.story.delivered.remove(group.prompt.id)


OPERATIONS: dict[str, Operation] = {
    "batches": consume,
    **{f"weight update, {mode.value}": partial(update, mode=mode) for mode in PauseMode},
    "update while consuming": update_while_consuming,
    "evaluate": evaluate,
    "drain": drain,
    "control calls": control,
    "restore": restore,
}
WHOLE = ("whole engine", "whole engine with a ledger")


async def finish(scene: Scene) -> None:
    """Consume the rest of the run, and keep its failure."""
    try:
        await consume(scene)
    except RolloutError as error:
        scene.story.failed = error


def settings(**changes: object) -> EngineSettings:
    """A small engine."""
    return EngineSettings(**{"samples_per_prompt": 2, "max_running": 4, "max_ready": 2, **changes})
