"""The places where a chat template takes system messages, and messages arranged so that it takes them.

Agents send several system messages: a vendor's own, a project's, a reminder in the middle. Many templates take one, at the
beginning; some take none. Some raise, others leave a message out without a word. So each template is tried once, when it
is loaded, on a few short conversations, and every conversation is then arranged by the same rules: a message that was
moved stands where it stood before when the conversation has grown.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

import attrs

from ..errors import RequestRejected

_Message: TypeAlias = Mapping[str, Any]
_Render: TypeAlias = Callable[[Sequence[_Message]], str]


@final
@attrs.frozen(kw_only=True)
class Arrangement:
    """The messages that a template takes; ``arranged`` changes nothing else."""

    system: bool = True
    """A system message at the beginning."""
    several: bool = True
    """Several system messages at the beginning."""
    later: bool = True
    """A system message behind others."""
    users: bool = True
    """Several messages of the user in a row."""

    @classmethod
    def of(cls, render: _Render) -> "Arrangement":
        """Return the arrangement for the template behind ``render``; one that takes no plain message of a user is left alone."""
        if not _shows(render, "user"):
            return cls()
        system = _shows(render, "system", "user")
        first = ("system",) if system else ()
        return cls(
            system=system,
            several=system and _shows(render, "system", "system", "user"),
            later=_shows(render, *first, "user", "system", "assistant", "system", "user"),
            users=_shows(render, "user", "user"),
        )

    def arranged(self, messages: Sequence[_Message]) -> Sequence[_Message]:
        """Return the messages as the template takes them.

        System messages at the beginning become one, or the beginning of the user's first message. Later ones become
        messages of the user, and messages of the user in a row become one.
        """
        roles = [message.get("role") for message in messages]
        if self.users and roles.count("system") <= (roles[:1] == ["system"] and self.system):
            return messages
        lead = leading(messages)
        first = list(messages[:lead])
        if not (self.system and self.several):
            first = joined(first)
        rest = [
            message if self.later or message.get("role") != "system" else _as_user(message)
            for message in messages[lead:]
        ]
        if first and not self.system:
            first, rest = [], _merged([_as_user(first[0]), *rest[:1]]) + rest[1:]
        return [*first, *(rest if self.users else _merged(rest))]


def markup_of_image(render: _Render) -> str | None:
    """Return the text that a template writes in the place of an image; None if it takes no parts, or no images."""
    parts = [
        {"type": "text", "text": "probe1"},
        {"type": "image", "image": "probe2"},
        {"type": "text", "text": "probe3"},
    ]
    try:
        text = render([{"role": "user", "content": parts}])
    except RequestRejected:
        return None
    _, before, rest = text.partition("probe1")
    markup, behind, _ = rest.partition("probe3")
    # A template that takes no parts may write them as Python does.
    return markup if before and behind and markup.strip() and "probe2" not in markup and "{" not in markup else None


def leading(messages: Sequence[_Message]) -> int:
    """Return the number of system messages at the beginning."""
    return next((place for place, one in enumerate(messages) if one.get("role") != "system"), len(messages))


def joined(messages: Sequence[_Message]) -> list[_Message]:
    """Return one message in place of several of the same role; a content that is no text is not joined."""
    texts = [message.get("content") for message in messages]
    if len(messages) < 2 or not all(isinstance(text, str) for text in texts):  # noqa: PLR2004
        return list(messages)
    return [{**messages[0], "content": "\n\n".join(text for text in texts if text)}]


def _merged(messages: Sequence[_Message]) -> list[_Message]:
    """Return the messages with those of the user in a row joined."""
    merged: list[_Message] = []
    for message in messages:
        if merged and message.get("role") == merged[-1].get("role") == "user":
            merged[-1:] = joined([merged[-1], message])
        else:
            merged.append(message)
    return merged


def _as_user(message: _Message) -> _Message:
    return {**message, "role": "user"}


def _shows(render: _Render, *roles: str) -> bool:
    """Return True if the template writes the text of a message of each of these roles, in their order."""
    texts = [f"probe{place}of{len(roles)}" for place in range(len(roles))]
    try:
        text = render([{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)])
    except RequestRejected:
        return False
    places = [text.find(one) for one in texts]
    return -1 not in places and places == sorted(places)
