"""LiteLLM: `python litellm_loop.py JOBS`."""

import jobs
import litellm

litellm.suppress_debug_info = True
RESULTS = {"weather": "22 degrees", "save": "saved"}
FIELDS = {"weather": "city", "save": "text"}


async def ask(base_url, key, words, tools, idle=60.0):
    messages = [{"role": "system", "content": jobs.SYSTEM}, {"role": "user", "content": words}]
    offered = [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {FIELDS[name]: {"type": "string"}},
                    "required": [FIELDS[name]],
                },
            },
        }
        for name in tools
    ]
    while True:
        more = {"tools": offered} if offered else {}
        stream = await litellm.acompletion(
            model="openai/policy",
            api_base=base_url,
            api_key=key,
            messages=messages,
            stream=True,
            stream_timeout=idle,
            timeout=60,
            num_retries=0,
            **more,
        )
        chunks = [chunk async for chunk in stream]
        message = litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": RESULTS[call.function.name]}
            for call in message.tool_calls
        ]


async def tool(base_url, key):
    return await ask(base_url, key, jobs.WEATHER, ["weather"])


async def at_once(base_url, key):
    return await jobs.forty(lambda _: ask(base_url, key, jobs.HELLO, []))


async def long(base_url, key):
    return await ask(base_url, key, jobs.LONG, ["save"], idle=jobs.IDLE_S)


jobs.run(tool, at_once, long)
