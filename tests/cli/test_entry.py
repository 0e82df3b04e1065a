"""Errors of the package on the command line."""

import click
import pytest
from click.testing import CliRunner

from trio_rollout.cli._entry import Commands
from trio_rollout.errors import LedgerError, ServerError, SettingsError


def raising(error):
    """Return a command group whose only command raises this error."""

    @click.group(cls=Commands)
    def group():
        pass

    @group.command()
    def fail():
        raise error

    return group


@pytest.mark.parametrize(
    ("error", "status", "last_line"),
    [
        (LedgerError("belongs to another run"), 1, "Error: belongs to another run"),
        (SettingsError("Retry.jitter: got 2"), 2, "Error: Retry.jitter: got 2"),
        (KeyboardInterrupt(), 130, "Error: interrupted"),
        (BaseExceptionGroup("", [KeyboardInterrupt(), ServerError("x")]), 130, "Error: interrupted"),
        (ExceptionGroup("", [ServerError("x")]), 1, "Error: x"),
        (ExceptionGroup("", [SettingsError("x"), ServerError("y")]), 1, "y"),
        (ExceptionGroup("", [ServerError("x"), ExceptionGroup("", [ServerError("x")])]), 1, "Error: x"),
        (ServerError(), 1, "Error: ServerError"),
    ],
)
def test_an_error_of_the_package_is_its_message_and_a_status(error, status, last_line):
    result = CliRunner().invoke(raising(error), ["fail"])

    assert result.exit_code == status
    assert result.output.splitlines()[-1] == last_line
    assert "Traceback" not in result.output


@pytest.mark.parametrize("error", [ZeroDivisionError("defect"), ExceptionGroup("", [ServerError("x"), ValueError()])])
def test_a_defect_keeps_its_traceback(error):
    result = CliRunner().invoke(raising(error), ["fail"])

    assert result.exit_code == 1
    assert result.exception is error


def test_notes_belong_to_the_message():
    error = ServerError("pause failed")
    error.add_note("http://a: refused")

    assert CliRunner().invoke(raising(error), ["fail"]).output == "Error: pause failed\nhttp://a: refused\n"
