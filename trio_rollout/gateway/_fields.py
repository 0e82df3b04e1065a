"""The fields, tools, items and parts of the three published APIs, each with its use.

Everything published stands in a table here: it is used, refused by name, or without effect, and what is without effect is
listed in docs/agents.md. A test compares the tables with the vendors' own clients, and sends each entry. Fields of no
published API (agents have their own) are without effect too. Tools, items and parts of no published kind are refused.
"""

import enum
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import attrs
import msgspec

from ._protocol import Refusal, decode_body


class Use(enum.Enum):
    """The use that the gateway makes of one thing that an API has."""

    USED = "used"
    """It has its effect."""
    IGNORED = "ignored"
    """A field without effect."""
    LEFT_OUT = "left out"
    """A tool that the vendor would run: the agent works without it, as it must when the vendor's tool is switched off."""
    REPLACED = "replaced"
    """A part that is no text: a text stands in its place, unless the task itself has it."""
    REFUSED = "refused"
    """Refused by name."""


@attrs.frozen
class Refused:
    """A field that is refused, unless its value is one of those that change nothing."""

    why: str
    unless: tuple[object, ...] = (None,)


Fields: TypeAlias = Mapping[str, Use | Refused]
Kinds: TypeAlias = Mapping[str, Use]

_LOG_PROBS: Final = "log-probs are recorded for the trainer and not sent to agents"
_FORMER: Final = "this is the former form of tools; give them as 'tools', and calls as 'tool_calls'"
_VENDOR: Final = "only the vendor's own servers could do this"


def _all(use: Use, names: str) -> dict[str, Use]:
    return dict.fromkeys(names.split(), use)


CHAT: Final[Fields] = {
    **_all(Use.USED, "messages model tools tool_choice max_tokens max_completion_tokens stop stream stream_options"),
    **_all(Use.USED, "temperature top_p response_format reasoning_effort chat_template_kwargs"),
    "n": Refused("send one request for each sample", (None, 1)),
    "logprobs": Refused(_LOG_PROBS, (None, False)),
    "top_logprobs": Refused(_LOG_PROBS, (None, 0)),
    "functions": Refused(_FORMER, (None, [])),
    "function_call": Refused(_FORMER, (None, "none", "auto")),
    "logit_bias": Refused("training needs samples of the policy's own distribution", (None, {})),
    "modalities": Refused("an answer is text", (None, [], ["text"])),
    "audio": Refused("an answer is text"),
    "web_search_options": Refused(_VENDOR),
    **_all(Use.IGNORED, "frequency_penalty presence_penalty seed parallel_tool_calls metadata store user verbosity"),
    **_all(Use.IGNORED, "safety_identifier service_tier prompt_cache_key prompt_cache_options prompt_cache_retention"),
    **_all(Use.IGNORED, "prediction moderation"),
}
"""Fields of a request to Chat Completions. ``chat_template_kwargs`` is SGLang's."""

RESPONSES: Final[Fields] = {
    **_all(Use.USED, "input instructions model tools tool_choice max_output_tokens previous_response_id store stream"),
    **_all(Use.USED, "temperature top_p text reasoning include"),
    "top_logprobs": Refused(_LOG_PROBS, (None, 0)),
    "background": Refused("not supported: wait for the answer", (None, False)),
    "background_options": Refused("not supported: wait for the answer"),
    "conversation": Refused("not supported: use previous_response_id"),
    "prompt": Refused(f"{_VENDOR}; send the text"),
    "truncation": Refused("not supported: a full context ends the answer", (None, "disabled")),
    "context_management": Refused("not supported: a full context ends the answer", (None, [])),
    "image": Refused("an answer is text"),
    "access_programs": Refused(_VENDOR, (None, [])),
    **_all(Use.IGNORED, "metadata moderation parallel_tool_calls max_tool_calls user safety_identifier service_tier"),
    **_all(Use.IGNORED, "prompt_cache_key prompt_cache_options prompt_cache_retention stream_options client_metadata"),
}
"""Fields of a request to Responses. ``client_metadata`` is Codex's."""

MESSAGES: Final[Fields] = {
    **_all(Use.USED, "messages model system tools tool_choice max_tokens stop_sequences stream temperature top_p"),
    **_all(Use.USED, "thinking output_config"),
    "container": Refused(_VENDOR),
    "mcp_servers": Refused(_VENDOR, (None, [])),
    **_all(Use.IGNORED, "top_k cache_control context_management diagnostics inference_geo metadata service_tier speed"),
    **_all(Use.IGNORED, "user_profile_id workspace_id"),
}
"""Fields of a request to Messages. ``mcp_servers`` and ``context_management`` are its beta's; ``temperature``, ``top_p`` and ``top_k`` are former ones."""

