"""``trio-rollout export``: the finished groups of a folder of results, as JSON lines or as a Parquet file.

Both formats have the same fields (``group_object``). Parquet needs the extra ``export`` (pyarrow); values without one type for
all groups (labels, metadata, messages, rewards by name) are JSON texts there.
"""

import itertools
import json
import math
import sys
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import click
import msgspec
import numpy as np

from .._core.lifecycle import State
from .._core.values import Group, Prompt, Segment, Trajectory
from ..ledger import read_ledger
from ._options import option

Row: TypeAlias = dict[str, Any]

_ROW_GROUP = 64
"""Groups in a row group of Parquet: tens of megabytes with eight rollouts of some thousand tokens each."""
_STATES = (State.READY, State.DELIVERED, State.ACKED)


@click.command("export", short_help="Export finished groups: JSON lines, Parquet.")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "parquet"]),
    default="jsonl",
    show_default=True,
    help="jsonl: one JSON object for each group. parquet: one row for each group, with the same fields.",
)
@option(
    "--state",
    "Write only groups in this state; may be repeated. Default: all three.",
    multiple=True,
    type=click.Choice([state.value for state in _STATES]),
)
@option(
    "--output",
    "Write to this file instead of stdout. The file appears once it is complete.",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
)
def export(directory: Path, form: str, state: tuple[str, ...], output: Path | None) -> None:
    """Export the finished groups of a folder of results, also while a run writes to it.

    A group has an id, an attempt, a prompt and trajectories. A trajectory has a status, a stop reason, a reward and
    segments. A segment has tokens (prompt and response), response_length, and for the response loss_mask, log_probs,
    versions (start, stop, weight version) and text.

    pandas and polars read both formats. In Parquet each field has one type: labels, metadata and messages are JSON texts,
    and rewards by name are in the field "rewards". In jsonl they are as they were given; if their types differ between
    groups, polars needs Parquet.
    """
    if form == "parquet" and output is None and sys.stdout.isatty():
        raise click.UsageError("parquet can't be written to a terminal: give --output FILE")
    write = write_parquet if form == "parquet" else write_jsonl
    target = nullcontext(sys.stdout.buffer) if output is None else _complete_file(output)
    with read_ledger(directory) as reader, target as file:
        write((group for _, group in reader.groups(*map(State, state))), file)
        file.flush()


