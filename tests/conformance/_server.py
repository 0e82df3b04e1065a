"""The server under test, as the suite sees it: plain HTTP, and a few questions asked often."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import httpx
import trio

PROMPT = [5, 6, 7, 8]


@attrs.frozen(kw_only=True)
class Target:
    """A server's URL, and two sets of weights of one shape that it can load, its own first."""

    url: str
    weights: tuple[Path, Path]
    vocabulary: int


@attrs.define(eq=False)
class Pending:
    """A request on its way, and its answer once it is there."""

    _done: trio.Event = attrs.field(factory=trio.Event)
    _response: httpx.Response | None = None

    @property
    def is_done(self) -> bool:
        """True if the answer has arrived."""
        return self._done.is_set()

    async def answer(self) -> Any:
        """Wait for the answer: its JSON, which must have come with 200."""
        response = await self.response()
        assert response.status_code == 200, response.text
        return response.json()

    async def response(self) -> httpx.Response:
        """Wait for the answer as it came."""
        await self._done.wait()
        assert self._response is not None
        return self._response

    async def run(self, http: httpx.AsyncClient, body: dict[str, Any]) -> None:
        """Send it."""
        self._response = await http.post("/generate", json=body)
        self._done.set()


@attrs.frozen(kw_only=True, eq=False)
class Server:
    """One server, idle and running when a test gets it."""

    http: httpx.AsyncClient
    nursery: trio.Nursery
    target: Target

    async def post(self, path: str, **body: Any) -> httpx.Response:
        """A call with a JSON body."""
        return await self.http.post(path, json=body)

    async def generate(self, **body: Any) -> Any:
        """The JSON answer to a request that must succeed."""
        response = await self.http.post("/generate", json=request(**body))
        assert response.status_code == 200, response.text
        return response.json()

    def send(self, **body: Any) -> Pending:
        """The same without waiting."""
        pending = Pending()
        self.nursery.start_soon(pending.run, self.http, request(**body))
        return pending

    async def send_and_wait(self, count: int = 1, **body: Any) -> list[Pending]:
        """Several of one kind, all being decoded. One by one: a burst would not fit into the queue of an idle server."""
        sent = []
        for _ in range(count):
            sent.append(self.send(**body))
            await self.until(lambda load: load["num_running_reqs"] == len(sent) or any(one.is_done for one in sent))
        done = [(await one.response()).text for one in sent if one.is_done]
        assert not done, f"finished before it was seen running: {done}"
        return sent

    async def load(self) -> dict[str, Any]:
        """The load that the server reports."""
        return (await self.http.get("/v1/loads", params={"include": "core,queues"})).json()["loads"][0]

    async def until(self, condition: Any) -> None:
        """Wait until its load is as wanted."""
        with trio.fail_after(30):
            while not condition(await self.load()):
                await trio.sleep(0.02)

    async def until_idle(self) -> None:
        """Wait until it runs nothing and nothing waits."""
        await self.until(lambda load: load["num_running_reqs"] == load["num_waiting_reqs"] == 0)

    async def is_ready(self) -> bool:
        """True if it is up and not paused."""
        return (await self.http.get("/ready")).status_code == 200

    async def version(self) -> str:
        """The weight version it names."""
        return (await self.http.get("/model_info")).json()["weight_version"]

    async def log_probs(self, prompt: list[int], output: list[int]) -> list[float]:
        """The model's log-probs of these tokens at temperature 1: a prefill, which samples nothing."""
        body = {"logprob_start_len": 0, "max_new_tokens": 0, "temperature": 1.0}
        answer = await self.generate(input_ids=prompt + output, return_logprob=True, **body)
        scored = answer["meta_info"]["input_token_logprobs"]
        # Not the ids: a real SGLang gives 0 for the vocabulary's last one here (the log-prob is that token's all the same).
        assert len(scored) == len(prompt + output)
        return [triple[0] for triple in scored[len(prompt) :]]

    async def stream(self, **body: Any) -> list[dict[str, Any]]:
        """All chunks of a streamed answer."""
        return events(await self.post("/generate", **request(stream=True, **body)))

    @asynccontextmanager
    async def hang_up(self, **body: Any) -> AsyncGenerator[trio.SocketStream]:
        """A request whose client goes away at the end of the block; yields its connection."""
        content = json.dumps(request(**body)).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        async with await trio.open_tcp_stream(self.http.base_url.host, self.http.base_url.port or 80) as connection:
            await connection.send_all(head.encode() + content)
            yield connection


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON of each event of a stream, which must have ended as it should."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *data, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: ") for event in data)
    return [json.loads(event.removeprefix("data: ")) for event in data]


def request(**body: Any) -> dict[str, Any]:
    """A request in SGLang's shape: sampling parameters may be named beside the others."""
    top = {"text", "input_ids", "rid", "stream", "return_logprob", "logprob_start_len", "top_logprobs_num"}
    top |= {"return_prompt_token_ids", "sampling_params"}
    sampling = {"max_new_tokens": 8, "temperature": 1.0, **{key: body[key] for key in body.keys() - top}}
    prompt = {} if {"input_ids", "text"} & body.keys() else {"input_ids": PROMPT}
    return {"sampling_params": sampling, **prompt, **{key: body[key] for key in body.keys() & top}}


def tiles(spans: list[dict[str, Any]], length: int) -> bool:
    """True if these half-open spans cover ``0..length`` without a gap or an overlap."""
    ends = [0, *(span["end"] for span in spans)]
    return [span["start"] for span in spans] == ends[:-1] and ends[-1] == length
