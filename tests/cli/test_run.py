"""``trio-rollout run`` from its beginning to its end, in separate processes, against tiny servers."""

import json
import shutil
import signal
from functools import partial

import pytest
from click.testing import CliRunner

from trio_rollout.cli import main
from trio_rollout.tiny import DATA
from trio_rollout.tokenizer import load_tokenizer

from ._commands import command, started, tiny_server, write_jsonl

SCRIPT = {"rules": [{"matches": "double (\\d+)", "answer": "{1}{1}"}, {"contains": "say no", "answer": "no"}]}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """The URL of a tiny server that doubles digits and says no."""
    script = tmp_path_factory.mktemp("server") / "script.json"
    script.write_text(json.dumps(SCRIPT))
    with tiny_server("--script", script) as (url, _):
        yield url


@pytest.fixture
def prompts(tmp_path):
    """Six prompts whose label is the server's answer, except for the last one."""
    items = [{"prompt": f"double {n}", "label": f"{n}{n}"} for n in range(5)]
    return write_jsonl(tmp_path / "prompts.jsonl", [*items, {"prompt": "say no", "label": "yes"}])


@pytest.fixture
def run(prompts, tmp_path):
    """Return a function that runs the prompts into the folder ``out``, with further arguments."""
    return partial(command, "run", "--prompts", prompts, "--out", tmp_path / "out", "--samples", 2)


def exported(directory):
    """Return the groups of a folder by prompt id."""
    result = CliRunner().invoke(main, ["export", str(directory), "--format", "jsonl"])
    assert result.exit_code == 0, result.output
    groups = [json.loads(line) for line in result.stdout.splitlines()]
    return {group["prompt"]["id"]: group for group in groups}


def test_every_group_is_scored_and_a_second_run_makes_none_again(run, scripted, tmp_path):
    first = run("--server", scripted, "--reward", "exact_match")

    assert first.status == 0, first.out + first.err
    assert any("groups scored" in line and "6 of 6" in line for line in first.lines)
    assert any("mean reward in this run" in line and "0.8333" in line for line in first.lines)
    groups = exported(tmp_path / "out")
    rewards = {name: [row["reward"] for row in group["trajectories"]] for name, group in groups.items()}
    assert rewards == {str(n): [1.0, 1.0] for n in range(5)} | {"5": [0.0, 0.0]}
    assert groups["3"]["trajectories"][0]["segments"][0]["text"] == "33"

    again = run("--server", scripted, "--reward", "exact_match")

    assert again.status == 0, again.out + again.err
    assert any("rollouts in this run" in line and line.strip("│ ").endswith(" 0") for line in again.lines)
    assert exported(tmp_path / "out") == groups

    other_file = ("--prompts", write_jsonl(tmp_path / "other.jsonl", [{"prompt": "say no"}]))
    for change, what in (
        (other_file, "source is 'JSONL of 6 prompts"),
        (("--reward", "regex:."), "reward is 'exact_match'"),
    ):
        other = run("--server", scripted, *change)
        assert other.status == 1
        assert f"belongs to another run: its {what}" in other.err
    assert exported(tmp_path / "out") == groups


def test_without_a_server_a_tiny_one_is_started_and_ends_with_the_run(run):
    ended = run("--max-new-tokens", 4, "--reward", "regex:.")

    assert ended.status == 0, ended.out + ended.err
    assert any("no --server given" in line for line in ended.lines)


def test_ctrl_c_does_not_end_the_tiny_server_before_its_run(prompts, tmp_path):
    arguments = [
        "--samples",
        2,
        "--max-running",
        2,
        "--max-new-tokens",
        100_000,
        "--progress-every",
        0.05,
        "--grace",
        0,
    ]
    with started("run", "--prompts", prompts, "--out", tmp_path / "out", *arguments) as running:
        running.read_until("2 rollouts running")
        running.ctrl_c()
        ended = running.end()

    assert ended.status == 130, ended.out + ended.err
    assert "server_lost" not in ended.out


def test_prompts_may_be_text_ids_or_messages_and_one_that_no_server_takes_is_quarantined_at_once(scripted, tmp_path):
    path = write_jsonl(
        tmp_path / "mixed.jsonl",
        [
            {"q": "say no", "name": "text"},
            {"q": [1, 2, 3], "name": "ids"},
            {"q": [1, 2**30], "name": "outside"},
            {"q": [{"role": "user", "content": "say no"}], "name": "messages", "metadata": {"level": 3}},
        ],
    )

    ended = command(
        *("run", "--prompts", path, "--out", tmp_path / "out", "--server", scripted, "--tokenizer", DATA),
        *("--prompt-key", "q", "--id-key", "name", "--reward", "regex:", "--samples", 1, "--max-new-tokens", 4),
    )

    assert ended.status == 3, ended.out + ended.err
    assert [
        line for line in ended.lines if line.startswith("quarantined 0/outside: error after 1 attempt: RequestRejected")
    ]
    groups = exported(tmp_path / "out")
    assert sorted(groups) == ["ids", "messages", "text"]
    assert groups["messages"]["prompt"]["metadata"] == {"level": 3}
    assert groups["messages"]["trajectories"][0]["segments"][0]["text"] == "no"


