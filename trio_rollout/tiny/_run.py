"""Serve until interrupted: what the command line calls."""

from collections.abc import Callable

from ._settings import TinySettings


def run_tiny(settings: TinySettings, host: str, port: int, announce: Callable[[str], None]) -> None:
    """Serve on ``host:port`` (0: a free port); ``announce`` is called with the URL once it answers."""
    raise NotImplementedError
