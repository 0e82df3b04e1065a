"""The prompt ids of a turn, from an agent's messages: recorded ids where the conversation goes on.

An agent sends its whole conversation with every request. The longest beginning of it that ends with an answer of ours is
found by content, in a chain of message digests. The ids of that answer are used as they were sampled, and only the text
after them is tokenised: tokenising an answer's text again may give other ids than those that the model sampled. If the
chat template writes the history differently once more messages follow (some models forget their thoughts), the
conversation forks: see ``_core/token_tree.py``.

A nonce in a system message (a request's id, a checksum) does not count: some agents write a new one for every request, and
each turn would begin another conversation. Some agents write an answer's calls into its text, with their ids: that is this
answer, because no other text can have these ids. Every other change in front of an answer of ours is a fork, and is counted.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, final

import attrs
import msgspec
import numpy as np

from .._core.token_tree import Drift, Node, Placement, TokenTree, continue_from
from .._core.values import Turn
from ..tokenizer import Tokenizer
from ..tokenizer._arrangement import joined, leading
from ..tokenizer._messages import continues
from ._values import Message, Tool

# A checksum behind the name that Claude Code gives it, a UUID, a long hexadecimal number.
_NONCE: Final = re.compile(
    r"\bcch=[0-9a-f]+|\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b|\b[0-9a-f]{16,}\b", re.IGNORECASE
)
_MARKUP: Final = re.compile(r"<[^<>]*>|\s")


@attrs.frozen(kw_only=True)
class Placed(Placement):
    """A placement, and what recording the answer needs."""

    chain: bytes = attrs.field(repr=False)
    """The digest of the whole conversation."""


@attrs.frozen(kw_only=True)
class _OwnAnswer:
    """An answer of ours in its full form, and its node in the token tree."""

    message: Message
    node: Node
    own: bytes
    """The digest of the answer alone."""
    system: bytes
    """The digest of the system messages before it, with their nonces."""
    variables: Mapping[str, object]


@attrs.frozen(kw_only=True)
class _Found:
    """The known part of a conversation: its messages with our answers in full, and the last of those answers."""

    messages: list[Message]
    last: int
    answer: _OwnAnswer | None
    rewritten: bool
    """True if an answer of ours was recognised by the ids of its calls only."""
    changed: bool
    """True if an answer of ours stands behind ``last``, where the messages before it are not those that it answered."""
    chain: bytes


@final
@attrs.define(eq=False)
class Conversation:
    """The messages of one session and their tokens."""

    tokenizer: Tokenizer
    tree: TokenTree = attrs.field(factory=TokenTree, init=False)
    _answers: dict[bytes, _OwnAnswer] = attrs.field(factory=dict, init=False)
    _after: dict[bytes, list[bytes]] = attrs.field(factory=dict, init=False)
    """The keys of the answers with calls, by the digest of the conversation before them."""

    def place(self, messages: Sequence[Message], tools: Sequence[Tool], variables: Mapping[str, object] = {}) -> Placed:
        """Return the ids of the prompt for the next answer. ``variables`` are the chat template's.

        A conversation that ends with words of the assistant is one whose answer goes on from there.

        Raises:
          RequestRejected: the chat template refuses these messages.
        """
        messages = _one_system_message(messages)
        if continues(messages):
            return self._placed_behind_words(messages, tools, variables)
        found = self._recognised(messages, tools)
        placement = self._continued(found, tools, variables)
        if placement is None:
            whole = self._render(found.messages, tools, variables)
            forked = found.answer is not None or found.changed
            placement = Placement(prompt_ids=self._ids(whole), drift=Drift.FORKED if forked else Drift.NONE)
        drift = Drift.FORKED if found.changed else placement.drift
        return Placed(prompt_ids=placement.prompt_ids, drift=drift, chain=found.chain)

    def record(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        answer: Message,
        turn: Turn,
        *,
        variables: Mapping[str, object] = {},
        placed: Placed | None = None,
    ) -> Node:
        """Record the answer to these messages; ``placed`` saves a pass over them."""
        messages = _one_system_message(messages)
        node = self.tree.add(turn)
        chain = self._recognised(messages, tools).chain if placed is None else placed.chain
        system = _system_digest(messages)

        def keep(chain: bytes, message: Message, written: Message) -> None:
            own, key = _digest_of(_content_of(written)), _digest_of(_content_of(written), chain)
            self._answers[key] = _OwnAnswer(message=message, node=node, own=own, system=system, variables=variables)
            if message.get("tool_calls"):
                self._after.setdefault(chain, []).append(key)

        keep(chain, answer, answer)
        if continues(messages):  # most agents make one message of their own words and the answer
            begun = messages[-1]
            before = self._recognised(messages[:-1], tools).chain
            whole = {**begun, **answer, "content": f"{begun['content']}{answer['content']}"}
            for written in (whole["content"], f"{begun['content']}\n{answer['content']}"):
                keep(before, whole, {**whole, "content": written})
        return node

    def forget(self, node: Node) -> None:
        """Drop an answer that was not delivered."""
        self.tree.remove(node)
        self._answers = {key: answer for key, answer in self._answers.items() if answer.node is not node}

    def _placed_behind_words(
        self, messages: Sequence[Message], tools: Sequence[Tool], variables: Mapping[str, object]
    ) -> Placed:
        """Return the ids of a conversation that ends with words of the assistant: the turn before them, and the words."""
        found = self._recognised(messages[:-1], tools)
        chain = _digest_of(_content_of(messages[-1]), found.chain)
        written = self._render([*found.messages, messages[-1]], tools, variables, continue_final_message=True)
        before = self._render(found.messages, tools, variables) if found.messages else ""
        if not written.startswith(before):
            drift = Drift.NONE if found.answer is None else Drift.FORKED
            return Placed(prompt_ids=self._ids(written), drift=drift, chain=chain)
        placed = self.place(messages[:-1], tools, variables) if found.messages else None
        begun = [] if placed is None else [placed.prompt_ids]
        ids = np.concatenate([*begun, np.asarray(self._ids(written[len(before) :]), np.int32)])
        return Placed(prompt_ids=ids, drift=Drift.NONE if placed is None else placed.drift, chain=chain)

    def _continued(self, found: _Found, tools: Sequence[Tool], variables: Mapping[str, object]) -> Placement | None:
        """Return the placement behind the last answer of ours; None if there is none, or the template rewrote it."""
        if (answer := found.answer) is None:
            return None
        ours, last = found.messages, found.last
        render = partial(self._render, tools=tools, variables=variables)
        upto = render(ours[: last + 1], add_generation_prompt=False)
        if answer.variables != variables and upto != self._render(
            ours[: last + 1], tools, answer.variables, add_generation_prompt=False
        ):
            return None
        whole, before = render(ours), render(ours[:last])
        if whole.startswith(upto) and upto.startswith(before):
            written, rest, again = upto[len(before) :], whole[len(upto) :], whole[len(before) :]
        else:
            head = render(ours[:last], add_generation_prompt=False)
            end = _end_in(whole, upto, head, self._end_mark(answer.node.turn)) if _has_no_thoughts(answer) else None
            if end is None:
                return None
            written, rest, again = upto[len(head) :], whole[end:], whole[len(head) :]
        suffix = self._ids(self._after_answer(written, answer.node.turn) + rest)
        placement = continue_from(answer.node, suffix, retokenized=self._ids(again))
        if found.rewritten or answer.system != _system_digest(ours[:last]):
            placement = attrs.evolve(placement, drift=Drift.REUSED)
        return placement

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Tool], variables: Mapping[str, object], **how: bool
    ) -> str:
        given: dict[str, Any] = {"variables": variables} if variables else {}
        return self.tokenizer.render_chat(messages, tools or None, **{**given, **how})

    def _recognised(self, messages: Sequence[Message], tools: Sequence[Tool]) -> _Found:
        """Return the messages with our answers in full (agents drop the reasoning), and the last of those answers."""
        chain, rewritten = _digest_of(list(tools)), False
        ours, last, found = list(messages), -1, None
        for place, message in enumerate(messages):
            key = _digest_of(_content_of(message), chain)
            if key not in self._answers and (named := self._named_in(message, chain)) is not None:
                key, rewritten = named, True
            answer = self._answers.get(key)
            if answer is not None:
                ours[place], last, found = answer.message, place, answer
            chain = key
        rest = messages[last + 1 :]
        said = {answer.own for answer in self._answers.values()} if any(map(_says_something, rest)) else set[bytes]()
        changed = any(_says_something(one) and _digest_of(_content_of(one)) in said for one in rest)
        return _Found(messages=ours, last=last, answer=found, rewritten=rewritten, changed=changed, chain=chain)

    def _named_in(self, message: Message, before: bytes) -> bytes | None:
        """Return the key of the answer behind ``before`` whose calls an assistant's text names by their ids; None without one."""
        text = message.get("content") or ""
        if message["role"] != "assistant" or message.get("tool_calls"):
            return None
        for key in self._after.get(before, ()):
            answer = self._answers.get(key)
            if answer is not None and all(call["id"] in text for call in answer.message["tool_calls"]):
                return key
        return None

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


