"""An agent in 30 lines that knows nothing of rollouts: it asks, runs the tool, and sends the result, until there is no call.

``python simple_agent.py TASK``, with the standard library and OPENAI_BASE_URL and OPENAI_API_KEY in the environment.
"""

import json
import os
import subprocess
import sys
import urllib.request

BASH = {
    "name": "bash",
    "description": "Run a command.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}


def ask(messages):
    """Send the conversation, and return the answer."""
    body = {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": BASH}]}
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


def main(task):
    """Work on the task until the model calls no tool."""
    messages = [{"role": "user", "content": task}]
    while True:
        messages.append(ask(messages))
        if not messages[-1].get("tool_calls"):
            return
        for call in messages[-1]["tool_calls"]:
            command = json.loads(call["function"]["arguments"])["command"]
            done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout})


if __name__ == "__main__":
    main(sys.argv[1])
