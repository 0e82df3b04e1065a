"""``trio-rollout tiny-server``: serve the small language model behind SGLang's HTTP protocol until interrupted."""

from pathlib import Path

import click

from ..tiny import TinySettings, run_tiny


@click.command("tiny-server")
@click.option("--port", type=click.IntRange(0, 65535), required=True, help="Port; 0 takes a free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--script", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Answers by prompt (TOML or JSON).")
@click.option("--weights", type=click.Path(exists=True, path_type=Path), help="Weights to start with, in place of random ones.")
@click.option("--max-running", type=click.IntRange(1), default=64, show_default=True, help="Requests decoded at once.")
@click.option("--max-queued", type=click.IntRange(0), default=None, help="Requests that may wait; more get a 503.")
@click.option("--step-delay", type=click.FloatRange(0.0), default=0.0, show_default=True, help="Seconds after every step.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the random weights and of sampling.")
@click.option("--vocab", type=click.IntRange(2), default=None, help="Size of the vocabulary; default: the tokenizer's.")
@click.option("--context-tokens", type=click.IntRange(1), default=3, show_default=True, help="Tokens that the model looks at.")
@click.option("--rows", type=click.IntRange(1), default=4096, show_default=True, help="Rows of the model's table, at most.")
@click.option("--incremental", is_flag=True, help="Streams carry deltas, as with --incremental-streaming-output.")
@click.option("--health-timeout", type=click.FloatRange(0.0, min_open=True), default=20.0, show_default=True, help="Patience of /health.")
def tiny_server(port: int, host: str, **options: object) -> None:
    """Serve a small real language model behind SGLang's HTTP protocol; prints its URL once it answers."""
    run_tiny(TinySettings(**options), host, port, click.echo)  # type: ignore[arg-type]  # click has checked each option
