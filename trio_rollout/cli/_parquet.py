"""Groups as a Parquet file: one row a group, with the fields of the JSON export. Needs the extra ``export`` (pyarrow).

What has no type of its own (labels, metadata, messages, rewards by name) is a JSON text.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, TypeAlias

import click

from .._core.values import Group
from ._group_json import clean, group_object, json_text

Row: TypeAlias = dict[str, Any]

_ROW_GROUP = 64
"""Groups a row group: with eight rollouts of some thousand tokens each, tens of megabytes."""


def _pyarrow() -> Any:
    try:
        import pyarrow as pa  # noqa: PLC0415  an optional dependency that takes half a second to import
        import pyarrow.parquet  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise click.ClickException("--format parquet needs pyarrow: pip install 'trio-rollout[export]'") from error
    return pa


def _schema(pa: Any) -> Any:
    span = pa.struct([("start", pa.int32()), ("stop", pa.int32()), ("version", pa.int64())])
    segment = pa.struct([
        ("tokens", pa.list_(pa.int32())),
        ("response_length", pa.int32()),
        ("loss_mask", pa.list_(pa.uint8())),
        ("log_probs", pa.list_(pa.float32())),
        ("versions", pa.list_(span)),
        ("text", pa.string()),
    ])
    trajectory = pa.struct([
        ("index", pa.int32()),
        ("status", pa.string()),
        ("stop", pa.string()),
        ("reward", pa.float64()),
        ("rewards", pa.string()),
        ("turns", pa.int32()),
        ("segments", pa.list_(segment)),
    ])
    prompt = pa.struct([
        ("id", pa.string()),
        ("epoch", pa.int64()),
        ("input_ids", pa.list_(pa.int32())),
        ("text", pa.string()),
        ("messages", pa.string()),
        ("label", pa.string()),
        ("metadata", pa.string()),
    ])
    return pa.schema([
        ("id", pa.string()),
        ("attempt", pa.int64()),
        ("prompt", prompt),
        ("trajectories", pa.list_(trajectory)),
    ])


def _prompt_row(prompt: Row) -> Row:
    as_json = {
        name: json_text(prompt[name]) for name in ("messages", "label", "metadata") if prompt.get(name) is not None
    }
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
    """The group as a row."""
    found = group_object(group)
    trajectories = [_trajectory_row(trajectory) for trajectory in found["trajectories"]]
    return {**found, "id": clean(found["id"]), "prompt": _prompt_row(found["prompt"]), "trajectories": trajectories}


def _chunks(groups: Iterable[Group]) -> Iterator[list[Group]]:
    remaining = iter(groups)
    while chunk := list(itertools.islice(remaining, _ROW_GROUP)):
        yield chunk


def write_parquet(groups: Iterable[Group], file: BinaryIO) -> None:
    """Write the groups.

    Raises:
      click.ClickException: pyarrow is not installed.

    """
    pa = _pyarrow()
    schema = _schema(pa)
    with pa.parquet.ParquetWriter(file, schema) as writer:
        for chunk in _chunks(groups):
            writer.write_table(pa.Table.from_pylist([row_of(group) for group in chunk], schema=schema))
