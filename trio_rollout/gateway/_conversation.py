"""The prompt ids of a turn, from an agent's messages: recorded ids where the conversation goes on.

An agent sends its whole conversation with every request. The longest beginning of it that ends with an answer of ours is
found by content, in a chain of message digests. The ids of that answer are used as they were sampled, and only the text
after them is tokenised: tokenising an answer's text again may give other ids than those that the model sampled. If the
chat template writes the history differently once more messages follow (some models forget their thoughts), the
conversation forks: see ``_core/token_tree.py``.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, final

import attrs
import msgspec

from .._core.token_tree import Drift, Node, Placement, TokenTree, continue_from
from .._core.values import Turn
from ..tokenizer import Tokenizer
from ._values import Message, Tool


@attrs.frozen
class _OwnAnswer:
    """An answer of ours in its full form, and its node in the token tree."""

    message: Message
    node: Node


@final
@attrs.define(eq=False)
class Conversation:
    """The messages of one session and their tokens."""

    tokenizer: Tokenizer
    tree: TokenTree = attrs.field(factory=TokenTree, init=False)
    _answers: dict[bytes, _OwnAnswer] = attrs.field(factory=dict, init=False)

    def place(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Placement:
        """Return the ids of the prompt for the next answer.

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
        suffix = self._ids(self._after_answer(upto[len(before) :], found.node.turn) + whole[len(upto) :])
        return continue_from(found.node, suffix, retokenized=self._ids(whole[len(before) :]))

    def record(self, messages: Sequence[Message], tools: Sequence[Tool], answer: Message, turn: Turn) -> Node:
        """Record the answer to these messages."""
        node = self.tree.add(turn)
        self._answers[_chain([*messages, answer], tools)[-1]] = _OwnAnswer(answer, node)
        return node

    def forget(self, node: Node) -> None:
        """Drop an answer that was not delivered."""
        self.tree.remove(node)
        self._answers = {key: answer for key, answer in self._answers.items() if answer.node is not node}

    def _recognised(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[list[Message], int, _OwnAnswer | None]:
        """Return the messages with our answers in full (agents drop the reasoning), and the last of those answers."""
        ours, last, found = list(messages), -1, None
        for place, key in enumerate(_chain(messages, tools)):
            answer = self._answers.get(key)
            if answer is not None:
                ours[place], last, found = answer.message, place, answer
        return ours, last, found

    def _after_answer(self, written: str, turn: Turn) -> str:
        """Return the template's text after an answer's last sampled token: the end mark, unless sampled, and the rest."""
        end = self._end_mark(turn)
        if not end or end not in written:
            return ""
        sampled = int(turn.output_ids[-1]) == self._ids(end)[-1]
        tail = written[written.rindex(end) :]
        return tail[len(end) :] if sampled else tail

    def _end_mark(self, turn: Turn) -> str:
        """Return the text of the token that ends a message: the sampled one if it is special, else the tokenizer's."""
        last = int(turn.output_ids[-1])
        if last in self.tokenizer.added_tokens:
            return self.tokenizer.added_tokens[last]
        eos = self.tokenizer.eos_token_id
        return "" if eos is None else self.tokenizer.decode([eos])

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


def _chain(messages: Sequence[Message], tools: Sequence[Tool]) -> list[bytes]:
    """Return a digest for every beginning of the conversation. The tools count, because they are part of the prompt."""
    digest, chain = b"", list[bytes]()
    for part in (list(tools), *map(_content_of, messages)):
        encoded = msgspec.json.encode(part, order="sorted")
        digest = hashlib.blake2b(digest + encoded, digest_size=16).digest()
        chain.append(digest)
    return chain[1:]


def _content_of(message: Message) -> list[Any]:
    """Return the part of a message that must agree for two messages to be the same.

    Most agents leave the reasoning out, and some write call ids and spacing anew, so these do not count.
    """
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or ()]
    return [message["role"], (message.get("content") or "").strip(), calls]