def test_f162_the_tools_of_a_line_reach_the_model_of_a_run(scripted, tmp_path):
    """The key is an option of the command line and of the configuration; an empty one reads no tools."""
    line = {"prompt": [{"role": "user", "content": "say no"}], "functions": [{"name": "find_me"}]}
    path = write_jsonl(tmp_path / "tools.jsonl", [line])
    config = tmp_path / "run.toml"
    common = ("run", "--config", config, "--prompts", path, "--server", scripted, "--tokenizer", DATA)
    shown = {}
    for name, toml in (("with", 'tools_key = "functions"'), ("without", 'tools_key = ""')):
        config.write_text(f'{toml}\nreward = "regex:"\nsamples = 1\nmax_new_tokens = 4\n')
        out = tmp_path / name
        ended = command(*common, "--out", out)
        assert ended.status == 0, ended.out + ended.err
        segment = exported(out)["0"]["trajectories"][0]["segments"][0]
        shown[name] = load_tokenizer(DATA).decode(segment["tokens"])

    assert "find_me" in shown["with"]
    assert "find_me" not in shown["without"]


def test_f152_a_run_gives_the_template_its_variables(scripted, tmp_path):
    """From the command line and from the configuration; other variables are another run."""
    model = tmp_path / "model"
    shutil.copytree(DATA, model)
    (model / "chat_template.jinja").write_text("{{ mode }} {{ level }} {{ messages[0].content }}")
    path = write_jsonl(tmp_path / "messages.jsonl", [{"prompt": [{"role": "user", "content": "say no"}]}])
    config = tmp_path / "run.toml"
    config.write_text("template_variable = ['mode=\"deep\"', 'level=[1]']\nreward = 'regex:'\nsamples = 1\n")
    common = ("run", "--config", config, "--prompts", path, "--server", scripted, "--tokenizer", model)
    for name, given, wanted in (("toml", (), "deep [1] "), ("line", ("--template-variable", "mode=2"), "2  ")):
        ended = command(*common, "--out", tmp_path / name, *given)
        assert ended.status == 0, ended.out + ended.err
        segment = exported(tmp_path / name)["0"]["trajectories"][0]["segments"][0]
        assert load_tokenizer(DATA).decode(segment["tokens"]).startswith(f"{wanted}say no")
    assert command(*common, "--out", tmp_path / "toml", "--template-variable", "mode=2").status == 1


def test_a_run_that_fails_says_what_it_did_and_what_went_wrong(run, scripted, tmp_path):
    (tmp_path / "judge.py").write_text("async def judge(trajectory):\n    raise ValueError('out of order')\n")

    ended = run(
        "--server", scripted, "--reward", "judge:judge", "--max-attempts", 1, "--failure-budget", 3, cwd=tmp_path
    )

    assert ended.status == 1
    assert sum(line.startswith("quarantined ") for line in ended.lines) >= 3
    assert ended.lines[-1].startswith("failed: ")
    error = ended.err.splitlines()[-1]
    assert error.startswith("Error: 3 groups in a row failed for good")
    assert error.endswith("ValueError: out of order")


def test_generated_tasks_are_scored_by_their_own_verifier(scripted, tmp_path):
    pytest.importorskip("reasoning_gym", exc_type=ImportError)

    ended = command(
        *("run", "--tasks", "gcd:2", "--server", scripted, "--out", tmp_path / "out"),
        *("--samples", 1, "--max-new-tokens", 4),
    )

    assert ended.status == 0, ended.out + ended.err
    assert len(exported(tmp_path / "out")) == 2


