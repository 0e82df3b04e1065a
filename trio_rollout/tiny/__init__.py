"""A small real language model behind SGLang's HTTP protocol, served on Trio: the server to start with, and to test with."""

from ._model import TinyModel as TinyModel
from ._process import TinyProcess as TinyProcess
from ._process import open_tiny_process as open_tiny_process
from ._run import run_tiny as run_tiny
from ._server import TinyServer as TinyServer
from ._server import TinyStatistics as TinyStatistics
from ._server import open_tiny as open_tiny
from ._server import open_tiny_server as open_tiny_server
from ._settings import TinySettings as TinySettings
from ._tokenizer import DATA as DATA
from ._tokenizer import TinyTokenizer as TinyTokenizer
