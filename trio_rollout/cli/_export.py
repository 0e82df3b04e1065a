"""``trio-rollout export``: the finished groups of a folder of results, as JSON lines or as a Parquet file.

Both formats have the same fields (``group_object``), which is everything that the ledger has of a group. Parquet needs the extra
``export`` (pyarrow); values without one type for all groups (labels, metadata, messages, tools, sampling, extras, rewards by
name) are JSON texts there.
"""

import itertools
import json
import math
import os
import stat
import sys
import tempfile
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

import attrs
import click
import msgspec
import numpy as np

from .._core.lifecycle import State
from .._core.values import Failure, Group, Prompt, Segment, Trajectory
from ..ledger import LedgerReader, read_ledger
from ._display import printing
from ._options import option

Row: TypeAlias = dict[str, Any]

_ROW_GROUP = 64
"""Groups in a row group of Parquet: tens of megabytes with eight rollouts of some thousand tokens each."""
_STATES = (State.READY, State.DELIVERED, State.ACKED)
_LINE_ENDS: Final = ("\u0085", "\u2028", "\u2029")
"""Characters that JSON allows in a string, and that end a line for many readers of lines."""
_USERS: Final = ("messages", "tools", "label", "metadata", "sampling", "extra")
"""The fields of a prompt without one type for all groups."""
_OF_THE_LEDGER: Final = ("ledger.db*", "lock", "*.seg", "*.dead")


@attrs.frozen
class Exported:
    """One group, its state, and the step of its batch; None if it was not delivered."""

    group: Group
    state: State = State.READY
    step: int | None = None


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
    "Write to this file instead of stdout. The file appears once it is complete; a device or a pipe is written into.",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
)
def export(directory: Path, form: str, state: tuple[str, ...], output: Path | None) -> None:
    """Export the finished groups of a folder of results, also while a run writes to it.

    A group has an id, an attempt, a state, the step of its batch, a prompt, trajectories and missing samples. A trajectory
    has a status, a stop reason, a reward, metadata, an error and segments. A segment has tokens (prompt and response),
    response_length, extras, and for the response loss_mask, log_probs, versions (start, stop, weight version) and text.

    pandas and polars read both formats. In Parquet each field has one type: labels, metadata, messages, tools, sampling
    and extras are JSON texts, and rewards by name are in the field "rewards". In jsonl they are as they were given; if
    their types differ between groups, polars needs Parquet. One line of jsonl is one group for every reader of lines.
    """
    if output is None and sys.stdout is None:
        raise click.UsageError("stdout is closed: give --output FILE")
    if form == "parquet" and output is None and sys.stdout.isatty():
        raise click.UsageError("parquet can't be written to a terminal: give --output FILE")
    write = write_parquet if form == "parquet" else write_jsonl
    target = _stdout() if output is None else _open_output(output, directory)
    with read_ledger(directory) as reader, target as file:
        write(_exported(reader, *map(State, state or _STATES)), file)
        file.flush()


@contextmanager
def _stdout() -> Generator[BinaryIO]:
    with printing():
        yield sys.stdout.buffer


def _exported(reader: LedgerReader, *states: State) -> Iterator[Exported]:
    for summary in reader.summaries(*states):
        if isinstance(group := reader.group_by_id(summary.id), Group):
            yield Exported(group, summary.state, summary.step)


@contextmanager
def _open_output(output: Path, directory: Path) -> Generator[BinaryIO]:
    """Open the output: a new or a regular file appears once it is complete; everything else is written into."""
    try:
        found = _replaceable(output)
        if found is None:
            with os.fdopen(os.open(output, os.O_WRONLY | os.O_APPEND), "wb") as file:
                yield file
        elif found.parent == directory.resolve() and any(map(found.match, _OF_THE_LEDGER)):
            raise click.UsageError(f"--output {output} is a file of the ledger {directory}")
        else:
            with _complete_file(found) as file:
                yield file
    except OSError as error:
        raise click.ClickException(f"can't write {output}: {error.strerror or error}") from error


def _replaceable(output: Path) -> Path | None:
    """Return the name that a complete file may take: symbolic links are followed and stay. None: it must be written into.

    A descriptor under /proc, which /dev/stdout leads to, is not a name: a file that is appended to would lose its beginning.
    """
    while output.is_symlink():
        if output.parent.resolve().is_relative_to("/proc"):
            return None
        output = output.parent / output.readlink()
    if output.exists() and not output.is_file():
        return None
    return output.parent.resolve() / output.name


@contextmanager
def _complete_file(output: Path) -> Generator[BinaryIO]:
    """Open a file that appears under its name only once it is complete, with the mode of the file that it replaces."""
    fd, partial = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.", suffix=".partial")
    try:
        with os.fdopen(fd, "wb") as file:
            os.umask(mask := os.umask(0o077))
            os.fchmod(fd, stat.S_IMODE(output.stat().st_mode) if output.exists() else 0o666 & ~mask)
            yield file
        Path(partial).replace(output)
    finally:
        Path(partial).unlink(missing_ok=True)


def write_jsonl(found: Iterable[Exported], file: BinaryIO) -> None:
    """Write the groups as JSON lines."""
    file.writelines(json_text(group_object(one)).encode() + b"\n" for one in found)


