"""Thoughts in a text: ``/separate_reasoning`` as SGLang's parsers qwen3 and deepseek-r1."""

import msgspec

_BEGIN, _END = "<think>", "</think>"
# Whether an answer begins inside its thoughts: the chat templates of such models write the opening mark themselves.
REASONING_PARSERS = {"qwen3": False, "qwen3-thinking": True, "deepseek-r1": True}
"""The names under which this format goes."""


class SeparateBody(msgspec.Struct, kw_only=True):
    """Body of ``/separate_reasoning``."""

    text: str
    reasoning_parser: str


def separate_reasoning(text: str, *, begins_inside: bool) -> dict[str, str]:
    """The thoughts, and the text behind them; thoughts without an end were cut off."""
    if not (begins_inside or _BEGIN in text):
        return {"reasoning_text": "", "text": text}
    thoughts, _, rest = text.removeprefix(_BEGIN).partition(_END)
    return {"reasoning_text": thoughts, "text": rest}