def test_options_come_from_a_file(prompts, scripted, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text(
        f'prompts = "{prompts}"\nserver = "{scripted}"\nout = "{tmp_path / "out"}"\nsamples = 3\nno_progress = true\n'
    )

    ended = command("run", "--config", config, "--samples", 1)

    assert ended.status == 0, ended.out + ended.err
    assert all(len(group["trajectories"]) == 1 for group in exported(tmp_path / "out").values())


def test_quarantined_groups_are_listed(run, scripted, tmp_path):
    (tmp_path / "judge.py").write_text(
        "def judge(trajectory):\n    return float('nan') if trajectory.text == 'no' else 1.0\n"
    )

    ended = run("--server", scripted, "--reward", "judge:judge", "--max-attempts", 2, cwd=tmp_path)

    assert ended.status == 3, ended.out + ended.err
    assert any("groups scored" in line and "5 of 6" in line for line in ended.lines)
    assert [line for line in ended.lines if line.startswith("quarantined 0/5: error after 1 attempt: RewardError:")]
    assert sorted(exported(tmp_path / "out")) == ["0", "1", "2", "3", "4"]


def test_the_results_of_another_run_are_left_alone(run, scripted, results):
    before = exported(results)

    ended = run("--server", scripted, "--out", results)

    assert ended.status == 1
    assert "five prompts" in ended.err
    assert len(ended.err.splitlines()) == 1
    assert exported(results) == before


SLOW = ("--step-delay", 0.05, "--eos-id", -1)


@pytest.fixture(scope="module")
def slow():
    """The URL of a tiny server whose answer of 20 tokens takes a second."""
    with tiny_server(*SLOW) as (url, _):
        yield url


@pytest.fixture
def slow_run(prompts, tmp_path):
    """The arguments of a run with one group at a time, a second each."""
    return [
        *("run", "--prompts", prompts, "--out", tmp_path / "out", "--samples", 2, "--max-running", 2),
        *("--max-new-tokens", 20, "--reward", "regex:", "--progress-every", 0.05),
    ]


def test_ctrl_c_drains_and_the_next_run_does_the_rest(slow, slow_run, scripted, tmp_path):
    with started(*slow_run, "--server", slow) as running:
        running.read_until("2 rollouts running")
        running.ctrl_c()
        running.read_until("draining")
        ended = running.end()

    assert ended.status == 130, ended.out + ended.err
    assert ended.lines[-1].startswith("drained: 5 of 6 groups are left to do. Run the same command again to resume")
    (kept,) = exported(tmp_path / "out").values()

    again = command(*slow_run, "--server", scripted)

    assert again.status == 0, again.out + again.err
    groups = exported(tmp_path / "out")
    assert len(groups) == 6
    assert groups[kept["prompt"]["id"]] == kept


def test_finished_groups_survive_a_kill(slow, slow_run, scripted, tmp_path):
    with started(*slow_run, "--server", slow) as running:
        running.read_until("1/6 groups")
        running.signal(signal.SIGKILL)
        running.end()
    kept = exported(tmp_path / "out")
    assert kept

    again = command(*slow_run, "--server", scripted)

    assert again.status == 0, again.out + again.err
    groups = exported(tmp_path / "out")
    assert len(groups) == 6
    for name, group in kept.items():  # its state may have changed: it is acked now
        assert groups[name]["trajectories"] == group["trajectories"]


def test_a_second_ctrl_c_cancels(slow, slow_run, tmp_path):
    with started(*slow_run, "--server", slow, "--max-new-tokens", 100_000) as running:
        running.read_until("2 rollouts running")
        running.ctrl_c()
        running.read_until("draining")
        running.ctrl_c()
        ended = running.end()

    assert ended.status == 130, ended.out + ended.err
    assert ended.lines[-1].startswith("cancelled: 6 of 6 groups are left to do")
    assert exported(tmp_path / "out") == {}


def test_when_a_server_dies_the_others_go_on(slow_run, scripted, tmp_path):
    with (
        tiny_server(*SLOW) as (doomed, process),
        started(*slow_run, "--server", doomed, "--server", scripted, "--max-running", 12) as running,
    ):
        running.read_until(r"[1-9]\d* rollouts running")
        process.signal(signal.SIGKILL)
        ended = running.end()

    assert ended.status == 0, ended.out + ended.err
    assert len(exported(tmp_path / "out")) == 6


def test_usr1_shows_the_task_tree(slow, slow_run):
    with started(*slow_run, "--server", slow) as running:
        running.read_until("2 rollouts running")
        running.signal(signal.SIGUSR1)
        running.read_until("_Run.consume")
        running.signal(signal.SIGTERM)
        assert running.end().status == 130


def test_f101_a_scorer_that_meets_exit_costs_its_group_and_the_summary_is_printed(run, scripted, tmp_path):
    (tmp_path / "judge.py").write_text(
        "def judge(trajectory):\n    exec('exit(0)' if trajectory.text == 'no' else '', {})\n    return 1.0\n"
    )

    ended = run("--server", scripted, "--reward", "judge:judge", "--max-attempts", 1, cwd=tmp_path)

    assert ended.status == 3, ended.out + ended.err
    assert any("groups scored" in line and "5 of 6" in line for line in ended.lines)
    assert [line for line in ended.lines if line.startswith("quarantined 0/5: error after 1 attempt: SystemExit: ")]
