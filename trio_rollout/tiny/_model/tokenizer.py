"""The tokenizer of the tiny server: byte-level, shipped as data files that transformers can load too.

Ids 0..255 are the bytes; then come the special tokens and the markers of tool calls, then merges. The ``tokenizers`` library
encodes; decoding is a table of bytes, because it runs for every answer.
"""

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import final

import attrs
from tokenizers import Tokenizer

DATA = Path(__file__).with_name("data")
"""The folder with ``tokenizer.json``, ``tokenizer_config.json`` (chat template) and ``config.json``."""


def _bytes_of_chars() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary; printable characters stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


@final
@attrs.frozen(eq=False, repr=False)
class TinyTokenizer:
    """Text to ids and back."""

    _tokenizer: Tokenizer
    _pieces: tuple[bytes, ...]
    _special: frozenset[int]

    @classmethod
    def load(cls, folder: Path = DATA) -> "TinyTokenizer":
        """Read ``tokenizer.json`` in ``folder``."""
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        added = tokenizer.get_added_tokens_decoder()
        chars = _bytes_of_chars()
        pieces = [
            added[index].content.encode()
            if index in added
            else bytes(chars[char] for char in tokenizer.id_to_token(index) or "")
            for index in range(tokenizer.get_vocab_size())
        ]
        return cls(tokenizer, tuple(pieces), frozenset(index for index, token in added.items() if token.special))

    @property
    def vocab(self) -> int:
        """The number of tokens."""
        return len(self._pieces)

    @property
    def end_id(self) -> int:
        """The id of ``<|im_end|>``: the end of a message, and the model's end token."""
        return self._pieces.index(b"<|im_end|>")

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``; special tokens written out in it become their ids."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def piece(self, token: int) -> bytes:
        """Return the bytes of one token; none for an id that only the model knows."""
        return self._pieces[token] if 0 <= token < len(self._pieces) else b""

    def decode(self, ids: Sequence[int], *, skip_special: bool = True, final: bool = True) -> str:
        """Return the text of ``ids``; bytes that are not UTF-8 become U+FFFD. Unless ``final``, half a character is held back."""
        hidden = self._special if skip_special else frozenset()
        data = b"".join([self.piece(token) for token in ids if token not in hidden])
        return codecs.getincrementaldecoder("utf-8")("replace").decode(data, final)
