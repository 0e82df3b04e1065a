"""Options from a TOML file: their precedence, and the values that are refused."""

import json

import click
import pytest
from click.testing import CliRunner

from trio_rollout.cli._options import config_option


@click.command()
@config_option
@click.option("--max-new-tokens", type=click.IntRange(min=0), default=128)
@click.option("--temperature", type=float, default=1.0)
@click.option("--server", multiple=True)
@click.option("--reward")
@click.option("--quiet", is_flag=True)
def show(**options):
    """Print the options."""
    click.echo(json.dumps(options))


@pytest.fixture
def invoke(tmp_path):
    """Return a function that runs the command with a configuration and arguments."""
    path = tmp_path / "run.toml"

    def run(toml, *arguments):
        path.write_text(toml)
        return CliRunner().invoke(show, ["--config", str(path), *arguments])

    return run


def test_the_command_line_takes_precedence_over_the_file(invoke):
    toml = 'max_new_tokens = 512\ntemperature = 1\nserver = ["http://a", "http://b"]\nquiet = true\n'

    result = invoke(toml, "--max-new-tokens", "64")

    assert json.loads(result.output) == {
        "max_new_tokens": 64,
        "temperature": 1.0,
        "server": ["http://a", "http://b"],
        "quiet": True,
        "reward": None,
    }


def test_a_repeatable_option_may_be_one_value(invoke):
    assert json.loads(invoke('server = "http://a"').output)["server"] == ["http://a"]


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("max_new_token = 5", "unknown key 'max_new_token'. Did you mean max_new_tokens?"),
        ("max-new-tokens = 5", "unknown key 'max-new-tokens'. Did you mean max_new_tokens?"),
        ("zzz = 5", "Known: max_new_tokens, quiet, reward, server, temperature."),
        ("max_new_tokens = 8.5", "max_new_tokens: got 8.5, expected an integer"),
        ("max_new_tokens = true", "max_new_tokens: got True, expected an integer"),
        ('temperature = "hot"', "temperature: got 'hot', expected a number"),
        ("quiet = 1", "quiet: got 1, expected true or false"),
        ("server = [1]", "server: got 1, expected a string or a list of strings"),
        ("reward = [1]", "reward: got [1], expected a string"),
        ("max_new_tokens = -1", "-1 is not in the range x>=0"),
        ("this is not toml", "is not TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named(invoke, toml, message):
    result = invoke(toml)

    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_missing_file_is_a_usage_error(tmp_path):
    result = CliRunner().invoke(show, ["--config", str(tmp_path / "none.toml")])

    assert result.exit_code == 2
    assert "can't be read: No such file or directory" in result.output
