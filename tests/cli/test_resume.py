"""``--resume turns``: an interrupted run goes on turn by turn."""

from functools import partial

import pytest

from ._commands import command, started, tiny_server, write_jsonl


@pytest.fixture(scope="module")
def slow():
    """The URL of a tiny server whose answer of 20 tokens takes a second."""
    with tiny_server("--step-delay", 0.05, "--eos-id", -1) as (url, _):
        yield url


TALK = """
from pathlib import Path

async def talk(prompt, rollout):
    ids, turns = [1, 2, 3], []
    for number in range(3):
        with Path("talk.log").open("a") as log:
            log.write("given back\\n" if rollout.replaying else "sampled\\n")
        print(f"turn {number}", flush=True)
        turns.append(await rollout.generate(ids))
        ids = [*turns[-1].prompt_ids, *turns[-1].output_ids, 5]
    return rollout.finish(turns)
"""


@pytest.mark.parametrize("way", ["option", "file", "neither"])
def test_turns_come_back_in_the_next_run_if_the_option_or_the_file_says_so(slow, tmp_path, monkeypatch, way):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "talk.py").write_text(TALK)
    (tmp_path / "run.toml").write_text("max_running = 1\n" + ('resume = "turns"\n' if way == "file" else ""))
    arguments = [
        *("run", "--prompts", write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": [1]}]), "--out", tmp_path / "out"),
        *("--samples", 1, "--max-new-tokens", 20, "--reward", "regex:", "--generate", "talk:talk", "--server", slow),
        *("--grace", 0, "--config", tmp_path / "run.toml", *(("--resume", "turns") if way == "option" else ())),
    ]
    with started(*arguments) as running:
        running.read_until("turn 2")
        running.ctrl_c()
        assert running.end().status == 130
    ended = command(*arguments)

    assert ended.status == 0, ended.out + ended.err
    again = ["sampled"] * 3 if way == "neither" else ["given back", "given back", "sampled"]
    assert (tmp_path / "talk.log").read_text().splitlines() == ["sampled"] * 3 + again


def test_another_value_of_resume_is_refused(tmp_path):
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": [1]}])
    run = partial(command, "run", "--prompts", prompts, "--out", tmp_path / "out")
    ended = run("--resume", "tokens")
    assert ended.status == 2
    assert "'tokens' is not one of 'samples', 'turns'" in ended.err
    (tmp_path / "run.toml").write_text('resume = "tokens"\n')
    ended = run("--config", tmp_path / "run.toml")
    assert ended.status == 2
    assert "'tokens' is not one of 'samples', 'turns'" in ended.err
