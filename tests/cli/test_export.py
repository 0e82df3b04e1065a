"""``trio-rollout export``."""

import io
import json
import os
import stat
import subprocess
import sys
import tty

import attrs
import numpy as np
import pyarrow.parquet as pq
import pytest
import trio
from click.testing import CliRunner

from trio_rollout._core.enums import Cause, Status, Stop
from trio_rollout._core.ledger_events import RunIdentity, VersionChanged
from trio_rollout._core.sampling import SamplingParams
from trio_rollout._core.values import Failure, Group, MissingSample, Prompt, Segment, Trajectory, VersionSpan
from trio_rollout.cli import main
from trio_rollout.cli._export import Exported, group_object, json_text, write_jsonl, write_parquet
from trio_rollout.ledger import open_ledger
from trio_rollout.ledger._disk import DATABASE

from ._commands import COMMAND


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
        "extras": {},
    }
    row = {"status": "completed", "stop": "stop", "turns": 1, "metadata": {}, "error": None, "segments": [segment]}
    assert a == {
        "id": "0/a",
        "attempt": 1,
        "state": "acked",
        "step": 0,
        "prompt": {
            "id": "a",
            "epoch": 0,
            "text": "what is a?",
            "label": "two",
            "metadata": {"level": 3},
            "sampling": None,
            "extra": {},
        },
        "trajectories": [{"index": 0, "reward": 1.0, **row}, {"index": 1, "reward": 0.0, **row}],
        "missing": [],
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
import tty
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
    found = json.loads(json_text(group_object(Exported(odd_group))), parse_constant=pytest.fail)

    assert found["prompt"]["label"] == [1, 2]
    assert found["prompt"]["metadata"] == {"n": 7, "deep": {"set": [1, 2]}, "s": "?"}
    assert found["trajectories"][0]["segments"][0]["text"] == "a?b"
    assert found["trajectories"][0]["segments"][0]["log_probs"] == [None]


def test_odd_values_go_into_parquet(odd_group, tmp_path):
    path = tmp_path / "odd.parquet"
    with path.open("wb") as file:
        write_parquet([Exported(odd_group)], file)

    (row,) = rows_of(path.read_bytes())
    assert json.loads(row["prompt"]["label"]) == [1, 2]
    assert row["trajectories"][0]["segments"][0]["text"] == "a?b"


def everything(kind):
    """Return a value of an attrs class in which no field has its default, of what the class holds."""
    return {field.name for field in attrs.fields(kind)}


@pytest.fixture
def full_group():
    """Return a group in which every field has a value."""
    sampling = SamplingParams(max_new_tokens=3, stop=["x"], extra={"regex": "a"})
    prompt = Prompt(
        id="full", messages=[{"role": "user", "content": "?"}], tools=[{"name": "f"}], label=1, metadata={"a": 1},
        sampling=sampling, extra={"lora": "b"}, epoch=2,
    )  # fmt: skip
    failure = Failure(cause=Cause.ERROR, type="ValueError", message="no\u2028way", traceback="line", attempt=3)
    segment = Segment(
        tokens=[1, 2], response_length=1, loss_mask=[1], log_probs=[-1.0], versions=[VersionSpan(0, 1, 7)],
        text="a\u0085b\u2028c\u2029d", extras={"routed": np.array([[1, 2]], np.int32)},
    )  # fmt: skip
    row = Trajectory(
        prompt=prompt, index=1, segments=[segment], status=Status.TRUNCATED, stop=Stop.LENGTH, reward=0.5, turns=2,
        metadata={"tool_calls": 4, "line\u2028": "\u0085"}, error=failure,
    )  # fmt: skip
    missing = [MissingSample(index=0, failure=failure)]
    return Exported(Group(id=prompt.group_id, attempt=2, prompt=prompt, trajectories=[row], missing=missing), step=5)


def test_f165_every_field_that_the_ledger_has_is_exported(full_group, tmp_path):
    """Times and servers are not in the ledger. The values' own fields are compared, so that a new one is not forgotten."""
    found = json.loads(json_text(group_object(full_group)))

    assert everything(Group) | {"state", "step"} == set(found)
    assert everything(Prompt) - {"input_ids", "text"} == set(found["prompt"])
    assert everything(SamplingParams) == set(found["prompt"]["sampling"])
    (row,) = found["trajectories"]
    assert everything(Trajectory) - {"prompt"} == set(row)
    assert everything(Segment) == set(row["segments"][0])
    assert everything(Failure) - {"group"} == set(row["error"])
    assert (found["step"], found["state"]) == (5, "ready")
    assert row["metadata"]["tool_calls"] == 4
    assert row["segments"][0]["extras"] == {"routed": [[1, 2]]}
    assert found["missing"] == [{"index": 0, "error": row["error"]}]

    path = tmp_path / "full.parquet"
    with path.open("wb") as file:
        write_parquet([full_group], file)
    (read,) = rows_of(path.read_bytes())
    assert set(found) == set(read)
    assert json.loads(read["prompt"]["tools"]) == [{"name": "f"}]
    assert json.loads(read["trajectories"][0]["metadata"]) == row["metadata"]
    assert read["trajectories"][0]["error"] == row["error"]
    assert json.loads(read["trajectories"][0]["segments"][0]["extras"]) == {"routed": [[1, 2]]}
    assert read["missing"] == found["missing"]


@pytest.mark.parametrize("odd", [False, True])
def test_f165_a_record_is_one_line_for_every_reader(full_group, odd_group, odd):
    """Python's splitlines ends a line at eight characters; the odd group takes the slower way of writing JSON."""
    buffer = io.BytesIO()
    marked = attrs.evolve(odd_group, prompt=attrs.evolve(odd_group.prompt, metadata={"\u2028": "\u0085\x0b\x0c\x1c"}))
    write_jsonl([Exported(marked) if odd else full_group] * 2, buffer)

    one, two = buffer.getvalue().decode().splitlines()

    assert one == two
    if not odd:
        assert json.loads(one)["trajectories"][0]["segments"][0]["text"] == "a\u0085b\u2028c\u2029d"


@pytest.fixture(params=["jsonl", "parquet"])
def form(request):
    return request.param


def is_export(data, form):
    """Return True if these bytes are the export of three groups."""
    return len(rows_of(data)) == 3 if form == "parquet" else len(data.splitlines()) == 3


def test_f163_a_device_is_written_into_and_stays(export, tmp_path):
    """The device is a terminal: a broken export can't replace it, as it could replace /dev/null."""
    ours, terminal = os.openpty()
    link = tmp_path / "link"
    link.symlink_to(os.ttyname(terminal))
    tty.setraw(terminal)
    try:
        for output in (link, link.readlink()):
            export("--output", output)
            data = b""
            while data.count(b"\n") < 3:
                data += os.read(ours, 1 << 16)
            assert is_export(data, "jsonl")
    finally:
        os.close(terminal)
        os.close(ours)
    assert link.is_symlink()


@pytest.mark.parametrize("linked", [False, True])
def test_f163_a_pipe_is_written_into_and_stays(results, tmp_path, form, linked):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    output = tmp_path / "link"
    output.symlink_to("fifo")
    arguments = [*COMMAND, "export", results, "--format", form, "--output", output if linked else fifo]
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        subprocess.run(arguments, check=True)
        data = os.read(reader, 1 << 16)
    finally:
        os.close(reader)
    assert is_export(data, form)
    assert fifo.is_fifo()


def test_f163_a_symbolic_link_to_a_file_stays(export, tmp_path, form):
    """Its target is replaced once the export is complete, or made if it does not exist."""
    target, link = tmp_path / "deep" / "target", tmp_path / "link"
    target.parent.mkdir()
    link.symlink_to("deep/target")
    for _ in range(2):
        export("--format", form, "--output", link)
        assert link.is_symlink()
        assert is_export(target.read_bytes(), form)
    assert list(target.parent.iterdir()) == [target]


def test_f163_a_replaced_file_keeps_its_mode_and_a_new_one_gets_the_usual(export, tmp_path):
    old, new, usual = tmp_path / "old", tmp_path / "new", tmp_path / "usual"
    old.touch()
    old.chmod(0o600)
    usual.touch()

    export("--output", old)
    export("--output", new)

    assert stat.S_IMODE(old.stat().st_mode) == 0o600
    assert new.stat().st_mode == usual.stat().st_mode


def test_f163_the_name_of_the_unfinished_file_can_not_be_taken_before(export, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / ".groups.partial").symlink_to(victim)

    export("--output", tmp_path / "groups")

    assert victim.read_text() == "mine"


@pytest.mark.parametrize("linked", [False, True])
def test_f163_a_descriptor_is_written_into(results, tmp_path, linked):
    """The shell appends to a file, which keeps its beginning. The link is what /dev/stdout is."""
    path, link = tmp_path / "appended", tmp_path / "stdout"
    path.write_text("before\n")
    link.symlink_to("/proc/self/fd/1")
    output = link if linked else link.readlink()
    with path.open("ab") as file:
        subprocess.run([*COMMAND, "export", results, "--output", output], stdout=file, check=True)
    assert len(path.read_text().splitlines()) == 4


@pytest.mark.parametrize("name", ["ledger.db", "ledger.db-wal", "lock", "0000000000.seg"])
def test_f163_a_file_of_the_ledger_is_refused(export, results, tmp_path, name):
    link = tmp_path / "link"
    link.symlink_to(results / name)
    for output in (results / name, link):
        assert "is a file of the ledger" in export("--output", output, status=2).output
    assert len(export().stdout.splitlines()) == 3
