"""``trio-rollout tiny-server``: serve the small language model behind SGLang's HTTP protocol until interrupted.

Separate because each command of the command line has a module.
"""

from pathlib import Path
from typing import Any

import click

from ..tiny import TinySettings, run_tiny

_SECONDS = click.FloatRange(0.0, min_open=True)


@click.command("tiny-server", short_help="Serve a tiny model, without a GPU.")
@click.option("--port", type=click.IntRange(0, 65535), required=True, help="Port to listen on; 0: a free port.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--script",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with fixed answers by prompt (TOML or JSON).",
)
@click.option(
    "--weights", type=click.Path(exists=True, path_type=Path), help="Weights to start with. Default: random weights."
)
@click.option(
    "--max-running", type=click.IntRange(1), default=64, show_default=True, help="Most requests decoded at once."
)
@click.option(
    "--max-queued",
    type=click.IntRange(0),
    default=None,
    help="Most requests that wait; further requests get HTTP 503. Default: no limit.",
)
@click.option(
    "--step-delay",
    type=click.FloatRange(0.0),
    default=0.0,
    show_default=True,
    help="Seconds to wait after each decoding step.",
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the random weights and of sampling."
)
@click.option("--vocab", type=click.IntRange(2), default=None, help="Size of the vocabulary. Default: the tokenizer's.")
@click.option(
    "--context-tokens",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Number of previous tokens that the model sees.",
)
@click.option(
    "--rows", type=click.IntRange(1), default=4096, show_default=True, help="Rows of the model's weight table."
)
@click.option(
    "--scale",
    type=click.FloatRange(0.0),
    default=2.0,
    show_default=True,
    help="Standard deviation of the random logits.",
)
@click.option("--eos-id", type=int, default=None, help="Id of the end token; negative: none. Default: the tokenizer's.")
@click.option(
    "--context-length",
    type=click.IntRange(2),
    default=131_072,
    show_default=True,
    help="Most tokens of prompt and answer together.",
)
@click.option(
    "--cache-tokens",
    type=click.IntRange(0),
    default=1_000_000,
    show_default=True,
    help="Size of the prefix cache in tokens.",
)
@click.option("--incremental", is_flag=True, help="Stream only new tokens, as SGLang's --incremental-streaming-output.")
@click.option("--reasoning-parser", default=None, help="Reasoning parser that /model_info names.")
@click.option(
    "--health-timeout", type=_SECONDS, default=20.0, show_default=True, help="Seconds after which /health fails."
)
@click.option(
    "--disconnect-poll",
    type=_SECONDS,
    default=4.0,
    show_default=True,
    help="Seconds between two checks for clients that have gone.",
)
@click.option(
    "--abort-poll",
    type=_SECONDS,
    default=1.0,
    show_default=True,
    help="Seconds between two checks whether a pause is complete.",
)
@click.option(
    "--until-stdin-closes", is_flag=True, help="Exit when stdin is closed, so when the parent process has ended."
)
def tiny_server(port: int, host: str, *, until_stdin_closes: bool, **options: Any) -> None:
    """Serve a small real language model with SGLang's HTTP protocol.

    Prints the server's URL on a line once the server answers.
    """
    try:
        run_tiny(TinySettings(**options), host, port, click.echo, until_stdin_closes=until_stdin_closes)
    except OSError as error:
        raise click.ClickException(f"can't listen on {host}:{port}: {error.strerror or error}") from error
