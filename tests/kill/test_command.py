"""kill -9 of ``trio-rollout run`` while siblings are finished: run again, it samples what is missing only (P11)."""

import json
import os
import subprocess
import time
from pathlib import Path

import trio

from trio_rollout import Prompt, SamplingParams, Trajectory
from trio_rollout._core.lifecycle import State
from trio_rollout.abc import Rollout
from trio_rollout.errors import LedgerError
from trio_rollout.ledger import read_ledger

from .servers import COMMAND, ROOT, observed_server
from .turns import Sample, Turns

PROMPTS, SAMPLES, LIVES = 6, 4, 3


async def generate(prompt: Prompt, rollout: Rollout) -> Trajectory:
    """Sample up to four turns; the last line of each is for the server's notes. This runs inside the command.

    The last sample of each group hangs in all lives but the last, so there is all the time to kill the command.
    """
    turns = []
    for turn in range(1 + rollout.index):
        if rollout.index == turn == SAMPLES - 1 and int(os.environ["LIFE"]) < LIVES - 1:
            await trio.sleep_forever()
        line = f"{os.environ['LIFE']} {prompt.group_id} {rollout.index} {rollout.attempt} {turn}"
        turns.append(await rollout.generate(f"{rollout.input}\n{line}", SamplingParams(max_new_tokens=4)))
    return rollout.finish(turns)


def samples_in(out: Path) -> tuple[set[Sample], set[Sample]]:
    """Return the samples that the run's ledger has: all of them, and those whose group is not finished."""
    everything: set[Sample] = set()
    siblings: set[Sample] = set()
    try:
        with read_ledger(out) as reader:
            for group in reader.summaries():
                if group.state is State.WAITING:
                    siblings |= {(str(group.id), row.index) for row in reader.samples(group.id).kept}
                else:
                    everything |= {(str(group.id), index) for index in range(SAMPLES)}
    except LedgerError:  # it is not there yet
        pass
    return everything | siblings, siblings


def live(out: Path, options: dict[str, object], life: int, *, until: int | None) -> int:
    """Run the command; kill it once so many siblings are on disk (None: never). Return its exit status."""
    command = [
        *COMMAND,
        "run",
        "--quiet",
        *(word for name, value in options.items() for word in (f"--{name}", str(value))),
    ]
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"LIFE": str(life)}, stdout=subprocess.DEVNULL
    ) as process:
        while until is not None and process.poll() is None:
            if len(samples_in(out)[1]) >= until:
                process.kill()
            time.sleep(0.02)
        return process.wait(timeout=120)


def test_f103_the_command_samples_again_only_what_was_not_on_disk(tmp_path):
    file, out, notes = tmp_path / "prompts.jsonl", tmp_path / "out", tmp_path / "notes"
    file.write_text("".join(json.dumps({"prompt": f"what is {number}"}) + "\n" for number in range(PROMPTS)), "utf-8")
    turns = Turns(notes=notes, max_running=PROMPTS * SAMPLES, life=0)
    with observed_server(0.01, notes) as url:
        options = {
            "server": url,
            "prompts": file,
            "out": out,
            "samples": SAMPLES,
            "max-running": PROMPTS * SAMPLES,
            "generate": "tests.kill.test_command:generate",
            "reward": "regex:",
        }
        for until in (PROMPTS, (SAMPLES - 1) * PROMPTS):
            assert live(out, options, turns.life, until=until) == -9
            on_disk, siblings = samples_in(out)
            assert len(siblings) >= until
            turns.end_life(on_disk)
        assert live(out, options, turns.life, until=None) == 0
        turns.end_life(samples_in(out)[0])
    assert turns.problems == []
    assert turns.counts["turns"] >= PROMPTS * sum(1 + index for index in range(SAMPLES))
