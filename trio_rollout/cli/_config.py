"""A TOML file as the defaults of a command's options: its keys are the options' names with underscores.

What is typed on the command line wins. Nothing is guessed: an unknown key or a value of another type is an error that
names the file and the key.
"""

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click


def _fail(path: Path, message: str) -> click.UsageError:
    return click.UsageError(f"configuration {path}: {message}")


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise _fail(path, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _fail(path, f"is not UTF-8: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise _fail(path, f"is not TOML: {error}") from error


def _fits(option: click.Option, value: object) -> tuple[bool, str]:
    """Whether the value's TOML type is the option's, and the name of the one that is wanted.

    click itself would take ``samples = 8.5`` for 8 and ``samples = true`` for 1.
    """
    if option.is_flag:
        return isinstance(value, bool), "true or false"
    if isinstance(option.type, click.types.IntParamType):
        return isinstance(value, int) and not isinstance(value, bool), "an integer"
    if isinstance(option.type, click.types.FloatParamType):
        return isinstance(value, int | float) and not isinstance(value, bool), "a number"
    return isinstance(value, str), "a string"


def _value(path: Path, option: click.Option, key: str, value: object) -> object:
    parts = value if option.multiple and isinstance(value, list) else [value]
    for part in parts:
        fits, wanted = _fits(option, part)
        if not fits:
            several = " or a list of such" if option.multiple else ""
            raise _fail(path, f"{key}: got {part!r}, expected {wanted}{several}")
    return parts if option.multiple else value


def _unknown(path: Path, key: str, options: Mapping[str, click.Option]) -> click.UsageError:
    close = difflib.get_close_matches(key.replace("-", "_"), options, n=1)
    hint = f" Did you mean {close[0]}?" if close else f" Known: {', '.join(sorted(options))}."
    return _fail(path, f"unknown key {key!r}.{hint}")


def read_config(path: Path, command: click.Command) -> dict[str, object]:
    """The file's values, checked against the command's options.

    Raises:
      click.UsageError: the file can't be read, is no TOML, has an unknown key or a value of the wrong type.

    """
    options = {
        str(parameter.name): parameter
        for parameter in command.params
        if isinstance(parameter, click.Option) and parameter.expose_value
    }
    values: dict[str, object] = {}
    for key, value in _read(path).items():
        if key not in options:
            raise _unknown(path, key, options)
        values[key] = _value(path, options[key], key, value)
    return values


def _apply(context: click.Context, _parameter: click.Parameter, path: Path | None) -> None:
    if path is not None:
        context.default_map = {**(context.default_map or {}), **read_config(path, context.command)}


config_option = click.option(
    "--config",
    type=click.Path(path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=_apply,
    metavar="FILE.toml",
    help="Take options from this TOML file: keys are named like the options, with underscores (max_new_tokens = 512). "
    "Options given on the command line win.",
)
