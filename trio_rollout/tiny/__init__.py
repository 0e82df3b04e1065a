"""A small real language model behind SGLang's HTTP protocol, served on Trio: the server to start with, and to test with."""

from ._run import run_tiny as run_tiny
from ._settings import TinySettings as TinySettings