@contextmanager
def _complete_file(output: Path) -> Generator[BinaryIO]:
    """Open a file that appears under its name only once it is complete."""
    partial = output.with_name(f".{output.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(output)
    except OSError as error:
        raise click.ClickException(f"can't write {output}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


def write_jsonl(groups: Iterable[Group], file: BinaryIO) -> None:
    """Write the groups as JSON lines."""
    file.writelines(json_text(group_object(group)).encode() + b"\n" for group in groups)


def _prompt(prompt: Prompt) -> dict[str, object]:
    """Return the prompt, with its input under the name of its kind."""
    shown: dict[str, object] = {"id": prompt.id, "epoch": prompt.epoch}
    if prompt.input_ids is not None:
        shown["input_ids"] = prompt.input_ids.tolist()
    elif prompt.text is not None:
        shown["text"] = prompt.text
    else:
        shown["messages"] = prompt.messages
    return shown | {"label": prompt.label, "metadata": prompt.metadata}


def _segment(segment: Segment) -> dict[str, object]:
    return {
        "tokens": segment.tokens.tolist(),
        "response_length": segment.response_length,
        "loss_mask": segment.loss_mask.tolist(),
        "log_probs": segment.log_probs.tolist(),
        "versions": [list(span) for span in segment.versions],
        "text": segment.text,
    }


def _trajectory(trajectory: Trajectory) -> dict[str, object]:
    return {
        "index": trajectory.index,
        "status": trajectory.status.value,
        "stop": trajectory.stop.value,
        "reward": trajectory.reward,
        "turns": trajectory.turns,
        "segments": [_segment(segment) for segment in trajectory.segments],
    }


def group_object(group: Group) -> dict[str, Any]:
    """Return the group as JSON data, except for values that users attached. ``versions`` are [start, stop, version]."""
    return {
        "id": str(group.id),
        "attempt": group.attempt,
        "prompt": _prompt(group.prompt),
        "trajectories": [_trajectory(trajectory) for trajectory in group.trajectories],
    }


def _users_value(value: object) -> object:
    """Return a user's value as JSON data: arrays become lists, mappings become objects, other values their text."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return dict(value) if isinstance(value, Mapping) else str(value)


def _plain(value: object) -> object:
    """Return the value without parts that JSON or its readers can't hold: polars reads no file with a lone surrogate."""
    if isinstance(value, Mapping):
        return {clean(str(key)): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, str):
        return clean(value)
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return _plain(_users_value(value))


def clean(text: str) -> str:
    """Return text that UTF-8 can encode: lone surrogates, which models produce, become question marks."""
    return text.encode("utf-8", "replace").decode()


def json_text(value: object) -> str:
    """Return a value as JSON on one line. NaN and infinity become null, lone surrogates question marks."""
    try:
        return msgspec.json.encode(value, enc_hook=_users_value).decode()
    except (UnicodeEncodeError, TypeError):  # a lone surrogate, or an odd key
        return json.dumps(_plain(value))


def _pyarrow() -> Any:
    try:
        import pyarrow as pa  # noqa: PLC0415  an optional dependency that takes half a second to import
        import pyarrow.parquet  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise click.ClickException("--format parquet needs pyarrow: pip install 'trio-rollout[export]'") from error
    return pa


def _schema(pa: Any) -> Any:
    def struct(**fields: Any) -> Any:
        return pa.struct(list(fields.items()))

    text, int32, int64, ids = pa.string(), pa.int32(), pa.int64(), pa.list_(pa.int32())
    segment = struct(
        tokens=ids,
        response_length=int32,
        loss_mask=pa.list_(pa.uint8()),
        log_probs=pa.list_(pa.float32()),
        versions=pa.list_(struct(start=int32, stop=int32, version=int64)),
        text=text,
    )
    trajectory = struct(
        index=int32,
        status=text,
        stop=text,
        reward=pa.float64(),
        rewards=text,
        turns=int32,
        segments=pa.list_(segment),
    )
    prompt = struct(id=text, epoch=int64, input_ids=ids, text=text, messages=text, label=text, metadata=text)
    return pa.schema(struct(id=text, attempt=int64, prompt=prompt, trajectories=pa.list_(trajectory)))


def _prompt_row(prompt: Row) -> Row:
    users = ("messages", "label", "metadata")
    as_json = {name: json_text(prompt[name]) for name in users if prompt.get(name) is not None}
    text = None if "text" not in prompt else clean(prompt["text"])
    return {**prompt, "id": clean(prompt["id"]), "text": text, **as_json}


def _segment_row(segment: Row) -> Row:
    versions = [dict(zip(("start", "stop", "version"), span, strict=True)) for span in segment["versions"]]
    return {**segment, "text": clean(segment["text"]), "versions": versions}


def _trajectory_row(trajectory: Row) -> Row:
    reward = trajectory["reward"]
    by_name = isinstance(reward, Mapping)
    return {
        **trajectory,
        "reward": None if by_name else reward,
        "rewards": json_text(reward) if by_name else None,
        "segments": [_segment_row(segment) for segment in trajectory["segments"]],
    }


def row_of(group: Group) -> Row:
    """Return the group as a row of Parquet."""
    found = group_object(group)
    trajectories = [_trajectory_row(trajectory) for trajectory in found["trajectories"]]
    return {**found, "id": clean(found["id"]), "prompt": _prompt_row(found["prompt"]), "trajectories": trajectories}


def write_parquet(groups: Iterable[Group], file: BinaryIO) -> None:
    """Write the groups as Parquet.

    Raises:
      click.ClickException: pyarrow is not installed.
    """
    pa = _pyarrow()
    schema, rows = _schema(pa), map(row_of, groups)
    with pa.parquet.ParquetWriter(file, schema) as writer:
        while chunk := list(itertools.islice(rows, _ROW_GROUP)):
            writer.write_table(pa.Table.from_pylist(chunk, schema=schema))
