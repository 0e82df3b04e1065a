"""Bodies that schemathesis makes of the gateway's schema, valid and invalid, and HTTP requests with changed bytes.

None is answered with a 5xx, and each error has the protocol's own shape.
"""

import json
from collections import Counter
from typing import Any, Literal

import httpx
import msgspec
import pytest
import schemathesis
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from trio_rollout.gateway import _anthropic, _openai_chat, _openai_responses

from .test_http_faults import HELLO, ask, connected, raw_request

BODIES = {
    "/chat/completions": _openai_chat._Body,
    "/messages": _anthropic._Body,
    "/messages/count_tokens": _anthropic._Body,
    "/responses": _openai_responses._Body,
}


class OpenAIError(msgspec.Struct, forbid_unknown_fields=True):
    """The error of OpenAI's API for a bad request, with no other field."""

    message: str
    type: Literal["invalid_request_error"]
    param: str | None
    code: str | None


class OpenAIAnswer(msgspec.Struct, forbid_unknown_fields=True):
    error: OpenAIError


class AnthropicError(msgspec.Struct, forbid_unknown_fields=True):
    """The error of Anthropic's API for a bad request, with no other field."""

    type: Literal["invalid_request_error"]
    message: str


class AnthropicAnswer(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["error"]
    error: AnthropicError


def operation(path):
    """The route as OpenAPI has it, with the body that the gateway decodes."""
    (schema,), parts = msgspec.json.schema_components([BODIES[path]], ref_template="#/components/schemas/{name}")
    route = {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": "an answer"}},
    }
    document = {
        "openapi": "3.1.0",
        "info": {"title": "gateway", "version": "1"},
        "paths": {path: {"post": route}},
        "components": {"schemas": parts},
    }
    return schemathesis.openapi.from_dict(document)[path]["POST"]


def examples(strategy, count):
    """So many examples, the same in every run."""
    found = []

    @settings(
        max_examples=count, database=None, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(example=strategy)
    def collect(example):
        found.append(example)

    collect()
    return found


def bodies(path, mode, count):
    """So many bodies that follow the schema, or that break it."""
    found = [case.body for case in examples(operation(path).as_strategy(generation_mode=mode), count)]
    return [body if isinstance(body, bytes) else json.dumps(body).encode(errors="surrogatepass") for body in found]


def check_refusal(path, answer):
    """A refusal is JSON in the protocol's own shape, also if a stream was asked for, and says what is wrong."""
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-should-retry"] == "false"
    kind: Any = AnthropicAnswer if path.startswith("/messages") else OpenAIAnswer
    assert msgspec.json.decode(answer.content, type=kind).error.message


def check_answer(answer):
    """A whole answer is JSON, a streamed one ends well."""
    if answer.headers["content-type"] == "application/json":
        assert "error" not in answer.json() or answer.json()["error"] is None
        return
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ") and line != "data: [DONE]"]
    assert events
    for event in map(msgspec.json.decode, events):
        assert "error" not in event
        assert event.get("type") not in {"error", "response.failed"}


async def drive(run_agent_once, path, mode, count):
    """Send them all; how often each status came."""
    statuses = Counter()

    async def agent(session):
        key = {"authorization": f"Bearer {session.api_key}", "content-type": "application/json"}
        async with httpx.AsyncClient(timeout=60, headers=key) as client:
            for body in bodies(path, mode, count):
                answer = await client.post(f"{session.base_url}{path}", content=body)
                statuses[answer.status_code] += 1
                assert answer.status_code in {200, 400}, (body, answer.text)
                if answer.status_code == 400:
                    check_refusal(path, answer)
                else:
                    check_answer(answer)
        assert (await ask(session)).status_code == 200

    # A short context: a body that asks for a billion tokens is answered with what fits.
    limits = {"context_length": 300, "agents_choose_temperature": True}
    await run_agent_once(agent, gateway=limits, patience=3000)
    return statuses


@pytest.mark.parametrize("path", BODIES)
async def test_no_body_disturbs_the_gateway(run_agent_once, path):
    statuses = await drive(run_agent_once, path, GenerationMode.NEGATIVE, 12)

    assert statuses[400] > 0


@pytest.mark.soak
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("path", BODIES)
async def test_more_bodies_disturb_nothing(run_agent_once, path, mode):
    statuses = await drive(run_agent_once, path, mode, 300)
    print(path, mode.value, dict(statuses))  # ruff: ignore[print]  the numbers are the point of a soak
    assert statuses.total() >= 100


# Where a request is changed, as a part of its length, and by what.
CHANGE = st.tuples(
    st.floats(0, 1),
    st.sampled_from(["cut", "drop", "insert", "repeat"]),
    st.sampled_from([b"\0", b"\xff", b"\r\n", b"\n", b":", b" ", b"{", b"HTTP/1.1", b"%2f", b"chunked", b"9" * 30]),
)


def mangled(request, changes):
    """Return the bytes of a request with these changes."""
    for where, how, what in changes:
        at = int(where * len(request))
        request = {
            "cut": request[:at],
            "drop": request[:at] + request[at + 3 :],
            "insert": request[:at] + what + request[at:],
            "repeat": request[:at] + request[max(0, at - 20) :],
        }[how]
    return request


async def send_mangled(run_agent_once, count):
    """Send so many changed requests, each on a new connection; return how often each status came."""
    statuses = Counter()

    async def agent(session):
        good = raw_request(session, HELLO)
        for changes in examples(st.lists(CHANGE, min_size=1, max_size=3), count):
            stream, answer = await connected(session), b""
            try:
                await stream.send_all(mangled(good, changes))
                await stream.send_eof()
                while got := await stream.receive_some(65536):
                    answer += got
            except trio.BrokenResourceError:
                pass  # it was closed on us, which is an answer too
            await stream.aclose()
            status = answer.split(b" ")[1][:3].decode() if answer.startswith(b"HTTP/1.1 ") else "none"
            assert status[0] != "5", (mangled(good, changes), answer)
            statuses[status] += 1
        assert (await ask(session)).status_code == 200

    await run_agent_once(agent, patience=3000)
    return statuses


async def test_no_mangled_request_disturbs_the_gateway(run_agent_once):
    statuses = await send_mangled(run_agent_once, 40)

    assert statuses["400"] > 0


@pytest.mark.soak
async def test_more_mangled_requests_disturb_nothing(run_agent_once):
    statuses = await send_mangled(run_agent_once, 3000)
    print(dict(statuses))  # ruff: ignore[print]  the numbers are the point of a soak
    assert statuses.total() >= 1000
