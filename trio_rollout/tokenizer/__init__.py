"""Text to token ids and back, and messages to ids by a model's chat template.

``load_tokenizer`` reads a model's folder and returns a ``Tokenizer``. Its results agree with those of transformers and SGLang
on the same folder, without depending on transformers. ``open_sglang_servers`` and ``open_gateway`` take a folder's path or a
loaded ``Tokenizer``.

    tokenizer = load_tokenizer("path/to/model")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    text = tokenizer.decode(ids)
"""

from ._tokenizer import Tokenizer, load_tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]
