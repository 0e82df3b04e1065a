"""The prompts of a run: the source that the options name, checked as a whole before anything is started."""

import click
import trio

from ..errors import SourceError
from ..sources import JsonlSource, TaskSource
from ._run_options import RunOptions

CliSource = JsonlSource | TaskSource


def source_of(options: RunOptions) -> CliSource:
    """The source that the options name.

    Raises:
      click.UsageError: none is named, or two; or NAME:COUNT has another form.
      SourceError: the file is missing or empty, or there is no such data set.

    """
    if options.tasks is not None and options.prompts is None:
        return _tasks(options.tasks, options.task_seed)
    if options.prompts is None or options.tasks is not None:
        raise click.UsageError("one of --prompts FILE.jsonl and --tasks NAME:COUNT is needed")
    return JsonlSource(
        options.prompts,
        prompt_key=options.prompt_key,
        label_key=options.label_key,
        metadata_key=options.metadata_key,
        id_key=options.id_key,
        epochs=options.epochs,
        shuffle_seed=options.shuffle_seed,
    )


def _tasks(spec: str, seed: int) -> TaskSource:
    name, _, count = spec.rpartition(":")
    if not name or not count.isdecimal() or not int(count):
        raise click.UsageError(f"--tasks {spec!r}: expected NAME:COUNT, for example gcd:100")
    return TaskSource(name, count=int(count), seed=seed)


async def checked_total(source: CliSource, *, tokenizer: str | None) -> int | None:
    """Check the whole source and count its prompts; its position stays.

    Blocks while the file is read. Messages without a tokenizer are refused here, not prompt by prompt: a prompt that no
    server takes is given up for good, and this one needs only an option.

    Raises:
      SourceError: a line is no prompt, or two have one id, or the prompts are messages and there is no tokenizer.

    """
    await trio.lowlevel.checkpoint()
    if isinstance(source, TaskSource):
        return source.count
    await source.check()
    if tokenizer is None:
        begin = source.state()
        for prompt in await source.take(1):
            if prompt.messages is not None:
                raise SourceError(f"{source.path}: the prompts are messages; --tokenizer PATH is needed to encode them")
        source.restore(begin)
    return source.total
