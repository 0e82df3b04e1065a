"""``trio-rollout inspect``."""

import attrs
import pytest
import trio
from click.testing import CliRunner

from trio_rollout._core.enums import Cause, Stop
from trio_rollout._core.ledger_events import (
    Acked,
    Delivered,
    Filtered,
    Pulled,
    Quarantined,
    Ready,
    RunIdentity,
    SampleKept,
    SamplesTried,
    TurnRecorded,
)
from trio_rollout._core.turn_log import RecordedTurn
from trio_rollout._core.values import (
    Failure,
    Group,
    GroupId,
    Prompt,
    QuarantineReport,
    Segment,
    Trajectory,
    Turn,
    VersionSpan,
)
from trio_rollout.cli._entry import Commands
from trio_rollout.cli._inspect import inspect
from trio_rollout.ledger import _rows, open_ledger
from trio_rollout.tiny import DATA
from trio_rollout.tokenizer import load_tokenizer


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
        answer = Turn(
            rid="r",
            prompt_ids=(),
            output_ids=[1, 2],
            log_probs=[-1, -1],
            text="so",
            stop=Stop.STOP,
            weight_version=0,
            versions=[],
        )
        recorded = [RecordedTurn(number=number, request=b"r", turn=answer) for number in range(2)]
        await ledger.record([SampleKept(id=GroupId(0, "e"), attempt=1, trajectory=row)])
        await ledger.record([TurnRecorded(id=GroupId(0, "e"), index=0, record=each) for each in recorded])


def test_a_waiting_group_shows_the_samples_that_are_finished(shown, results):
    trio.run(_keep_samples, results)

    assert shown("e") == [
        "0/e waiting not tried yet 1 finished sample 2 recorded turns 4 tokens",
        "--- prompt",
        "[user] hi",
        "--- rollout 1: completed, stop stop, 1 turn, reward 0.5",
        "1 + 1 tokens, versions none",
        "hello",
    ]


def test_groups_are_listed_by_state(shown):
    lines = shown("--state", "acked", "--state", "delivered")

    assert lines == [
        "0/a acked (step 0) 1 attempt versions 3-4 rewards 1; 0",
        "0/b delivered (step 1) 1 attempt versions 3-4 rewards style 0.5; style 1.5",
    ]


def test_an_unknown_group_is_an_error(shown):
    assert shown("7/a", status=1)[0].startswith("Error: no group '7/a'")


def test_a_folder_without_results_is_an_error(tmp_path):
    result = CliRunner().invoke(Commands(commands=[inspect]), ["inspect", str(tmp_path)])

    assert result.exit_code == 1
    assert "is no ledger" in result.output


def inspected(path, *arguments, status=0):
    """Return the lines of ``inspect`` of a folder, with single spaces."""
    result = CliRunner().invoke(Commands(commands=[inspect]), ["inspect", str(path), *map(str, arguments)])
    assert result.exit_code == status, result.output
    return [" ".join(line.split()) for line in result.output.splitlines()]


def row(prompt, index, text="hello", *, reward=1.0, mask=(1,), ids=(1, 2)):
    """Return a trajectory of two tokens or more."""
    segment = Segment(
        tokens=list(ids), response_length=len(mask), loss_mask=mask, log_probs=[-1] * len(mask), versions=[], text=text
    )
    return Trajectory(prompt=prompt, index=index, segments=[segment], reward=reward)


async def _library_run(path):
    """Ack 0, filter 1, quarantine 2 with a kept sample, let 3 wait, as a library run that keeps nothing that was acked."""
    prompts = tuple(Prompt(id=str(number), text="hi") for number in range(4))
    group = Group(id=prompts[0].group_id, attempt=1, prompt=prompts[0], trajectories=[row(prompts[0], 0)])
    error = Failure(cause=Cause.ERROR, type="KeyError", message="no")
    async with open_ledger(path) as ledger:
        await ledger.begin(RunIdentity(source="four prompts", samples_per_prompt=1))
        await ledger.record([Pulled(prompts=prompts, source_state={})])
        await ledger.record([
            Ready(group=group, tokens=7, wasted={Cause.DEADLINE: 5}),
            Filtered(id=GroupId(0, "1"), attempt=1, reason="too easy", tokens=4),
            SampleKept(id=GroupId(0, "2"), attempt=1, trajectory=row(prompts[2], 0), tokens=3),
            SampleKept(id=GroupId(0, "3"), attempt=1, trajectory=row(prompts[3], 0), tokens=2),
            SamplesTried(id=GroupId(0, "3"), samples=(), wasted={Cause.DEADLINE: 1, Cause.STALE: 6}),
        ])
        report = QuarantineReport(id=GroupId(0, "2"), cause=Cause.ERROR, attempts=3, error=error)
        await ledger.record([Quarantined(report=report, wasted={Cause.ERROR: 8})])
        await ledger.record([Delivered(step=0, ids=(group.id,))])
        await ledger.record([Acked(step=0, ids=(group.id,))])


