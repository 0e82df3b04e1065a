"""``trio-rollout tiny-server``: serve the small language model behind SGLang's HTTP protocol until interrupted.

Separate because each command of the command line has a module.
"""

from pathlib import Path
from typing import Any

import click

from ..tiny import TinySettings, run_tiny

_SECONDS = click.FloatRange(0.0, min_open=True)


@click.command("tiny-server")
@click.option("--port", type=click.IntRange(0, 65535), required=True, help="Port; 0 takes a free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--script", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Answers by prompt (TOML or JSON)."
)
@click.option(
    "--weights", type=click.Path(exists=True, path_type=Path), help="Weights to start with, in place of random ones."
)
@click.option("--max-running", type=click.IntRange(1), default=64, show_default=True, help="Requests decoded at once.")
@click.option("--max-queued", type=click.IntRange(0), default=None, help="Requests that may wait; more get a 503.")
@click.option(
    "--step-delay", type=click.FloatRange(0.0), default=0.0, show_default=True, help="Seconds after every step."
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the random weights and of sampling."
)
@click.option("--vocab", type=click.IntRange(2), default=None, help="Size of the vocabulary; default: the tokenizer's.")
@click.option(
    "--context-tokens", type=click.IntRange(1), default=3, show_default=True, help="Tokens the model looks at."
)
@click.option("--rows", type=click.IntRange(1), default=4096, show_default=True, help="Rows of the model's table.")
@click.option(
    "--scale", type=click.FloatRange(0.0), default=2.0, show_default=True, help="Spread of the random logits."
)
@click.option("--eos-id", type=int, default=None, help="End token; default: the tokenizer's, a negative one: none.")
@click.option("--context-length", type=click.IntRange(2), default=131_072, show_default=True, help="Prompt and answer.")
@click.option(
    "--cache-tokens", type=click.IntRange(0), default=1_000_000, show_default=True, help="Of the prefix cache."
)
@click.option("--incremental", is_flag=True, help="Streams carry deltas, as with --incremental-streaming-output.")
@click.option("--reasoning-parser", default=None, help="What /model_info says: how the model writes thoughts.")
@click.option("--health-timeout", type=_SECONDS, default=20.0, show_default=True, help="Patience of /health.")
@click.option(
    "--disconnect-poll", type=_SECONDS, default=4.0, show_default=True, help="How often it looks for clients."
)
@click.option("--abort-poll", type=_SECONDS, default=1.0, show_default=True, help="How often a pausing server looks.")
@click.option("--until-stdin-closes", is_flag=True, help="Leave when whoever started it has gone.")
def tiny_server(port: int, host: str, *, until_stdin_closes: bool, **options: Any) -> None:
    """Serve a small real language model behind SGLang's HTTP protocol; prints its URL once it answers."""
    try:
        run_tiny(TinySettings(**options), host, port, click.echo, until_stdin_closes=until_stdin_closes)
    except OSError as error:
        raise click.ClickException(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
