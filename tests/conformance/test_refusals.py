"""Requests that a server refuses, and the shapes of its refusals."""

import pytest
import trio

from ._server import PROMPT, Server, events, request

# A value that cannot be served: ``{"error": {"message": ...}}``
INVALID = {
    "no prompt": {"sampling_params": {"max_new_tokens": 1}},
    "empty prompt": {"input_ids": [], "sampling_params": {"max_new_tokens": 1}},
    "negative temperature": {"input_ids": PROMPT, "sampling_params": {"temperature": -1}},
    "negative length": {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": -1}},
    "top_p of zero": {"input_ids": PROMPT, "sampling_params": {"top_p": 0}},
    "top_k of zero": {"input_ids": PROMPT, "sampling_params": {"top_k": 0}},
    "too many stops": {"input_ids": PROMPT, "sampling_params": {"stop": ["x"] * 33}},
    "a long stop_regex": {"input_ids": PROMPT, "sampling_params": {"stop_regex": "a" * 257}},
    "a seed beyond 64 bits": {"input_ids": PROMPT, "sampling_params": {"sampling_seed": 2**63}},
    "a bias beyond the vocabulary": {"input_ids": PROMPT, "sampling_params": {"logit_bias": {"9999999": 1.0}}},
    "longer than the context": {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 10_000_000}},
}
# Another form than the contract's: ``{"error": "..."}``
SCHEMA = {
    "unknown sampling key": {"input_ids": PROMPT, "sampling_params": {"foo": 1}},
    "wrong type of a sampling key": {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": "x"}},
    "null among the stops": {"input_ids": PROMPT, "sampling_params": {"stop": ["a", None]}},
    "null among the stop tokens": {"input_ids": PROMPT, "sampling_params": {"stop_token_ids": [None]}},
    "half a token": {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2.5}},
    "half a top_k": {"input_ids": PROMPT, "sampling_params": {"top_k": 1.5}},
}
# No request at all: ``{"object": "error", ...}``
MALFORMED = {
    "no JSON": b"{bad",
    "not an object": b"[1]",
    "ids that are no list": b'{"input_ids": "abc"}',
    "a flag that is none": b'{"input_ids": [5], "stream": "maybe"}',
}


@pytest.mark.parametrize("body", INVALID.values(), ids=INVALID)
async def test_a_value_that_cannot_be_served(server: Server, body: dict[str, object]):
    response = await server.post("/generate", **body)

    assert response.status_code == 400
    assert list(response.json()) == ["error"]
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("body", SCHEMA.values(), ids=SCHEMA)
async def test_another_form_than_the_contracts(server: Server, body: dict[str, object]):
    response = await server.post("/generate", **body)

    assert response.status_code == 400
    assert list(response.json()) == ["error"]
    assert isinstance(response.json()["error"], str)


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED)
async def test_no_request_at_all(server: Server, content: bytes):
    response = await server.http.post("/generate", content=content, headers={"content-type": "application/json"})

    assert response.status_code == 400
    assert response.json().keys() == {"object", "message", "type", "param", "code"}
    assert (response.json()["object"], response.json()["code"]) == ("error", 400)


async def test_a_prompt_longer_than_the_context(server: Server):
    longest = (await server.http.get("/server_info")).json()["max_req_input_len"]
    response = await server.post("/generate", input_ids=[7] * (longest + 100), sampling_params={"max_new_tokens": 1})

    assert response.status_code == 400
    assert "context length" in response.json()["error"]["message"]


async def test_an_invalid_value_in_a_stream_is_a_chunk_with_200(server: Server):
    (event,) = events(await server.post("/generate", stream=True, **INVALID["negative temperature"]))

    assert event["error"]["message"]
    assert {**event["error"], "message": ""} == {
        "message": "",
        "type": "invalid_request_error",
        "code": 400,
        "retryable": False,
    }


async def test_another_form_in_a_stream_is_a_plain_400(server: Server):
    response = await server.post("/generate", stream=True, **SCHEMA["unknown sampling key"])

    assert response.status_code == 400
    assert isinstance(response.json()["error"], str)


async def test_a_full_queue_is_a_503_without_advice(server: Server):
    """Eight run and four wait; all the others are refused at once, and none of the admitted is harmed."""
    burst = [server.send(max_new_tokens=30, ignore_eos=True) for _ in range(24)]
    responses = [await pending.response() for pending in burst]
    refused = [response for response in responses if response.status_code != 200]

    assert 4 <= len(responses) - len(refused) <= 12 + 1
    for response in refused:
        assert response.status_code == 503
        assert "retry-after" not in response.headers
        assert response.json() == {
            "object": "error",
            "message": "The request queue is full.",
            "type": "503",
            "param": None,
            "code": 503,
        }


async def test_a_full_queue_in_a_stream_is_an_aborted_chunk(server: Server):
    answers: list[list[dict[str, object]]] = []

    async def stream() -> None:
        answers.append(
            events(await server.post("/generate", **request(stream=True, max_new_tokens=30, ignore_eos=True)))
        )

    async with trio.open_nursery() as nursery:
        for _ in range(24):
            nursery.start_soon(stream)
    refused = [chunks for chunks in answers if chunks[-1]["meta_info"]["finish_reason"]["type"] == "abort"]

    assert refused
    for (chunk,) in refused:
        assert chunk["output_ids"] == []
        assert chunk["meta_info"]["finish_reason"]["status_code"] == 503
        assert chunk["meta_info"]["finish_reason"]["message"] == "The request queue is full."


async def test_a_removed_route_is_a_404(server: Server):
    assert (await server.http.get("/get_load")).status_code == 404
