"""The agents guide's code runs as it stands, with a stand-in for its agent."""

import json
import re
import sys
from pathlib import Path

from trio_rollout.tiny import DATA, TinySettings, open_tiny_process

GUIDE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")

# A command-line agent like any: it knows OpenAI's variables and nothing of all this.
AGENT = f"""#!{sys.executable}
import json, os, sys, urllib.request
assert sys.argv[1:5] == ["-m", "openai/policy", "-t", "Fix the failing test."], sys.argv
said = [{{"role": "user", "content": sys.argv[4]}}]
for _ in range(2):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({{"model": "policy", "messages": said, "max_tokens": 8}}).encode(),
        {{"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}},
    )
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    said += [answer, {{"role": "user", "content": "go on"}}]
open("fixed", "w").close()
"""


async def test_the_example_of_the_guide_runs(tmp_path, capsys):
    (block,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    mini = tmp_path / "mini"
    mini.write_text(AGENT, encoding="utf-8")
    mini.chmod(0o700)
    async with open_tiny_process(TinySettings()) as server:
        code = (
            block
            .replace("trio.run(main)", "")
            .replace("http://127.0.0.1:30000", server.url)
            .replace("path/to/model", str(DATA))
            .replace('["mini"', f'["{mini}"')
            .replace("python -m pytest -q", "test -e fixed")
        )
        names = {}
        exec(compile(code, "docs/agents.md", "exec"), names)
        await names["main"]()

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    for line in lines:
        reward, trained = line.split(" ", 1)
        assert reward == "1.0"
        assert all(0 < tokens <= 16 for tokens in json.loads(trained))
