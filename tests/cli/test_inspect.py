"""``trio-rollout inspect``."""

import pytest
import trio
from click.testing import CliRunner

from trio_rollout._core.ledger_events import RunIdentity, SampleKept
from trio_rollout._core.values import GroupId, Prompt, Segment, Trajectory
from trio_rollout.cli._entry import Commands
from trio_rollout.cli._inspect import inspect
from trio_rollout.ledger import open_ledger


@pytest.fixture
def shown(results):
    """Return a function that runs ``inspect`` and returns the lines of its output, with single spaces."""
    commands = Commands(commands=[inspect])

    def run(*arguments, status=0):
        result = CliRunner().invoke(commands, ["inspect", str(results), *arguments])
        assert result.exit_code == status, result.output
        return [" ".join(line.split()) for line in result.output.splitlines()]

    return run


def test_the_overview_counts_states_causes_attempts_versions_and_rewards(shown):
    lines = shown()

    assert lines[:2] == ["five prompts, 2 samples per prompt", "next step 2, weight version 4"]
    for line in [
        *("waiting 1", "ready 1", "delivered 1", "acked 1", "quarantined 1"),
        *("error 1", "server_lost 1"),
        *("0 1", "1 2", "2 1", "3 1"),
        "3 to 4 3",
        "reward 4 0.7500 0.0000 1.0000",
        "style 2 1.0000 0.5000 1.5000",
        "quarantined 0/d: error after 3 attempts: RewardError: NaN",
    ]:
        assert line in lines


def test_a_group_is_shown_with_its_trajectories_as_text(shown):
    assert shown("0/c") == [
        "0/c ready 2 attempts last cause server_lost versions 3-4 rewards 1; 1",
        "--- prompt",
        "what is c?",
        "label: two",
        "metadata: {'level': 3}",
        "--- rollout 0: completed, stop stop, 1 turn, reward 1",
        "2 + 3 tokens, versions 3 [0:2], 4 [2:3]",
        r"it is \x1b[31mc",
        "--- rollout 1: completed, stop stop, 1 turn, reward 1",
        "2 + 3 tokens, versions 3 [0:2], 4 [2:3]",
        r"it is \x1b[31mc",
    ]


def test_a_quarantined_group_is_shown_with_its_error_and_traceback(shown):
    lines = shown("d")

    assert lines[0] == "0/d quarantined 3 attempts last cause error RewardError: NaN"
    assert lines[2].startswith("token ids 0 1 2")
    assert lines[2].endswith("63 ... 36 more")
    assert lines[-2:] == ["last error: error: RewardError: NaN", "Traceback: the judge's own words"]


def test_a_waiting_group_shows_its_messages(shown):
    assert shown("e")[1:] == ["--- prompt", "[user] hi"]


async def _keep_samples(path):
    async with open_ledger(path, keep_acked=True) as ledger:
        await ledger.begin(RunIdentity(source="five prompts", samples_per_prompt=2))
        row = Trajectory(
            prompt=Prompt(id="e", text="hi"),
            index=1,
            segments=[
                Segment(tokens=[1, 2], response_length=1, loss_mask=[1], log_probs=[-1], versions=[], text="hello")
            ],
            reward=0.5,
        )
        await ledger.record([SampleKept(id=GroupId(0, "e"), attempt=1, trajectory=row)])


def test_a_waiting_group_shows_the_samples_that_are_finished(shown, results):
    trio.run(_keep_samples, results)

    assert shown("e") == [
        "0/e waiting not tried yet 1 finished sample",
        "--- prompt",
        "[user] hi",
        "--- rollout 1: completed, stop stop, 1 turn, reward 0.5",
        "1 + 1 tokens, versions none",
        "hello",
    ]


def test_groups_are_listed_by_state(shown):
    lines = shown("--state", "acked", "--state", "delivered")

    assert lines == [
        "0/a acked 1 attempt versions 3-4 rewards 1; 0",
        "0/b delivered 1 attempt versions 3-4 rewards style 0.5; style 1.5",
    ]


def test_an_unknown_group_is_an_error(shown):
    assert shown("7/a", status=1)[0].startswith("Error: no group '7/a'")


def test_a_folder_without_results_is_an_error(tmp_path):
    result = CliRunner().invoke(Commands(commands=[inspect]), ["inspect", str(tmp_path)])

    assert result.exit_code == 1
    assert "is no ledger" in result.output
