"""Asynchronous RL on a tiny model, end to end: `python examples/tiny_rl.py --out runs/demo`.

The task: "which letters come after b" is answered by "cde". The model is a table of logits indexed by the last three
tokens, served by the tiny server in a separate process; it begins by knowing only that answers are made of letters. The
trainer is a group-relative policy gradient in numpy. Rollouts go on while it trains; every other step, new weights are
pushed through `engine.weight_update`. Held-out prompts, worded as training prompts never are, are evaluated beside it.
"""

import random
import string
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import click
import httpx  # noqa: ASYNC127  the client users have
import numpy as np
import trio
from learning_curve import print_curve, write_page

from trio_rollout import (
    Batch,
    EngineSettings,
    Group,
    IterableSource,
    Prompt,
    RolloutEngine,
    SamplingParams,
    SingleTurn,
    Trajectory,
    open_rollout_engine,
    open_sglang_servers,
)
from trio_rollout.tiny import DATA, TinyModel, TinySettings, TinyTokenizer, open_tiny_process

LETTERS = string.ascii_lowercase
ANSWER = 3
GROUPS, SAMPLES = 24, 8
TRAINING_WORDS = ("please tell me", "quick question:", "say", "i wonder", "now answer")
HELD_OUT_WORDS = ("one more time:", "dear model")


def task(words: str, letter: str, number: int) -> Prompt:
    """One question about the alphabet, with its answer as the label."""
    after = LETTERS.index(letter) + 1
    answer = (LETTERS * 2)[after : after + ANSWER]
    return Prompt(id=str(number), text=f"{words} which letters come after {letter}", label=answer)


def training_prompts(seed: int) -> Iterator[Prompt]:
    """Questions without end."""
    draw, number = random.Random(seed), 0
    while True:
        yield task(draw.choice(TRAINING_WORDS), draw.choice(LETTERS), number)
        number += 1


def held_out_prompts() -> IterableSource:
    """Every letter, in words that training does not use."""
    pairs = [(words, letter) for words in HELD_OUT_WORDS for letter in LETTERS]
    return IterableSource([task(words, letter, number) for number, (words, letter) in enumerate(pairs)])


async def letters_right(trajectory: Trajectory) -> float:  # noqa: ASYNC124  a reward is async, whether it waits or not
    """The share of the answer's letters that are right, each in its place."""
    pairs = zip(trajectory.text, str(trajectory.prompt.label), strict=False)
    return sum(said == wanted for said, wanted in pairs) / ANSWER


def untrained_model(seed: int) -> TinyModel:
    """A model that answers with letters, any letters."""
    tokenizer = TinyTokenizer.load()
    model = TinyModel.random(vocab=tokenizer.vocab, seed=seed, scale=0.1)
    model.table[:, tokenizer.encode(LETTERS)] += 5.0
    return model


def train(model: TinyModel, groups: tuple[Group, ...], learning_rate: float) -> None:
    """One step of policy gradient: a sample is as good as its reward lies above its group's mean."""
    for group in groups:
        rewards = np.array([row.reward for row in group.trajectories], np.float32)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-3)
        for advantage, trajectory in zip(advantages, group.trajectories, strict=True):
            for segment in trajectory.segments:
                start = len(segment.tokens) - segment.response_length
                rows, sampled = model.row_indices(segment.tokens, start), segment.tokens[start:]
                logits = model.table[rows]
                chances = np.exp(logits - logits.max(axis=1, keepdims=True))
                step = learning_rate * advantage * segment.loss_mask
                np.add.at(model.table, rows, -step[:, None] * chances / chances.sum(axis=1, keepdims=True))
                np.add.at(model.table, (rows, sampled), step)


async def push(model: TinyModel, path: Path, url: str, version: int) -> None:
    """Write the weights down and have the server load them; to be called inside a weight-update window."""
    await trio.to_thread.run_sync(model.save, path)
    async with httpx.AsyncClient(trust_env=False) as client:
        body = {"model_path": str(path), "weight_version": str(version)}
        (await client.post(f"{url}/update_weights_from_disk", json=body, timeout=30)).raise_for_status()


async def held_out_reward(engine: RolloutEngine) -> float:
    """Mean reward on the held-out prompts, two samples each."""
    groups = await engine.evaluate(held_out_prompts(), samples_per_prompt=2)
    return float(np.mean([row.reward for group in groups for row in group.trajectories]))


async def learn(out: Path, *, seed: int, steps: int, updates: bool, learning_rate: float = 0.5) -> list[float]:
    """Train for so many steps and return the held-out reward after every second one."""
    weights = (await trio.Path(out).resolve()) / "weights.npz"
    model = untrained_model(seed)
    await trio.to_thread.run_sync(model.save, Path(weights))
    settings = EngineSettings(samples_per_prompt=SAMPLES, max_running=4 * SAMPLES, max_ready=GROUPS)
    sampling = SamplingParams(max_new_tokens=ANSWER, ignore_eos=True)
    curve: list[float] = []
    async with (
        open_tiny_process(TinySettings(weights=Path(weights), seed=seed)) as server,
        open_sglang_servers([server.url], tokenizer=DATA) as servers,
        open_rollout_engine(
            IterableSource(training_prompts(seed)),
            SingleTurn(sampling),
            servers=servers,
            reward=letters_right,
            settings=settings,
        ) as engine,
    ):
        async for batch in engine.batches(GROUPS):
            await trio.to_thread.run_sync(train, model, batch.groups, learning_rate)
            if batch.step % 2 == 0:
                if updates:
                    version = engine.weight_version + 1
                    async with engine.weight_update(version=version):
                        await push(model, Path(weights), server.url, version)
                curve.append(await held_out_reward(engine))
                report(batch, engine, curve)
            await batch.ack()
            if batch.step + 1 == steps:
                break
    return curve


def report(batch: Batch, engine: RolloutEngine, curve: list[float]) -> None:
    """One line of progress."""
    oldest = min(group.oldest_version or 0 for group in batch.groups)
    print(
        f"step {batch.step:3}  held-out reward {curve[-1]:.2f}  weights {engine.weight_version}, oldest sample {oldest}",
        flush=True,
    )


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/demo"), show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--steps", type=int, default=60, show_default=True)
@click.option("--updates/--no-updates", default=True, help="Whether the server ever gets the trained weights.")
def main(out: Path, seed: int, steps: int, *, updates: bool) -> None:
    """Learn, show the curve, write the picture and the page."""
    if find_spec("matplotlib") is None:
        raise click.ClickException("the picture of the curve needs matplotlib: pip install '.[plots]'")
    out.mkdir(parents=True, exist_ok=True)

    async def job() -> list[float]:
        return await learn(out, seed=seed, steps=steps, updates=updates)

    curve = trio.run(job)
    print_curve(curve)
    page = write_page(out, curve, title=f"Held-out reward, seed {seed}")
    print(f"curve: {page.parent / 'reward.png'}   page: {page}")


if __name__ == "__main__":
    main()
