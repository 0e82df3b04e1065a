"""``trio-rollout export``: the finished groups of a folder of results, for other programs."""

import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO

import click

from .._core.lifecycle import State
from .._core.values import Group
from ..ledger import read_ledger
from ._group_json import group_object, json_text
from ._parquet import write_parquet

_STATES = (State.READY, State.DELIVERED, State.ACKED)


def write_jsonl(groups: Iterable[Group], file: BinaryIO) -> None:
    """Write the groups, one JSON object a line."""
    file.writelines(json_text(group_object(group)).encode() + b"\n" for group in groups)


@contextmanager
def _complete_file(output: Path) -> Generator[BinaryIO]:
    """A file that appears when it is complete, so that nobody takes a half for the whole."""
    partial = output.with_name(f".{output.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(output)
    except OSError as error:
        raise click.ClickException(f"cannot write {output}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


@click.command("export")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "parquet"]),
    default="jsonl",
    show_default=True,
    help="jsonl: one JSON object a group. parquet: one row a group, the same fields.",
)
@click.option(
    "--state",
    multiple=True,
    type=click.Choice([state.value for state in _STATES]),
    help="Only groups in this state; may be repeated. Default: all three.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write to this file in place of stdout; it appears once it is complete.",
)
def export(directory: Path, form: str, state: tuple[str, ...], output: Path | None) -> None:
    """Write the finished groups of a folder of results, also while a run adds to it.

    Each group has its id, attempt, prompt and trajectories; a trajectory its status, stop, reward and segments; a segment its
    tokens (prompt and response), response_length, and over the response loss_mask, log_probs, versions (start, stop, weight
    version) and text.

    pandas and polars read both formats. Parquet has one type for each field: labels, metadata and messages are JSON texts,
    and rewards with names stand apart as "rewards". In jsonl they are as they came; where their types change from one group
    to another, polars wants parquet.
    """
    if form == "parquet" and output is None and sys.stdout.isatty():
        raise click.UsageError("parquet is not for a terminal: give --output FILE")
    write = write_parquet if form == "parquet" else write_jsonl
    target = nullcontext(sys.stdout.buffer) if output is None else _complete_file(output)
    with read_ledger(directory) as reader, target as file:
        write((group for _, group in reader.groups(*map(State, state))), file)
        file.flush()
