"""Text to token ids and back, and messages to ids by a model's chat template."""

from ._tokenizer import Tokenizer, load_tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]
