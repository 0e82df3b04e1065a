"""A small real language model behind SGLang's HTTP protocol, served on Trio: the server to start with, and to test with."""

from ._model import TinyModel
from ._process import TinyProcess, open_tiny_process
from ._run import run_tiny
from ._server import TinyServer, TinyStatistics, open_tiny, open_tiny_server
from ._settings import TinySettings
from ._tokenizer import DATA, TinyTokenizer

__all__ = [
    "DATA",
    "TinyModel",
    "TinyProcess",
    "TinyServer",
    "TinySettings",
    "TinyStatistics",
    "TinyTokenizer",
    "open_tiny",
    "open_tiny_process",
    "open_tiny_server",
    "run_tiny",
]