def test_f166_a_group_that_was_acked_and_not_kept_can_be_looked_at(tmp_path):
    trio.run(_library_run, tmp_path)

    assert inspected(tmp_path, "0") == [
        "0/0 acked (step 0) 1 attempt rewards 1 7 tokens tokens wasted: deadline 5",
        (
            "(it was delivered as step 0 and acked; its prompt and its trajectories were deleted then, because the ledger was not "
            "opened with keep_acked=True)"
        ),
    ]
    assert inspected(tmp_path, "1") == [
        "0/1 filtered 1 attempt too easy 4 tokens",
        "(it is filtered; its prompt and its trajectories are not kept)",
    ]
    assert inspected(tmp_path, "--state", "acked")[0].startswith("0/0 acked (step 0) 1 attempt")
    assert "reward 1 1.0000 1.0000 1.0000" in inspected(tmp_path)


def test_the_overview_says_what_became_of_the_sampled_tokens(tmp_path):
    """As ``statistics().tokens``: the kept samples of a quarantined group are wasted for its cause."""
    trio.run(_library_run, tmp_path)

    lines = inspected(tmp_path)

    for line in ("kept 2", "delivered 7", "filtered 4", "wasted: deadline 6", "wasted: stale 6", "wasted: error 11"):
        assert line in lines
    assert (
        inspected(tmp_path, "3")[0]
        == "0/3 waiting not tried yet 1 finished sample 2 tokens tokens wasted: deadline 1, stale 6"
    )


def test_f166_a_group_that_ended_long_ago_is_not_called_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(_rows, "_MOST_ENDED", 1)
    trio.run(_library_run, tmp_path)

    (line,) = inspected(tmp_path, "1", status=1)
    assert line.endswith("1 group that ended earlier are only counted")
    for line in ("delivered 7", "filtered 4", "wasted: deadline 6"):
        assert line in inspected(tmp_path)


def test_the_weight_version_is_that_of_the_newest_token_where_none_was_recorded(tmp_path):
    trio.run(_library_run, tmp_path / "none")
    assert inspected(tmp_path / "none")[1] == "next step 1, weight version none yet"

    async def with_version(path):
        async with open_ledger(path) as ledger:
            await ledger.begin(RunIdentity(source="one prompt", samples_per_prompt=1))
            prompt = Prompt(id="0", text="hi")
            segment = attrs.evolve(row(prompt, 0).segments[0], versions=[VersionSpan(0, 1, 3)])
            rows = [attrs.evolve(row(prompt, 0), segments=[segment])]
            group = Group(id=prompt.group_id, attempt=1, prompt=prompt, trajectories=rows)
            await ledger.record([Pulled(prompts=(prompt,), source_state={}), Ready(group=group)])

    trio.run(with_version, tmp_path / "some")
    assert inspected(tmp_path / "some")[1] == "next step 0, weight version 3"


def test_f166_a_tools_text_is_shown_with_a_tokenizer(tmp_path):
    """Without one the number of its tokens is."""
    tokenizer = load_tokenizer(DATA)
    asked, answer, tool, last = (tokenizer.encode(text) for text in ("add 1 and 2", "call add", "3", "it is 3"))

    async def with_tool(path):
        async with open_ledger(path) as ledger:
            await ledger.begin(RunIdentity(source="one prompt", samples_per_prompt=1))
            prompt = Prompt(id="0", text="add 1 and 2")
            mask = [*[1] * len(answer), *[0] * len(tool), *[1] * len(last)]
            rows = [row(prompt, 0, "it is 3", mask=mask, ids=[*asked, *answer, *tool, *last])]
            group = Group(id=prompt.group_id, attempt=1, prompt=prompt, trajectories=rows)
            await ledger.record([Pulled(prompts=(prompt,), source_state={}), Ready(group=group)])

    trio.run(with_tool, tmp_path)

    shown = inspected(tmp_path, "0", "--tokenizer", DATA)
    assert shown[-8:] == ["[context]", "add 1 and 2", "[model]", "call add", "[context]", "3", "[model]", "it is 3"]
    assert inspected(tmp_path, "0")[-2:] == [
        f"({len(tool)} tokens between the answers, such as a tool's: --tokenizer PATH shows them as text)",
        "it is 3",
    ]
