"""What schemathesis makes of the gateway's own schema, good and bad, over HTTP: an answer in the protocol's shape, no 5xx."""

import json
from collections import Counter

import httpx
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from trio_rollout.sessions import _anthropic, _openai_chat, _openai_responses

BODIES = {
    "/chat/completions": _openai_chat._Body,
    "/messages": _anthropic._Body,
    "/messages/count_tokens": _anthropic._Body,
    "/responses": _openai_responses._Body,
}


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


def bodies(path, mode, count):
    """So many bodies that follow the schema, or that break it."""
    found = []

    @settings(
        max_examples=count, database=None, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(case=operation(path).as_strategy(generation_mode=mode))
    def collect(case):
        body = case.body
        found.append(body if isinstance(body, bytes) else json.dumps(body).encode(errors="surrogatepass"))

    collect()
    return found


async def drive(run_agent_once, path, mode, count):
    statuses = Counter()

    async def agent(session):
        key = {"authorization": f"Bearer {session.api_key}", "content-type": "application/json"}
        async with httpx.AsyncClient(timeout=30, headers=key) as client:
            for body in bodies(path, mode, count):
                answer = await client.post(f"{session.base_url}{path}", content=body)
                statuses[answer.status_code] += 1
                assert answer.status_code in {200, 400}, (body, answer.text)
                if answer.status_code == 400:
                    assert answer.json()["error"]["message"], body
            hello = {"model": "policy", "messages": [{"role": "user", "content": "say hello"}]}
            assert (await client.post(f"{session.base_url}/chat/completions", json=hello)).status_code == 200

    # A short context: a body that asks for a billion tokens is answered with what fits.
    await run_agent_once(agent, gateway={"context_length": 300}, patience=600)
    return statuses


@pytest.mark.parametrize("path", BODIES)
async def test_no_body_hurts(run_agent_once, path):
    statuses = await drive(run_agent_once, path, GenerationMode.NEGATIVE, 8)

    assert statuses[400] > 0


@pytest.mark.soak
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("path", BODIES)
async def test_more_bodies_hurt_nobody(run_agent_once, path, mode):
    assert (await drive(run_agent_once, path, mode, 200)).total() >= 50
