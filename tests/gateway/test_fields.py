"""Every published field, tool, item and part has its effect, is refused by name, or is listed as one without effect.

The tables of ``gateway/_fields.py`` are compared with the types of the vendors' own clients, and each entry is sent.
"""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Required, get_args, get_origin, get_type_hints

import attrs
import httpx
import pytest
from anthropic import types as anthropic_types
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import chat as openai_chat
from openai.types import responses as openai_responses
from openai.types.chat import completion_create_params
from openai.types.responses import (
    response_create_params,
    response_input_item_param,
    response_input_message_content_list_param,
)

from trio_rollout.gateway import _fields
from trio_rollout.gateway._anthropic import Messages
from trio_rollout.gateway._fields import Refused, Use
from trio_rollout.gateway._openai_chat import ChatCompletions
from trio_rollout.gateway._openai_responses import Responses
from trio_rollout.gateway._protocol import Refusal

from .conftest import WEATHER
from .talk import APIS
from .test_field_turns import PATHS

ROOT = Path(__file__).parents[2]
PROTOCOLS = {"chat": ChatCompletions(), "responses": Responses(), "messages": Messages()}
TABLES = {"chat": _fields.CHAT, "responses": _fields.RESPONSES, "messages": _fields.MESSAGES}
PUBLISHED = {
    "chat": [
        completion_create_params.CompletionCreateParamsBase,
        completion_create_params.CompletionCreateParamsStreaming,
    ],
    "responses": [
        response_create_params.ResponseCreateParamsBase,
        response_create_params.ResponseCreateParamsStreaming,
    ],
    "messages": [
        message_create_params.MessageCreateParamsBase,
        message_create_params.MessageCreateParamsStreaming,
        message_count_tokens_params.MessageCountTokensParams,
    ],
}
# In the tables and in no published type: SGLang's, Codex's, and Messages' beta and former ones.
MORE = {
    "chat": {"chat_template_kwargs"},
    "responses": {"client_metadata"},
    "messages": {"mcp_servers", "context_management", "temperature", "top_p", "top_k"},
}

USER = [{"role": "user", "content": "x"}]
BASE = {
    "chat": {"model": "m", "messages": USER},
    "responses": {"model": "m", "input": USER},
    "messages": {"model": "m", "messages": USER, "max_tokens": 5},
}
SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}
RESPONSES_TOOL = {"type": "function", "strict": False, **WEATHER}
MESSAGES_TOOL = {"name": "weather", "input_schema": WEATHER["parameters"]}
CHAT_TOOL = {"type": "function", "function": WEATHER}
# For each used field, a request without it or with another value, and one that must become another request.
VALUES: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [{"role": "user", "content": "y"}],
        "model": "other",
        "tools": [CHAT_TOOL],
        "max_tokens": 7,
        "max_completion_tokens": 7,
        "stop": ["end"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_p": 0.5,
        "response_format": {"type": "json_schema", "json_schema": SCHEMA},
        "reasoning_effort": "low",
        "chat_template_kwargs": {"a": 1},
    },
    "responses": {
        "input": "y",
        "instructions": "y",
        "model": "other",
        "tools": [RESPONSES_TOOL],
        "max_output_tokens": 7,
        "previous_response_id": "resp_1",
        "store": False,
        "stream": True,
        "temperature": 0.5,
        "top_p": 0.5,
        "text": {"format": SCHEMA},
        "reasoning": {"effort": "low"},
        "include": ["reasoning.encrypted_content"],
    },
    "messages": {
        "messages": [{"role": "user", "content": "y"}],
        "model": "other",
        "system": "y",
        "tools": [MESSAGES_TOOL],
        "max_tokens": 7,
        "stop_sequences": ["end"],
        "stream": True,
        "temperature": 0.5,
        "top_p": 0.5,
        "thinking": {"type": "disabled"},
        "output_config": {"format": SCHEMA},
    },
}
# tool_choice needs tools beside it.
CHOICE = {
    "chat": ({"tools": [CHAT_TOOL]}, "none"),
    "responses": ({"tools": [RESPONSES_TOOL]}, "none"),
    "messages": ({"tools": [MESSAGES_TOOL]}, {"type": "none"}),
}


def plain(kind):
    while get_origin(kind) in {Required, NotRequired, Annotated}:
        kind = get_args(kind)[0]
    return kind


def kinds(kind):
    """Return the values of ``type`` in this union of published types."""
    kind = plain(kind)
    if hasattr(kind, "__required_keys__"):  # a TypedDict, of typing or of typing_extensions
        found = plain(get_type_hints(kind, include_extras=False).get("type"))
        parts = [found, *get_args(found)]
        return {one for part in parts if get_origin(part) is Literal for one in get_args(part)}
    return {one for part in get_args(kind) for one in kinds(part)}


def decoded(api, **changes):
    """Return the request that a body becomes."""
    request = PROTOCOLS[api].request(json.dumps({**BASE[api], **changes}).encode())
    return attrs.evolve(request, digest="")


def refused(api, **changes):
    with pytest.raises(Refusal) as refusal:
        decoded(api, **changes)
    assert refusal.value.status == 400
    return refusal.value.message


@pytest.mark.parametrize("api", APIS)
def test_every_published_field_has_a_use(api):
    published = {name for kind in PUBLISHED[api] for name in get_type_hints(kind)}
    assert set(TABLES[api]) == published | MORE[api]


