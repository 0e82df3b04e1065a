"""From an agent's messages to the ids that its turn is sampled from: recorded ids where they are a continuation.

An agent sends its whole conversation with every request. The longest beginning that ends with an answer given here is
found by its content (the chain of message digests); that answer's ids are then used as they were sampled, and only what
stands behind them is tokenised. If the model's chat template writes the history differently now that something follows
(a model that forgets its thoughts, say), the conversation forks: see ``_core/token_tree.py``.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, final

import attrs
import msgspec

from .._core.token_tree import Drift, Node, Placement, TokenTree, continue_from
from .._core.values import Turn
from ..tokenizer._tokenizer import Tokenizer
from ._values import Message, Tool


@attrs.frozen
class _Given:
    """An answer that an agent was given, and where it is recorded."""

    message: Message
    node: Node


@final
@attrs.define(eq=False)
class Conversation:
    """The messages of one session, and their tokens."""

    tokenizer: Tokenizer
    tree: TokenTree = attrs.field(factory=TokenTree, init=False)
    _given: dict[bytes, _Given] = attrs.field(factory=dict, init=False)

    def place(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Placement:
        """The ids of the prompt for the next answer.

        Raises:
          RequestRejected: the chat template refuses these messages.

        """
        ours, last, found = self._recognised(messages, tools)
        whole = self.tokenizer.render_chat(ours, tools or None)
        if found is None:
            return Placement(prompt_ids=self._ids(whole), drift=Drift.NONE)
        before = self.tokenizer.render_chat(ours[:last], tools or None)
        upto = self.tokenizer.render_chat(ours[: last + 1], tools or None, add_generation_prompt=False)
        if not (whole.startswith(upto) and upto.startswith(before)):
            return Placement(prompt_ids=self._ids(whole), drift=Drift.FORKED)
        suffix = self._ids(self._behind_answer(upto[len(before) :], found.node.turn) + whole[len(upto) :])
        return continue_from(found.node, suffix, retokenized=self._ids(whole[len(before) :]))

    def record(self, messages: Sequence[Message], tools: Sequence[Tool], answer: Message, turn: Turn) -> Node:
        """Remember what was answered to these messages."""
        node = self.tree.add(turn)
        self._given[_chain([*messages, answer], tools)[-1]] = _Given(answer, node)
        return node

    def forget(self, node: Node) -> None:
        """Drop an answer that nobody got."""
        self.tree.remove(node)
        self._given = {key: given for key, given in self._given.items() if given.node is not node}

    def _recognised(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[list[Message], int, _Given | None]:
        """The messages with our own answers in their full form (agents drop the reasoning), and the last of those."""
        ours, last, found = list(messages), -1, None
        for place, key in enumerate(_chain(messages, tools)):
            given = self._given.get(key)
            if given is not None:
                ours[place], last, found = given.message, place, given
        return ours, last, found

    def _behind_answer(self, written: str, turn: Turn) -> str:
        """What the template writes behind an answer's last sampled token: its end mark, if it was not sampled, and the rest."""
        end = self._end_mark(turn)
        if not end or end not in written:
            return ""
        sampled = int(turn.output_ids[-1]) == self._ids(end)[-1]
        tail = written[written.rindex(end) :]
        return tail[len(end) :] if sampled else tail

    def _end_mark(self, turn: Turn) -> str:
        """The text of the token that ends a message: the sampled one, if it is special, else the tokenizer's own."""
        last = int(turn.output_ids[-1])
        if last in self.tokenizer.added_tokens:
            return self.tokenizer.added_tokens[last]
        eos = self.tokenizer.eos_token_id
        return "" if eos is None else self.tokenizer.decode([eos])

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


def _chain(messages: Sequence[Message], tools: Sequence[Tool]) -> list[bytes]:
    """A digest for every beginning of the conversation. Tools stand in the prompt, so they count."""
    digest = hashlib.blake2b(msgspec.json.encode(list(tools), order="sorted"), digest_size=16).digest()
    chain: list[bytes] = []
    for message in messages:
        digest = hashlib.blake2b(
            digest + msgspec.json.encode(_content_of(message), order="sorted"), digest_size=16
        ).digest()
        chain.append(digest)
    return chain


def _content_of(message: Message) -> list[Any]:
    """What must agree for two messages to be the same one.

    Not their reasoning, which most agents leave out, nor call ids and spacing, which some write anew.
    """
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or ()]
    return [message["role"], (message.get("content") or "").strip(), calls]


def arguments_of(text: str) -> Any:
    """A call's arguments as templates want them: an object, if the text is one."""
    try:
        # Not json's: it takes half characters and endless nesting, which nothing behind it can write again.
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
