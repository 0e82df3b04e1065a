"""Many sessions at once: every token is recorded and trained once, memory stays flat, weights change in between."""

import httpx
import psutil
import pytest
import trio

from trio_rollout import (
    EngineSettings,
    IterableSource,
    PauseMode,
    Prompt,
    SamplingParams,
    open_rollout_engine,
    open_sglang_servers,
)
from trio_rollout.gateway import open_gateway
from trio_rollout.tiny import DATA, TinySettings, open_tiny_process

TURNS = 5


class Agents:
    """Agents that talk in five turns, each the continuation of the one before, and count their tokens.

    Each agent has a separate connection, as a separate process would: a shared pool of httpx leaves idle ones behind.
    """

    async def __call__(self, prompt, rollout):
        async with (
            httpx.AsyncClient(timeout=120, verify=False, trust_env=False) as client,
            rollout.session(sampling=SamplingParams(max_new_tokens=16)) as session,
        ):
            given = await self.talk(client, session, f"task {prompt.id}.{rollout.index}")
        trajectory = session.trajectory()
        assert session.statistics().branches == len(trajectory.segments)
        assert sum(int(row.loss_mask.sum()) for row in trajectory.segments) == given
        assert trajectory.turns == TURNS
        return trajectory

    async def talk(self, client, session, task):
        """Talk for five turns; return the number of answered tokens."""
        given, messages = 0, [{"role": "user", "content": task}]
        for turn in range(TURNS):
            answer = await client.post(
                f"{session.base_url}/chat/completions",
                json={"model": "policy", "messages": messages},
                headers={"authorization": f"Bearer {session.api_key}"},
            )
            said = answer.raise_for_status().json()
            given += said["usage"]["completion_tokens"]
            messages += [said["choices"][0]["message"], {"role": "user", "content": f"and then {turn}?"}]
        return given


async def one(trajectory):
    return 1.0


def lines_up(row):
    """Return True if masks, log-probs and version spans are at the positions of their tokens."""
    covered = sum(stop - start for start, stop, _ in row.versions)
    return covered == int(row.loss_mask.sum()) and bool((row.log_probs[row.loss_mask == 0] == 0).all())


async def run_many(sessions, at_once, samples=4):
    """Run so many sessions; return the resident sizes after each tenth, and the versions that were seen."""
    sizes, versions, groups = [], set(), 0
    async with (
        open_tiny_process(TinySettings(max_running=at_once)) as tiny,
        open_sglang_servers([tiny.url]) as servers,
        open_gateway(servers, tokenizer=DATA) as gateway,
        open_rollout_engine(
            IterableSource([Prompt(id=str(number), text="task") for number in range(sessions // samples)]),
            Agents(),
            servers=servers,
            reward=one,
            gateway=gateway,
            settings=EngineSettings(samples_per_prompt=samples, max_running=at_once),
        ) as engine,
    ):
        async for batch in engine.batches(max(1, sessions // samples // 10)):
            for trajectory in (row for group in batch.groups for row in group.trajectories):
                assert all(lines_up(row) for row in trajectory.segments)
                versions |= {span.version for row in trajectory.segments for span in row.versions}
            groups += len(batch.groups)
            await batch.ack()
            sizes.append(psutil.Process().memory_info().rss)
            if batch.step == 5:
                body = {"new_version": "1", "abort_all_requests": False}
                async with engine.weight_update(version=1, mode=PauseMode.RETRACT), httpx.AsyncClient() as trainer:
                    (await trainer.post(f"{tiny.url}/update_weight_version", json=body)).raise_for_status()
        requests = sum(server.requests for server in servers.statistics().servers)
        assert gateway.statistics().sessions == 0
        assert engine.statistics().quarantined == 0
    assert groups == sessions // samples
    assert requests == sessions * TURNS
    return sizes, versions


async def test_some_sessions():
    with trio.fail_after(120):
        _, versions = await run_many(80, 16)

    assert versions == {0, 1}


@pytest.mark.soak
async def test_two_thousand_sessions():
    """Resident size at the end <= that after a fifth of the run + max(20 MB, 5 %)."""
    sizes, versions = await run_many(2000, 256)

    assert versions == {0, 1}
    after_a_fifth = sizes[1]
    in_mb = [size // 1_000_000 for size in sizes]
    print("resident after each tenth, MB:", in_mb)  # ruff: ignore[print]  the numbers are the point of a soak
    assert sizes[-1] <= after_a_fifth + max(20_000_000, after_a_fifth // 20), in_mb
