"""The end of a run: exit status, summary, closing lines."""

import io
from pathlib import Path

import attrs
import pytest
from rich.console import Console

from trio_rollout._core.enums import Cause
from trio_rollout._core.values import Failure, GroupId, QuarantineReport
from trio_rollout.cli._outcome import Ending, Outcome, closing_lines, exit_status, summary

REPORT = QuarantineReport(
    id=GroupId(0, "p7"),
    cause=Cause.ERROR,
    attempts=3,
    error=Failure(cause=Cause.ERROR, type="RewardError", message="judge said\n  NaN"),
)


@pytest.fixture
def finished(statistics_of):
    """The outcome of a run of ten groups, all scored."""
    return Outcome(
        ending=Ending.FINISHED,
        statistics=statistics_of(pulled=10, acked=10, generated_tokens=9000),
        quarantined=(),
        total=10,
        rollouts=40,
        scored=40,
        tokens=8000,
        rewards={"reward": 0.25},
        elapsed_s=20.0,
        out=Path("runs/demo"),
    )


@pytest.fixture
def interrupted(finished, statistics_of):
    """The outcome of a run that ended after six of ten groups, one of them quarantined."""
    return attrs.evolve(
        finished,
        ending=Ending.DRAINED,
        statistics=statistics_of(pulled=8, acked=5, quarantined=1, returned=2),
        quarantined=(REPORT,),
    )


def test_everything_scored_is_success(finished):
    assert exit_status(finished) == 0
    assert list(closing_lines(finished)) == []


def test_quarantined_groups_are_listed_one_a_line_and_change_the_status(finished, statistics_of):
    outcome = attrs.evolve(finished, statistics=statistics_of(acked=9, quarantined=1), quarantined=(REPORT,))

    assert exit_status(outcome) == 3
    assert list(closing_lines(outcome)) == ["quarantined 0/p7: error after 3 attempts: RewardError: judge said NaN"]


@pytest.mark.parametrize("ending", [Ending.DRAINED, Ending.CANCELLED])
def test_an_interrupt_takes_precedence_over_quarantined_groups_and_says_how_to_resume(interrupted, ending):
    outcome = attrs.evolve(interrupted, ending=ending)

    assert exit_status(outcome) == 130
    assert list(closing_lines(outcome))[-1] == (
        f"{ending.value}: 4 of 10 groups are left to do. Run the same command again to resume in runs/demo: finished groups "
        "are skipped, quarantined groups stay quarantined unless --retry-quarantined is given"
    )


def test_an_interrupt_after_the_last_group_says_that_nothing_is_left(interrupted, statistics_of):
    outcome = attrs.evolve(interrupted, statistics=statistics_of(acked=10), quarantined=())

    assert list(closing_lines(outcome)) == ["drained: no groups are left to do"]


def test_the_summary_counts_all_rollouts_and_apart_from_them_those_of_scored_groups(finished):
    """Those of quarantined groups, and tries that failed, are rollouts, too."""

    def shown(outcome):
        out = io.StringIO()
        Console(file=out, width=100).print(summary(outcome))
        return [" ".join(line.replace("│", " ").split()) for line in out.getvalue().splitlines()]

    assert "rollouts of scored groups 40" not in shown(finished)
    lines = shown(attrs.evolve(finished, rollouts=55))
    assert "rollouts in this run 55" in lines
    assert "rollouts of scored groups 40" in lines


def test_the_summary_counts_groups_since_the_beginning_and_tokens_of_this_run(finished):
    out = io.StringIO()

    Console(file=out, width=100).print(summary(finished))

    text = out.getvalue()
    assert "runs/demo: finished" in text
    for name, value in [
        ("groups scored", "10 of 10"),
        ("groups quarantined", "0"),
        ("rollouts in this run", "40"),
        ("mean reward in this run", "0.2500"),
        ("tokens in this run", "8,000"),
        ("tokens/s", "400"),
        ("retries", "none"),
        ("requeues", "none"),
        ("tokens wasted", "none"),
        ("time", "20s"),
    ]:
        assert any(name in line and line.rstrip("│ ").endswith(value) for line in text.splitlines()), name
