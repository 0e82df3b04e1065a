"""``trio-rollout export``."""

import io
import json
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import trio
from click.testing import CliRunner

from trio_rollout._core.ledger_events import RunIdentity, VersionChanged
from trio_rollout._core.values import Group, Prompt, Segment, Trajectory
from trio_rollout.cli import main
from trio_rollout.cli._export import group_object, json_text, write_parquet
from trio_rollout.ledger import open_ledger
from trio_rollout.ledger._disk import DATABASE


@pytest.fixture
def export(results):
    """Return a function that exports the results and checks the exit status."""

    def run(*arguments, status=0):
        result = CliRunner().invoke(main, ["export", str(results), *map(str, arguments)])
        assert result.exit_code == status, result.output
        return result

    return run


def rows_of(parquet):
    """Read Parquet from memory: a thread of the reader may keep a file open beyond the test."""
    return pq.read_table(io.BytesIO(parquet)).to_pylist()


def test_jsonl_has_one_object_a_group_with_every_field(export):
    lines = export("--format", "jsonl").stdout.splitlines()

    a, b, c = map(json.loads, lines)
    segment = {
        "tokens": [5, 6, 7, 8, 9],
        "response_length": 3,
        "loss_mask": [1, 1, 1],
        "log_probs": [-0.5, -0.25, -1.0],
        "versions": [[0, 2, 3], [2, 3, 4]],
        "text": "it is \x1b[31ma",
    }
    row = {"status": "completed", "stop": "stop", "turns": 1, "segments": [segment]}
    assert a == {
        "id": "0/a",
        "attempt": 1,
        "prompt": {"id": "a", "epoch": 0, "text": "what is a?", "label": "two", "metadata": {"level": 3}},
        "trajectories": [{"index": 0, "reward": 1.0, **row}, {"index": 1, "reward": 0.0, **row}],
    }
    assert [trajectory["reward"] for trajectory in b["trajectories"]] == [{"style": 0.5}, {"style": 1.5}]
    assert c["attempt"] == 2


@pytest.mark.parametrize(
    ("states", "ids"),
    [(["ready"], ["0/c"]), (["acked", "delivered"], ["0/a", "0/b"]), ([], ["0/a", "0/b", "0/c"])],
)
def test_states_choose_groups(export, states, ids):
    arguments = [part for state in states for part in ("--state", state)]

    assert [json.loads(line)["id"] for line in export(*arguments).stdout.splitlines()] == ids


def test_parquet_has_one_row_a_group_with_the_same_fields(export, tmp_path):
    path = tmp_path / "groups.parquet"

    export("--format", "parquet", "--output", path)

    a, b, _ = rows_of(path.read_bytes())
    assert a["id"] == "0/a"
    assert a["prompt"]["text"] == "what is a?"
    assert json.loads(a["prompt"]["metadata"]) == {"level": 3}
    assert a["trajectories"][0]["segments"][0]["tokens"] == [5, 6, 7, 8, 9]
    assert a["trajectories"][0]["segments"][0]["versions"][1] == {"start": 2, "stop": 3, "version": 4}
    assert [row["reward"] for row in a["trajectories"]] == [1.0, 0.0]
    assert [json.loads(row["rewards"]) for row in b["trajectories"]] == [{"style": 0.5}, {"style": 1.5}]


def test_parquet_goes_to_stdout_as_well(export):
    rows = rows_of(export("--format", "parquet").stdout_bytes)

    assert [row["id"] for row in rows] == ["0/a", "0/b", "0/c"]


READERS = """
import sys
from pathlib import Path
import pandas, polars
jsonl, parquet = sys.argv[1:]
frames = [
    pandas.read_json(jsonl, lines=True),
    pandas.read_parquet(parquet),
    pandas.DataFrame(polars.read_ndjson(jsonl).to_dicts()),
    pandas.DataFrame(polars.read_parquet(parquet).to_dicts()),
]
for frame in frames:
    assert list(frame["id"]) == ["0/a", "0/c"], frame
    assert [row["reward"] for row in frame["trajectories"][0]] == [1.0, 0.0], frame
    assert list(frame["trajectories"][1][0]["segments"][0]["tokens"]) == [5, 6, 7, 8, 9], frame
    assert frame["prompt"][0]["text"] == "what is a?", frame
"""


async def test_pandas_and_polars_read_both_formats_also_while_a_run_writes(export, results, tmp_path):
    """The readers run in a separate process, because both start threads that stay."""
    jsonl, parquet = tmp_path / "groups.jsonl", tmp_path / "groups.parquet"
    only = ("--state", "acked", "--state", "ready")
    async with open_ledger(results, keep_acked=True) as ledger:
        await ledger.begin(RunIdentity(source="five prompts", samples_per_prompt=2))
        await ledger.record([VersionChanged(version=5)])
        export(*only, "--output", jsonl)
        export(*only, "--format", "parquet", "--output", parquet)
        await ledger.record([VersionChanged(version=6)])

    await trio.run_process([sys.executable, "-W", "error", "-c", READERS, jsonl, parquet])


def test_a_file_that_can_not_be_written_is_an_error_and_leaves_nothing(export, tmp_path):
    result = export("--output", tmp_path / "nowhere" / "groups.jsonl", status=1)

    assert "can't write" in result.output


def test_a_failed_export_leaves_the_old_file(export, tmp_path, results):
    path = tmp_path / "groups.jsonl"
    path.write_text("old")
    (results / DATABASE).write_bytes(b"no database" * 1000)

    assert "Traceback" not in export("--output", path, status=1).output

    assert path.read_text() == "old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["groups.jsonl", "results"]


@pytest.fixture
def odd_group():
    """Return a group with values that users and models really produce: lone surrogates, arrays, infinities, odd keys."""
    prompt = Prompt(
        id="odd", text="?", label=np.array([1, 2]), metadata={"n": np.int64(7), "deep": {"set": (1, 2)}, "s": "\ud800"}
    )
    segment = Segment(
        tokens=[1, 2], response_length=1, loss_mask=[1], log_probs=[float("-inf")], versions=[], text="a\udfffb"
    )
    rows = [Trajectory(prompt=prompt, index=0, segments=[segment], reward=1.0)]
    return Group(id=prompt.group_id, attempt=1, prompt=prompt, trajectories=rows)


def test_odd_values_still_make_valid_json(odd_group):
    found = json.loads(json_text(group_object(odd_group)), parse_constant=pytest.fail)

    assert found["prompt"]["label"] == [1, 2]
    assert found["prompt"]["metadata"] == {"n": 7, "deep": {"set": [1, 2]}, "s": "?"}
    assert found["trajectories"][0]["segments"][0]["text"] == "a?b"
    assert found["trajectories"][0]["segments"][0]["log_probs"] == [None]


def test_odd_values_go_into_parquet(odd_group, tmp_path):
    path = tmp_path / "odd.parquet"
    with path.open("wb") as file:
        write_parquet([odd_group], file)

    (row,) = rows_of(path.read_bytes())
    assert json.loads(row["prompt"]["label"]) == [1, 2]
    assert row["trajectories"][0]["segments"][0]["text"] == "a?b"