@pytest.mark.parametrize(
    ("published", "table", "more"),
    [
        (openai_chat.ChatCompletionToolUnionParam, _fields.CHAT_TOOLS, ""),
        (openai_responses.tool_param.ToolParam, _fields.RESPONSES_TOOLS, ""),
        (anthropic_types.tool_union_param.ToolUnionParam, _fields.MESSAGES_TOOLS, ""),
        # Some clients send the parts of the other API.
        (openai_chat.ChatCompletionContentPartParam, _fields.CHAT_PARTS, "refusal input_text output_text"),
        (
            response_input_message_content_list_param.ResponseInputContentParam,
            _fields.RESPONSES_PARTS,
            "output_text text refusal summary_text reasoning_text",
        ),
        (anthropic_types.content_block_param.ContentBlockParam, _fields.MESSAGES_PARTS, "tool_reference"),
        (response_input_item_param.ResponseInputItemParam, _fields.RESPONSES_ITEMS, ""),
    ],
    ids=lambda given: "" if isinstance(given, str | dict) else None,
)
def test_every_published_kind_has_a_use(published, table, more):
    assert set(table) == kinds(published) | set(more.split())


@pytest.mark.parametrize("api", APIS)
def test_a_used_field_makes_another_request(api):
    used = {name for name, use in TABLES[api].items() if use is Use.USED}
    assert used == {*VALUES[api], "tool_choice"}
    for name, value in VALUES[api].items():
        assert decoded(api, **{name: value}) != decoded(api), name
    tools, none = CHOICE[api]
    assert decoded(api, **tools, tool_choice=none) == decoded(api)


@pytest.mark.parametrize("api", APIS)
def test_a_refused_field_is_refused_by_name_unless_it_changes_nothing(api):
    for name, use in TABLES[api].items():
        if not isinstance(use, Refused):
            continue
        for value in (2, "some", True, {"a": 1}, ["a"]):
            if value in use.unless:
                continue
            message = refused(api, **{name: value})
            assert message.startswith(f"{name}: got "), message
            assert use.why in message
        for value in use.unless:
            assert decoded(api, **{name: value}) == decoded(api), (name, value)


@pytest.mark.parametrize("api", APIS)
def test_a_field_without_effect_has_none_and_is_listed(api):
    text = " ".join((ROOT / "docs" / "agents.md").read_text(encoding="utf-8").split())
    listed = re.search(r"\*\*Fields without effect\.\*\*(.*?)Fields of no published API", text)
    title = {"chat": "Chat Completions", "responses": "Responses", "messages": "Messages"}[api]
    names = re.search(rf"{title}: (.*?)\.", listed[1])[1]
    ignored = [name for name, use in TABLES[api].items() if use is Use.IGNORED]
    assert re.findall(r"`(\w+)`", names) == sorted(ignored)
    for name in [*ignored, "a_field_of_2030"]:
        for value in (2, "some", True, {"a": 1}, None):
            assert decoded(api, **{name: value}) == decoded(api), name


def item_of(kind):
    more = {
        "message": {"role": "user", "content": "x"},
        "item_reference": {"id": "msg_1"},
        "custom_tool_call": {"input": "x", "name": "f"},
        "reasoning": {"summary": [{"type": "summary_text", "text": "x"}]},
    }
    return {"type": kind, "call_id": "c", "name": "f", "arguments": "{}", "output": "x", **more.get(kind, {})}


def test_every_item_is_read_or_refused_by_name():
    for kind, use in [*_fields.RESPONSES_ITEMS.items(), ("item_of_2030", Use.REFUSED)]:
        body = {"input": [*USER, item_of(kind)]}
        if use is Use.REFUSED or kind == "item_reference":
            wanted = "no item 'msg_1'" if kind == "item_reference" else repr(kind)
            assert wanted in refused("responses", **body)
        else:
            assert decoded("responses", **body) != decoded("responses"), kind


PARTS = {"chat": _fields.CHAT_PARTS, "responses": _fields.RESPONSES_PARTS, "messages": _fields.MESSAGES_PARTS}
NO_TEXT = {"tool_use", "tool_result", "thinking", "redacted_thinking"}


@pytest.mark.parametrize("api", APIS)
def test_every_part_is_read_replaced_or_refused_by_name(api):
    """In the task and behind an answer."""
    for kind, use in [*PARTS[api].items(), ("part_of_2030", Use.REFUSED)]:
        part = {"type": kind, "text": "told", "refusal": "told", "tool_name": "told", "title": "told"}
        name = "input" if api == "responses" else "messages"
        task = {name: [{"role": "user", "content": [part]}]}
        later = {name: [*USER, {"role": "assistant", "content": "y"}, {"role": "user", "content": [part]}]}
        if use is Use.USED:
            for body in (task, later):
                assert kind in NO_TEXT or decoded(api, **body).messages[-1]["content"] == "told", kind
            continue
        assert repr(kind) in refused(api, **task)
        if use is Use.REPLACED:
            assert "not shown" in decoded(api, **later).messages[-1]["content"]
        else:
            assert repr(kind) in refused(api, **later)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_what_is_refused_is_refused_over_http_and_the_rest_is_answered(run_agent_once, stream):
    async def agent(session):
        async with httpx.AsyncClient(timeout=60, trust_env=False, headers={"x-api-key": session.api_key}) as client:
            for api in APIS:
                for name, use in TABLES[api].items():
                    value = VALUES[api].get(name, 2)
                    if name in {"previous_response_id", "tool_choice", "response_format", "text", "output_config"}:
                        continue  # they need a turn, tools, or a server with a grammar
                    body = {**BASE[api], "stream": stream, name: value}
                    answer = await client.post(session.base_url + PATHS[api], json=body)
                    if isinstance(use, Refused):
                        assert answer.status_code == 400
                        assert answer.json()["error"]["message"].startswith(f"{name}: got 2")
                    else:
                        assert answer.status_code == 200, (name, answer.text)

    await run_agent_once(agent, tiny={"context_length": 512}, gateway={"default_max_tokens": 4})
