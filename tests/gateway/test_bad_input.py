"""Any input is answered in the protocol's own shape: never a 5xx of ours, never a turn that was not asked for."""

import json

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trio_rollout.gateway._anthropic import Messages
from trio_rollout.gateway._openai_chat import ChatCompletions
from trio_rollout.gateway._openai_responses import Responses
from trio_rollout.gateway._protocol import Refusal
from trio_rollout.gateway._values import Answer, ChatRequest, Finish, ToolUse

PROTOCOLS = [ChatCompletions(), Messages(), Responses()]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
TEXT = st.text(max_size=8)
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "input_text", "tool_use", "tool_result", "thinking", "image", "reasoning_text"])},
    optional={"text": TEXT | JSON, "thinking": TEXT, "input": JSON, "content": TEXT | JSON, "name": TEXT, "id": TEXT},
)
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "developer", "tool"]) | JSON,
        "type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output", "other"]) | JSON,
        "content": TEXT | st.lists(PART, max_size=3) | JSON,
        "tool_calls": st.lists(st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": TEXT})}), max_size=2),
        "call_id": TEXT,
        "name": TEXT,
        "arguments": TEXT,
        "output": TEXT | JSON,
    },
)
BODY = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(ITEM, max_size=4) | JSON,
        "input": TEXT | st.lists(ITEM, max_size=4) | JSON,
        "system": TEXT | JSON,
        "instructions": TEXT | JSON,
        "tools": st.lists(JSON, max_size=2) | JSON,
        "tool_choice": JSON,
        "max_tokens": JSON,
        "max_output_tokens": JSON,
        "stop": JSON,
        "stop_sequences": JSON,
        "temperature": JSON,
        "stream": JSON,
        "n": JSON,
        "response_format": JSON,
    },
)


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: type(protocol).__name__)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=BODY | JSON)
def test_any_json_is_a_request_or_a_refusal(protocol, body):
    request, refusal = None, None
    try:
        request = protocol.request(json.dumps(body).encode())
    except Refusal as error:
        refusal = error
    if request is None:
        assert refusal.status == 400
        assert "message" in protocol.error(refusal)["error"]
        return
    assert request.messages
    for message in request.messages:
        assert isinstance(message["role"], str)
        assert isinstance(message["content"], str)


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: type(protocol).__name__)
@given(body=st.binary(max_size=40))
def test_any_bytes_are_a_refusal(protocol, body):
    with pytest.raises(Refusal):
        protocol.request(body)


def test_nesting_without_end_is_refused():
    for protocol in PROTOCOLS:
        with pytest.raises(Refusal):
            protocol.request(b'{"messages":' + b"[" * 200_000)


ANSWERS = st.builds(
    lambda text, reasoning, calls, finish: Answer(
        id="t",
        text=text,
        reasoning=reasoning,
        finish=finish,
        calls=tuple(ToolUse(id=f"c{place}", name="f", arguments="{}") for place in range(calls)),
    ),
    TEXT,
    TEXT,
    st.integers(0, 2),
    st.sampled_from(list(Finish)),
)


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: type(protocol).__name__)
@given(answer=ANSWERS, cut=st.integers(0, 8))
def test_a_stream_says_what_the_whole_answer_says(protocol, answer, cut):
    """The pieces make up the text wherever it is cut; every event is JSON; the end is the protocol's own."""
    request = ChatRequest(messages=({"role": "user", "content": "x"},), model="m", stream=True)
    writer = protocol.stream("t", request)
    shown = answer.text[:cut]
    thoughts = answer.reasoning[:cut]
    data = writer.begin() + (writer.thoughts(thoughts) if thoughts else b"") + (writer.text(shown) if shown else b"")
    data += writer.end(answer, answer.text[len(shown) :], "" if shown else answer.reasoning[len(thoughts) :])

    events = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ") and line != b"data: [DONE]"]
    decoded = [msgspec.json.decode(event) for event in events]
    text = "".join(
        event.get("delta", {}).get("text", "")
        if event.get("type") == "content_block_delta"
        else event["delta"]
        if event.get("type") == "response.output_text.delta"
        else "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
        for event in decoded
    )

    assert text == answer.text
    assert protocol.answer(answer, request)
    assert all(event.get("index", 0) >= 0 for event in decoded)
