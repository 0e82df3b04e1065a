"""The command ``trio-rollout``: its subcommands, and its errors as one clear line and an exit status.

A subcommand is imported when it is used, so that ``--help`` does not wait for the engine: nothing is imported here that the
list of the subcommands does not need.
"""

import importlib
import os
from typing import Any

import click

from ..errors import RolloutError, SettingsError
from ._status import ExitStatus

_SUBCOMMANDS = {  # name: the module and its command, and the line in the list
    "export": ("._export:export", "Export finished groups: JSON lines, Parquet."),
    "inspect": ("._inspect:inspect", "Show the groups in a folder of results."),
    "rescore": ("._rescore:rescore_command", "Score stored groups again, without sampling."),
    "run": ("._options:run", "Sample and score prompts into a folder."),
    "tiny-server": ("._tiny_server:tiny_server", "Serve a tiny model, without a GPU."),
}


def _line(error: BaseException) -> str:
    """Return an error's message, or its type if there is no message, with its notes."""
    return "\n".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())])


class Interrupted(click.ClickException):
    """A Ctrl-C outside of a run's drain. click would report it as a failure."""

    exit_code = ExitStatus.INTERRUPTED


def click_error(error: BaseException) -> click.ClickException | None:
    """Return the report of an error; None for a defect, whose traceback is wanted.

    A setting out of its range came from an option, so it is a usage error. Every other error of the package is a failure of
    the run.
    """
    from .._core.failures import leaves_of  # ruff: ignore[import-outside-top-level]  only errors need it

    leaves = leaves_of(error)
    if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
        return Interrupted("interrupted")
    if not all(isinstance(leaf, RolloutError) for leaf in leaves):
        return None
    message = "\n".join(dict.fromkeys(map(_line, leaves)))
    if all(isinstance(leaf, SettingsError) for leaf in leaves):
        return click.UsageError(message)
    return click.ClickException(message)


class Commands(click.Group):
    """A group of commands that reports errors of the package as messages."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand.

        Raises:
          click.ClickException: the subcommand raised an error of the package; has the exit status.
        """
        try:
            return super().invoke(ctx)
        except (RolloutError, KeyboardInterrupt, BaseExceptionGroup) as error:
            reported = click_error(error)
            if reported is None:
                raise
            raise reported from error


class Subcommands(Commands):
    """The subcommands, each imported when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # ruff: ignore[unused-method-argument]  click's signature
        """Return the names of the subcommands."""
        return sorted(_SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # ruff: ignore[unused-method-argument]  click's signature
        """Import a subcommand; None if there is none of this name."""
        if cmd_name not in _SUBCOMMANDS:
            return None
        module, _, name = _SUBCOMMANDS[cmd_name][0].partition(":")
        found: click.Command = getattr(importlib.import_module(module, __package__), name)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # ruff: ignore[unused-method-argument]  click's signature
        """Write the list of the subcommands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in sorted(_SUBCOMMANDS.items())])


@click.group(cls=Subcommands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="trio-rollout", prog_name="trio-rollout")
def main() -> None:
    """Run rollouts for reinforcement learning of language models, and inspect and export their results."""
    for descriptor in range(3):  # one that is closed would be the ledger's, and be printed into
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