def _prompt(prompt: Prompt) -> dict[str, object]:
    """Return the prompt, with its input under the name of its kind."""
    shown: dict[str, object] = {"id": prompt.id, "epoch": prompt.epoch}
    if prompt.input_ids is not None:
        shown["input_ids"] = prompt.input_ids.tolist()
    elif prompt.text is not None:
        shown["text"] = prompt.text
    else:
        shown |= {"messages": prompt.messages, "tools": prompt.tools}
    sampling = None if prompt.sampling is None else attrs.asdict(prompt.sampling)
    return shown | {"label": prompt.label, "metadata": prompt.metadata, "sampling": sampling, "extra": prompt.extra}


def _segment(segment: Segment) -> dict[str, object]:
    return {
        "tokens": segment.tokens.tolist(),
        "response_length": segment.response_length,
        "loss_mask": segment.loss_mask.tolist(),
        "log_probs": segment.log_probs.tolist(),
        "versions": [list(span) for span in segment.versions],
        "text": segment.text,
        "extras": dict(segment.extras),
    }


def _failure(failure: Failure | None) -> dict[str, object] | None:
    if failure is None:
        return None
    texts = {"type": failure.type, "message": failure.message, "traceback": failure.traceback}
    return {"cause": failure.cause.value, **texts, "attempt": failure.attempt}


def _trajectory(trajectory: Trajectory) -> dict[str, object]:
    return {
        "index": trajectory.index,
        "status": trajectory.status.value,
        "stop": trajectory.stop.value,
        "reward": trajectory.reward,
        "turns": trajectory.turns,
        "metadata": trajectory.metadata,
        "error": _failure(trajectory.error),
        "segments": [_segment(segment) for segment in trajectory.segments],
    }


def group_object(found: Exported) -> dict[str, Any]:
    """Return the group as JSON data, except for values that users attached. ``versions`` are [start, stop, version]."""
    group = found.group
    return {
        "id": str(group.id),
        "attempt": group.attempt,
        "state": found.state.value,
        "step": found.step,
        "prompt": _prompt(group.prompt),
        "trajectories": [_trajectory(trajectory) for trajectory in group.trajectories],
        "missing": [{"index": sample.index, "error": _failure(sample.failure)} for sample in group.missing],
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
        text = msgspec.json.encode(value, enc_hook=_users_value).decode()
    except (UnicodeEncodeError, TypeError):  # a lone surrogate, or an odd key
        return json.dumps(_plain(value))
    for char in _LINE_ENDS:
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


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
        extras=text,
    )
    error = struct(cause=text, type=text, message=text, traceback=text, attempt=int32)
    trajectory = struct(
        index=int32,
        status=text,
        stop=text,
        reward=pa.float64(),
        rewards=text,
        turns=int32,
        metadata=text,
        error=error,
        segments=pa.list_(segment),
    )
    users = dict.fromkeys(_USERS, text)
    return pa.schema(
        struct(
            id=text,
            attempt=int64,
            state=text,
            step=int64,
            prompt=struct(id=text, epoch=int64, input_ids=ids, text=text, **users),
            trajectories=pa.list_(trajectory),
            missing=pa.list_(struct(index=int32, error=error)),
        )
    )


def _prompt_row(prompt: Row) -> Row:
    as_json = {name: json_text(prompt[name]) for name in _USERS if prompt.get(name) is not None}
    text = None if "text" not in prompt else clean(prompt["text"])
    return {**prompt, "id": clean(prompt["id"]), "text": text, **as_json}


def _segment_row(segment: Row) -> Row:
    versions = [dict(zip(("start", "stop", "version"), span, strict=True)) for span in segment["versions"]]
    return {**segment, "text": clean(segment["text"]), "versions": versions, "extras": json_text(segment["extras"])}


def _error_row(error: Row | None) -> Row | None:
    return error and {name: clean(value) if isinstance(value, str) else value for name, value in error.items()}


def _trajectory_row(trajectory: Row) -> Row:
    reward = trajectory["reward"]
    by_name = isinstance(reward, Mapping)
    return {
        **trajectory,
        "reward": None if by_name else reward,
        "rewards": json_text(reward) if by_name else None,
        "metadata": json_text(trajectory["metadata"]),
        "error": _error_row(trajectory["error"]),
        "segments": [_segment_row(segment) for segment in trajectory["segments"]],
    }


def row_of(found: Exported) -> Row:
    """Return the group as a row of Parquet."""
    row = group_object(found)
    return {
        **row,
        "id": clean(row["id"]),
        "prompt": _prompt_row(row["prompt"]),
        "trajectories": [_trajectory_row(trajectory) for trajectory in row["trajectories"]],
        "missing": [{**sample, "error": _error_row(sample["error"])} for sample in row["missing"]],
    }


def write_parquet(found: Iterable[Exported], file: BinaryIO) -> None:
    """Write the groups as Parquet.

    Raises:
      click.ClickException: pyarrow is not installed.
    """
    pa = _pyarrow()
    schema, rows = _schema(pa), map(row_of, found)
    with pa.parquet.ParquetWriter(file, schema) as writer:
        while chunk := list(itertools.islice(rows, _ROW_GROUP)):
            writer.write_table(pa.Table.from_pylist(chunk, schema=schema))
