"""An agent with a vendor's own client, in any protocol, whole or streamed; it keeps its history as the client gives it."""

import itertools
import json
from contextlib import asynccontextmanager

import anthropic
import attrs
import openai
from openai.types.chat import ChatCompletion

APIS = ["chat", "responses", "messages"]
WAYS = [(api, stream) for api in APIS for stream in (False, True)]
IDS = [f"{api}-{'streamed' if stream else 'whole'}" for api, stream in WAYS]


@attrs.frozen
class Said:
    """One answer, the same in every protocol."""

    id: str
    text: str
    thoughts: str
    calls: list
    raw: object


@attrs.frozen
class Call:
    id: str
    name: str
    arguments: object
    """As the protocol has it: decoded from JSON where it is a text."""


@attrs.define
class Talk:
    """A conversation through one client. ``options`` go into every request as they are."""

    api: str
    stream: bool
    client: object
    options: dict = attrs.field(factory=dict)
    system: list = attrs.field(factory=list)
    tools: list = attrs.field(factory=list)
    history: list = attrs.field(factory=list)
    leading: list = attrs.field(factory=list)
    """Messages in front of the history, anew for every request."""

    def user(self, content):
        self.history.append({"role": "user", "content": content})
        return self

    def result(self, call, content="22 degrees"):
        """Append a tool's result."""
        if self.api == "chat":
            self.history.append({"role": "tool", "tool_call_id": call.id, "content": content})
        elif self.api == "responses":
            self.history.append({"type": "function_call_output", "call_id": call.id, "output": content})
        else:
            block = {"type": "tool_result", "tool_use_id": call.id, "content": content}
            self.history.append({"role": "user", "content": [block]})
        return self

    def body(self):
        """Return the request as it is sent now."""
        body = {"model": "policy", **self.options}
        if self.api == "chat":
            first = [{"role": "system", "content": text} for text in self.system]
            body["messages"] = [*first, *self.leading, *self.history]
            tools = [{"type": "function", "function": tool} for tool in self.tools]
        elif self.api == "responses":
            if self.system:
                body["instructions"] = self.system[0]
            first = [{"role": "developer", "content": text} for text in self.system[1:]]
            body["input"] = [*first, *self.leading, *self.history]
            tools = [{"type": "function", "strict": False, **tool} for tool in self.tools]
        else:
            body = {"max_tokens": 400, **body, "messages": [*self.leading, *self.history]}
            if self.system:
                body["system"] = [{"type": "text", "text": text} for text in self.system]
            names = {"parameters": "input_schema"}
            tools = [{names.get(key, key): value for key, value in tool.items()} for tool in self.tools]
        if tools and "tools" not in body:
            body["tools"] = tools
        return body

    async def ask(self):
        """Send the conversation, append the answer to it, and return the answer."""
        return await {"chat": self._chat, "responses": self._responses, "messages": self._messages}[self.api]()

    async def _chat(self):
        body = self.body()
        if self.stream and any(tool["type"] == "custom" for tool in body.get("tools", ())):
            raw = await self._put_together(body)
        elif self.stream:
            async with self.client.chat.completions.stream(**body) as stream:
                async for _ in stream:
                    pass
                raw = await stream.get_final_completion()
        else:
            raw = await self.client.chat.completions.create(**body)
        message = raw.choices[0].message
        calls = [
            Call(call.id, call.function.name, json.loads(call.function.arguments))
            if call.type == "function"
            else Call(call.id, call.custom.name, call.custom.input)
            for call in message.tool_calls or ()
        ]
        kept = {"role": "assistant", "content": message.content}
        if message.tool_calls:
            kept["tool_calls"] = [
                json.loads(call.model_dump_json(exclude={"index": True, "function": {"parsed_arguments"}}))
                for call in message.tool_calls
            ]
        self.history.append(kept)
        thoughts = getattr(message, "reasoning_content", None) or ""
        return Said(raw.id, message.content or "", thoughts, calls, raw)

    async def _put_together(self, body):
        """Return a streamed answer with custom tools, which the client's helper does not know."""
        message, head = {"role": "assistant", "content": "", "tool_calls": []}, {}
        async for chunk in await self.client.chat.completions.create(**body, stream=True):
            head = chunk.model_dump(exclude={"choices", "usage"})
            for choice in chunk.choices:
                message["content"] += choice.delta.content or ""
                message["tool_calls"] += [call.model_dump(exclude={"index"}) for call in choice.delta.tool_calls or ()]
                end = choice.finish_reason
        message["tool_calls"] = message["tool_calls"] or None
        choice = {"index": 0, "finish_reason": end, "message": message}
        return ChatCompletion.model_validate({**head, "object": "chat.completion", "choices": [choice]})

    async def _responses(self):
        body = self.body()
        if self.stream:
            async with self.client.responses.stream(**body) as stream:
                async for _ in stream:
                    pass
                raw = await stream.get_final_response()
        else:
            raw = await self.client.responses.create(**body)
        items = [json.loads(item.model_dump_json(exclude_none=True)) for item in raw.output]
        for item in items:
            item.pop("parsed_arguments", None)
            for part in item.get("content") or ():
                part.pop("parsed", None)
        self.history += items
        calls = [
            Call(item["call_id"], item["name"], json.loads(item["arguments"]))
            if item["type"] == "function_call"
            else Call(item["call_id"], item["name"], item["input"])
            for item in items
            if item["type"].endswith("_call")
        ]
        thoughts = "".join(
            part["text"] for item in items if item["type"] == "reasoning" for part in item.get("content") or ()
        )
        return Said(raw.id, raw.output_text, thoughts, calls, raw)

    async def _messages(self):
        body = self.body()
        if self.stream:
            async with self.client.messages.stream(**body) as stream:
                raw = await stream.get_final_message()
        else:
            raw = await self.client.messages.create(**body)
        blocks = [json.loads(block.model_dump_json(exclude_none=True)) for block in raw.content]
        for block in blocks:
            block.pop("parsed_output", None)
        self.history.append({"role": "assistant", "content": blocks})
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        thoughts = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
        calls = [Call(block["id"], block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
        return Said(raw.id, text, thoughts, calls, raw)


@asynccontextmanager
async def talking(session, way, **more):
    """A conversation over its own client, which tries nothing twice."""
    api, stream = way
    kind = anthropic.AsyncAnthropic if api == "messages" else openai.AsyncOpenAI
    async with kind(base_url=session.base_url, api_key=session.api_key, max_retries=0, timeout=60) as client:
        yield Talk(api, stream, client, **more)


async def tool_loop(talk, *, turns=4, before=lambda turn: None):
    """Ask for the weather and answer each call, for so many turns; return the answers."""
    answers = []
    for turn in range(turns):
        before(turn)
        answers.append(await talk.ask())
        for call in answers[-1].calls:
            talk.result(call, f"22 degrees at {turn}")
        if not answers[-1].calls:
            talk.user("and the weather now?")
    return answers


def nonces():
    """Return a source of checksums, another at each call."""
    numbers = itertools.count(0xA1B2C)
    return lambda: f"{next(numbers):05x}"
