"""The vendors' own clients: `python vendors.py JOBS chat|responses|messages`."""

import json
import sys

import anthropic
import jobs
import openai

API = sys.argv[2]
NAMES = {"weather": ("city", "22 degrees"), "save": ("text", "saved")}
SCHEMAS = {
    name: {"type": "object", "properties": {field: {"type": "string"}}, "required": [field]}
    for name, (field, _) in NAMES.items()
}


def client_of(base_url, key, *, idle=60.0):
    vendor, kind = (anthropic, anthropic.AsyncAnthropic) if API == "messages" else (openai, openai.AsyncOpenAI)
    return kind(base_url=base_url, api_key=key, max_retries=0, timeout=vendor.Timeout(60, read=idle))


async def chat(client, words, tools):
    messages = [{"role": role, "content": text} for role, text in (("system", jobs.SYSTEM), ("user", words))]
    offered = [
        {"type": "function", "function": {"name": name, "description": name, "parameters": SCHEMAS[name]}}
        for name in tools
    ]
    while True:
        ask = {"model": "policy", "messages": messages, **({"tools": offered} if offered else {})}
        async with client.chat.completions.stream(**ask) as stream:
            async for _ in stream:
                pass
            message = (await stream.get_final_completion()).choices[0].message
        if not message.tool_calls:
            return message.content
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
        messages.append({"role": "assistant", "content": message.content, "tool_calls": calls})
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": NAMES[call["function"]["name"]][1]}
            for call in calls
        ]


async def responses(client, words, tools):
    items = [{"role": "user", "content": words}]
    offered = [
        {"type": "function", "strict": False, "name": name, "description": name, "parameters": SCHEMAS[name]}
        for name in tools
    ]
    while True:
        ask = {"model": "policy", "instructions": jobs.SYSTEM, "input": items, "store": False, "tools": offered}
        async with client.responses.stream(**ask, include=["reasoning.encrypted_content"]) as stream:
            async for _ in stream:
                pass
            answer = await stream.get_final_response()
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        for item in answer.output:
            kept = json.loads(item.model_dump_json(exclude_none=True, exclude={"parsed_arguments"}))
            for part in kept.get("content") or ():
                part.pop("parsed", None)
            items.append(kept)
        items += [
            {"type": "function_call_output", "call_id": call.call_id, "output": NAMES[call.name][1]} for call in calls
        ]


async def messages(client, words, tools):
    history = [{"role": "user", "content": words}]
    offered = [{"name": name, "description": name, "input_schema": SCHEMAS[name]} for name in tools]
    while True:
        ask = {"model": "policy", "max_tokens": 4000, "system": jobs.SYSTEM, "messages": history, "tools": offered}
        async with client.messages.stream(**ask) as stream:
            answer = await stream.get_final_message()
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in answer.content if block.type == "text")
        kept = [
            json.loads(block.model_dump_json(exclude_none=True, exclude={"parsed_output"})) for block in answer.content
        ]
        history.append({"role": "assistant", "content": kept})
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": NAMES[call.name][1]} for call in calls]
        history.append({"role": "user", "content": results})


ASK = {"chat": chat, "responses": responses, "messages": messages}[API]


async def tool(base_url, key):
    async with client_of(base_url, key) as client:
        return await ASK(client, jobs.WEATHER, ["weather"])


async def at_once(base_url, key):
    async with client_of(base_url, key) as client:
        return await jobs.forty(lambda _: ASK(client, jobs.HELLO, []))


async def long(base_url, key):
    async with client_of(base_url, key, idle=jobs.IDLE_S) as client:
        return await ASK(client, jobs.LONG, ["save"])


jobs.run(tool, at_once, long)
