"""The code of the README, of docs/rollouts.md, docs/restarts.md and docs/failures.md runs as it stands."""

import json
import re
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import trio

from trio_rollout import (
    EngineSettings,
    IterableSource,
    SamplingParams,
    SingleTurn,
    open_ledger,
    open_rollout_engine,
    rescore,
)
from trio_rollout.errors import EndOfData
from trio_rollout.testing import FakeServers, Say, prompts
from trio_rollout.tiny import DATA, TinySettings, open_tiny_process

ROOT = Path(__file__).parents[2]
BLOCKS = {
    name: re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)
    for name in ("README.md", "docs/failures.md", "docs/restarts.md", "docs/rollouts.md")
}


def block_with(name: str, text: str) -> str:
    """The one block of a document that contains this text."""
    (block,) = [block for block in BLOCKS[name] if text in block]
    return block


async def test_the_training_loop_runs(tmp_path):
    """With its paths, its URL and a trainer filled in, it trains on every group and acks every batch."""
    block = block_with("README.md", "open_ledger")
    lines = [json.dumps({"prompt": f"question {number}", "label": "42"}) for number in range(80)]
    await trio.Path(tmp_path / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    trained, versions = [], []
    async with open_tiny_process(TinySettings()) as server:

        def push_weights(version):
            versions.append(version)
            body = {"new_version": str(version), "abort_all_requests": False}
            httpx.post(f"{server.url}/update_weight_version", json=body, trust_env=False).raise_for_status()

        for text, instead in {
            "trio.run(main)": "",
            "http://127.0.0.1:30000": server.url,
            "path/to/model": str(DATA),
            "runs/second": str(tmp_path / "run"),
            "prompts.jsonl": str(tmp_path / "prompts.jsonl"),
            "max_new_tokens=512": "max_new_tokens=4",
        }.items():
            assert text in block
            block = block.replace(text, instead)
        names = {"train_step": trained.extend, "push_weights": push_weights}
        exec(compile(block, "README.md", "exec"), names)
        await names["main"]()

    assert len({group.id for group in trained}) == 80
    assert {len(group.trajectories) for group in trained} == {8}
    assert versions == list(range(1, len(versions) + 1))


class Killed(Exception):
    """Stands for the end of the process."""


class Checkpoint:
    """A trainer's checkpoint; the process ends before it is written, or right after it."""

    def __init__(self):
        self.step, self.trained, self.since = -1, [], []
        self.saves = 0

    def train_step(self, groups):
        self.since += [group.prompt.id for group in groups]

    def save(self, *, step):
        self.saves += 1
        if self.saves in {2, 5}:
            self.since.clear()
            raise Killed
        self.step = step
        self.trained += self.since
        self.since.clear()
        if self.saves in {3, 6}:
            raise Killed


async def test_f140_a_trainer_that_is_killed_trains_on_each_group_once(tmp_path):
    block = block_with("docs/restarts.md", "checkpoint.save")
    checkpoint, lives, ended = Checkpoint(), 0, False
    servers = FakeServers(plan=lambda *_: Say(seconds=0))
    names = {"trio": trio, "train_step": checkpoint.train_step, "push_weights": servers.set_version}
    exec(compile(block.replace("32", "3"), "docs/restarts.md", "exec"), names)
    while not ended:
        lives += 1
        with suppress(Killed):
            async with (
                open_ledger(tmp_path) as ledger,
                open_rollout_engine(
                    IterableSource(prompts(20)),
                    SingleTurn(SamplingParams()),
                    servers=servers,
                    ledger=ledger,
                ) as engine,
            ):
                await names["train"](engine, checkpoint)
                ended = True

    assert lives == 5
    assert sorted(checkpoint.trained) == sorted(prompt.id for prompt in prompts(20))


@pytest.mark.parametrize("name", ["README.md", "docs/rollouts.md"])
async def test_the_rollout_of_ones_own_runs(autojump_clock, name):
    block = block_with(name, "two_turns")

    async def look_something_up(text):
        return [7, 8]

    names = {"look_something_up": look_something_up}
    exec(compile(block, "README.md", "exec"), names)
    async with open_rollout_engine(IterableSource(prompts(2)), names["two_turns"], servers=FakeServers()) as engine:
        batch = await engine.next_batch(2)

    (segment,) = batch.groups[0].trajectories[0].segments
    assert segment.loss_mask.tolist() == [1, 1, 1, 1, 0, 0, 1, 1, 1, 1]


async def test_what_a_ledger_has_stored_is_scored_again(tmp_path, capsys, monkeypatch):
    block = block_with("docs/failures.md", "rescore(")
    monkeypatch.chdir(tmp_path)

    async def mended_reward(trajectory):
        return 0.5

    async def failing(trajectory):
        raise KeyError("no such key")

    settings = EngineSettings(samples_per_prompt=1)
    async with (
        open_ledger("runs/second") as ledger,
        open_rollout_engine(
            IterableSource(prompts(2)),
            SingleTurn(),
            servers=FakeServers(plan=lambda *_: Say(seconds=0)),
            reward=failing,
            ledger=ledger,
            settings=settings,
        ) as engine,
    ):
        with suppress(EndOfData):
            await engine.next_batch(1)
    names = {"open_ledger": open_ledger, "rescore": rescore, "mended_reward": mended_reward}
    source = "".join(f"    {line}" for line in block.splitlines(keepends=True))
    exec(compile(f"async def main():\n{source}", "docs/failures.md", "exec"), names)
    await names["main"]()

    assert capsys.readouterr().out.startswith("2 2 () ")