def _one_system_message(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages with the system messages at the beginning joined."""
    lead = leading(messages)
    return messages if lead < 2 else (*joined(messages[:lead]), *messages[lead:])  # noqa: PLR2004


def _end_in(whole: str, upto: str, head: str, end: str) -> int | None:
    """Return the place in ``whole`` behind the last message of ``upto``; None if the template wrote it in other words.

    ``head`` is the text before that message, and ``end`` the mark at its end. Some templates write an empty thought into
    the newest answer and leave it out later: these are the same words.
    """
    if not (end and whole.startswith(head) and upto.startswith(head)):
        return None
    newest = upto[len(head) :]
    pieces = whole[len(head) :].split(end)
    count = newest.count(end)
    if not count or len(pieces) <= count:
        return None
    tail = newest[newest.rindex(end) :]
    later = end.join(pieces[:count]) + tail
    if not whole.startswith(later, len(head)) or _MARKUP.sub("", later) != _MARKUP.sub("", newest):
        return None
    return len(head) + len(later)


def _has_no_thoughts(answer: _OwnAnswer) -> bool:
    return not answer.message.get("reasoning_content")


def _says_something(message: Message) -> bool:
    return message["role"] == "assistant" and bool(message.get("content") or message.get("tool_calls"))


def digest_of_last(messages: Sequence[Message]) -> bytes:
    """Return a digest of the last message and of the number of messages: enough to tell an agent's requests apart."""
    return _digest_of([len(messages), *map(_content_of, messages[-1:])])


def _digest_of(part: object, before: bytes = b"") -> bytes:
    return hashlib.blake2b(before + msgspec.json.encode(part, order="sorted"), digest_size=16).digest()


def _system_digest(messages: Iterable[Message]) -> bytes:
    return _digest_of([message["content"] for message in messages if message["role"] == "system"])


def _content_of(message: Message) -> list[Any]:
    """Return the part of a message that must agree for two messages to be the same.

    Most agents leave the reasoning out, and some write call ids, spacing and whole numbers anew, so these do not count.
    """
    role, text = message["role"], (message.get("content") or "").strip()
    if role == "system":
        text = _NONCE.sub("", text)
    calls = [
        [call["function"]["name"], _numbers(call["function"]["arguments"])] for call in message.get("tool_calls") or ()
    ]
    return [role, text, calls, *message.get("images", ())]


def _numbers(value: Any) -> Any:
    """Return the value with whole numbers written in one way: JavaScript has no 1.0."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _numbers(inner) for key, inner in value.items()}
    return [_numbers(inner) for inner in value] if isinstance(value, list | tuple) else value