CHAT_TOOLS: Final[Kinds] = _all(Use.USED, "function custom")
RESPONSES_TOOLS: Final[Kinds] = {
    **_all(Use.USED, "function custom namespace"),
    **_all(Use.LEFT_OUT, "web_search web_search_2025_08_26 web_search_preview web_search_preview_2025_03_11"),
    **_all(Use.REFUSED, "apply_patch code_interpreter computer computer_use_preview file_search image_generation"),
    **_all(Use.REFUSED, "local_shell mcp programmatic_tool_calling shell tool_search"),
}
MESSAGES_TOOLS: Final[Kinds] = {
    **_all(Use.USED, "custom bash_20250124 memory_20250818"),
    **_all(Use.USED, "text_editor_20250124 text_editor_20250429 text_editor_20250728"),
    **_all(Use.LEFT_OUT, "web_search_20250305 web_search_20260209 web_search_20260318"),
    **_all(Use.LEFT_OUT, "web_fetch_20250910 web_fetch_20260209 web_fetch_20260309 web_fetch_20260318"),
    **_all(Use.LEFT_OUT, "tool_search_tool_bm25 tool_search_tool_bm25_20251119"),
    **_all(Use.LEFT_OUT, "tool_search_tool_regex tool_search_tool_regex_20251119"),
    **_all(Use.REFUSED, "code_execution_20250522 code_execution_20250825 code_execution_20260120"),
    **_all(Use.REFUSED, "code_execution_20260521 browser_toolset_20260801 computer_toolset_20260801"),
}

CHAT_PARTS: Final[Kinds] = {
    **_all(Use.USED, "text refusal input_text output_text"),
    **_all(Use.REPLACED, "image_url input_audio file"),
}
RESPONSES_PARTS: Final[Kinds] = {
    **_all(Use.USED, "input_text output_text text refusal summary_text reasoning_text"),
    **_all(Use.REPLACED, "input_image input_file"),
}
MESSAGES_PARTS: Final[Kinds] = {
    **_all(Use.USED, "text tool_use tool_result thinking redacted_thinking search_result tool_reference"),
    **_all(Use.REPLACED, "image document"),
    **_all(Use.REFUSED, "container_upload server_tool_use web_search_tool_result web_fetch_tool_result"),
    **_all(Use.REFUSED, "tool_search_tool_result code_execution_tool_result bash_code_execution_tool_result"),
    **_all(Use.REFUSED, "text_editor_code_execution_tool_result"),
}
RESPONSES_ITEMS: Final[Kinds] = {
    **_all(Use.USED, "message reasoning function_call function_call_output custom_tool_call custom_tool_call_output"),
    **_all(Use.USED, "item_reference"),
    **_all(Use.REFUSED, "additional_tools apply_patch_call apply_patch_call_output code_interpreter_call compaction"),
    **_all(Use.REFUSED, "compaction_trigger computer_call computer_call_output configuration_update file_search_call"),
    **_all(Use.REFUSED, "image_generation_call local_shell_call local_shell_call_output mcp_approval_request mcp_call"),
    **_all(Use.REFUSED, "mcp_approval_response mcp_list_tools program program_output shell_call shell_call_output"),
    **_all(Use.REFUSED, "tool_search_call tool_search_output web_search_call"),
}


def decode_request(body: bytes, kind: type[Any], table: Fields) -> Any:
    """Decode a request's body as this type, after a look at all of its fields.

    Raises:
      Refusal: the body is no JSON of this type, or has a field that is refused.
    """
    require_fields(decode_body(body, dict[str, msgspec.Raw]), table)
    return decode_body(body, kind)


def require_fields(body: Mapping[str, msgspec.Raw], table: Fields) -> None:
    """Refuse a request with a field that has no effect here and would need one; names the field."""
    for name in body:
        refused = table.get(name)
        if not isinstance(refused, Refused):
            continue
        value = decode_body(bytes(body[name]), object)
        if value not in refused.unless:
            got, allowed = (
                bytes(body[name]).decode(),
                ", ".join(msgspec.json.encode(one).decode() for one in refused.unless),
            )
            raise Refusal(400, f"{name}: got {got:.80}, allowed: {allowed}; {refused.why}")


@attrs.frozen(kw_only=True)
class Reading:
    """The way in which a message's parts are read: see ``text_of_part``."""

    task: bool
    """True for what the agent was given before the first answer."""
    markup: str | None = None
    """The chat template's text in the place of an image, if the policy sees images."""
    images: list[str] = attrs.field(factory=list)
    """The images of the message, as URLs."""


def text_of_part(kind: str, text: str, table: Kinds, where: str, how: Reading, image: str | None = None) -> str:
    """Return the text of a part; a note in place of one that is no text. An ``image``, as a URL, is kept for a policy that sees.

    A policy that reads text can't do a task with an image, and must not be trained on it. An image that comes up later must
    not end the agent.

    Raises:
      Refusal: the part is of no known kind, or is no text and belongs to the task.
    """
    use = table.get(kind, Use.REFUSED)
    if use is Use.USED:
        return text
    if use is Use.REPLACED and image and how.markup is not None:
        how.images.append(image)
        return how.markup
    if use is Use.REPLACED and not how.task:
        return f"[{kind.removeprefix('input_').removesuffix('_url')}: not shown, because the model is given text only]"
    known = ", ".join(name for name, use in table.items() if use is Use.USED)
    raise Refusal(400, f"{where}: content of type {kind!r} can't be tokenised, only {known} can")


def use_of(kind: str, table: Kinds, where: str) -> Use:
    """Return the use of a tool, an item or a part of this kind; refuse one that is not known or can't be used."""
    use = table.get(kind, Use.REFUSED)
    if use is Use.REFUSED:
        known = ", ".join(name for name, use in table.items() if use is not Use.REFUSED)
        raise Refusal(400, f"{where}: the type {kind!r} is not supported, only {known}")
    return use
