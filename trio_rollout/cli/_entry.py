"""The command ``trio-rollout``: its subcommands, and its errors as one clear line and an exit status."""

from typing import Any

import click

from .._core.failures import leaves_of
from ..errors import RolloutError, SettingsError
from ._export import export
from ._inspect import inspect
from ._outcome import ExitStatus
from ._run import run
from ._tiny_server import tiny_server


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


@click.group(
    cls=Commands,
    commands=[run, export, inspect, tiny_server],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_name="trio-rollout", prog_name="trio-rollout")
def main() -> None:
    """Run rollouts for reinforcement learning of language models, and inspect and export their results."""
