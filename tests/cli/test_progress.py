"""The progress of a run as numbers, as one line and as a live display."""

import io

import pytest
from rich.console import Console

from trio_rollout._core.enums import Cause
from trio_rollout._core.statistics import ServerCounts
from trio_rollout._core.values import Group, GroupId, Prompt, Trajectory
from trio_rollout.cli._display import Meter, Progress, duration, live_rows, plain_line
from trio_rollout.cli._outcome import RewardTally


@pytest.fixture
def halfway(statistics_of):
    """The progress of a run in the middle of its work, with some failures."""
    statistics = statistics_of(
        pulled=60,
        waiting=4,
        running=8,
        ready=2,
        delivered=1,
        acked=42,
        filtered=1,
        quarantined=2,
        running_rollouts=31,
        requeues={Cause.DEADLINE: 3, Cause.ERROR: 0, Cause.SERVER_LOST: 8},
    )
    return Progress(
        statistics=statistics,
        total=100,
        elapsed_s=60.0,
        tokens_per_s=12345.6,
        rewards={"reward": 0.4124},
        left_s=185.2,
    )


def test_the_plain_line_names_everything_once(halfway):
    assert plain_line(halfway) == (
        "45/100 groups, 31 rollouts running, 12,346 tokens/s, mean reward 0.412, requeues: deadline 3, server_lost 8, "
        "quarantined 2, filtered 1, 3m05s left"
    )


def test_the_live_display_shows_the_same_facts(halfway):
    out = io.StringIO()

    Console(file=out, width=100).print(live_rows(halfway, "runs/demo"))

    lines = out.getvalue().splitlines()
    assert lines[0].startswith("runs/demo ━")
    assert lines[0].endswith("45/100 groups, 3m05s left")
    assert lines[1:] == [
        "31 rollouts running  12,346 tokens/s  mean reward 0.412",
        "requeues: deadline 3, server_lost 8  quarantined 2  filtered 1",
    ]


def test_failures_take_no_room_while_there_are_none(statistics_of):
    progress = Meter(total=None).progress(statistics_of(ready=1), now=0.0, rewards={})

    assert plain_line(progress) == "1 groups, 0 rollouts running, 0 tokens/s, time left unknown"


def test_servers_that_get_no_work_are_named(statistics_of):
    """With all servers unusable a run waits, and its user must see for what."""
    servers = [
        ServerCounts(url=f"http://s{n}:1", usable=n == 0, paused=False, version=0, in_flight=0, requests=0)
        for n in range(3)
    ]
    progress = Meter(total=None).progress(statistics_of(ready=1), now=0.0, rewards={}, servers=servers)

    assert "2 of 3 servers unusable: http://s1:1, http://s2:1" in plain_line(progress)


def test_the_time_left_follows_the_groups_of_this_run_only(statistics_of):
    """Ten groups from an earlier run do not make this one look faster."""
    meter = Meter(total=30)
    meter.progress(statistics_of(acked=10), now=100.0, rewards={})

    progress = meter.progress(statistics_of(acked=14, quarantined=1), now=110.0, rewards={})

    assert progress.elapsed_s == pytest.approx(10.0)
    assert progress.left_s == pytest.approx(30.0)


def test_there_is_no_time_left_before_the_first_group_and_none_after_the_last(statistics_of):
    meter = Meter(total=2)

    assert meter.progress(statistics_of(acked=1), now=0.0, rewards={}).left_s is None
    assert meter.progress(statistics_of(acked=1), now=50.0, rewards={}).left_s is None
    assert meter.progress(statistics_of(acked=2), now=60.0, rewards={}).left_s == pytest.approx(0.0)


def test_tokens_per_second_are_those_of_the_last_seconds(statistics_of):
    meter = Meter(total=None)
    rates = [
        meter.progress(statistics_of(generated_tokens=tokens), now=now, rewards={}).tokens_per_s
        for now, tokens in [(0.0, 1000), (10.0, 3000), (20.0, 3000), (40.0, 3000)]
    ]

    assert rates == [0.0, 200.0, 100.0, 0.0]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0s"), (59.4, "59s"), (59.6, "1m00s"), (185, "3m05s"), (3600, "1h00m"), (90061, "25h01m")],
)
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text


def test_rewards_are_averaged_by_name_and_missing_ones_left_out():
    prompt = Prompt(id="a", text="?")
    rewards = [1.0, 0.0, None, {"style": 0.5, "reward": 2.0}]
    rows = [Trajectory(prompt=prompt, index=i, segments=(), reward=reward) for i, reward in enumerate(rewards)]
    tally = RewardTally()

    tally.add([Group(id=GroupId(0, "a"), attempt=1, prompt=prompt, trajectories=rows)])

    assert tally.means() == {"reward": 1.0, "style": 0.5}
    assert tally.rollouts == 4
