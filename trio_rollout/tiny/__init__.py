"""A small real language model behind SGLang's HTTP protocol, served on Trio: the server to start and to test with."""

from ._model.model import TinyModel
from ._model.tokenizer import DATA, TinyTokenizer
from ._process import TinyProcess, open_tiny_process
from ._server import TinyServer, TinyStatistics, open_tiny, open_tiny_server, run_tiny
from ._settings import TinySettings

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
