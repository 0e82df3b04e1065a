"""Real clients and agents against the gateway, and what they are trained on: the table of docs/agents.md.

Each client does five jobs in one program, each in its own session: a conversation with a tool under a chat template that takes
several system messages, one, and one that shows thoughts; forty conversations at once; and a tool call that takes longer to
sample than the client bears silence. One conversation is one training row in all of them.
"""

import json
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import attrs
import pytest
import trio
from openai import AsyncOpenAI

from trio_rollout import (
    Deadlines,
    EngineSettings,
    IterableSource,
    Prompt,
    Retry,
    SamplingParams,
    open_rollout_engine,
    open_sglang_servers,
)
from trio_rollout.errors import EndOfData
from trio_rollout.gateway import GatewaySettings, open_gateway, run_agent
from trio_rollout.tiny import TinySettings, open_tiny_server
from trio_rollout.tools import LocalSandboxes, open_rollout_tools

from .templates import TEMPLATES, folder_with

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent / "clients"
VENV = ROOT / ".venv-agents"
MODULES = VENV / "npm" / "node_modules"

SCRIPT = """
[[rules]]
contains = '"name": "final_answer"'
last_contains = "Observation"
answer = "THOUGHT"
calls = [{ name = "final_answer", arguments = { answer = "All is done." } }]

[[rules]]
last_contains = "<tool_response>"
answer = "THOUGHTAll is done."

[[rules]]
contains = "the weather in Paris, please"
answer = "THOUGHTI look."
calls = [{ name = "weather", arguments = { city = "Paris" } }]

[[rules]]
contains = "write the long file"
answer = "I write."
calls = [{ name = "save", arguments = { text = "LONG" } }]

[[rules]]
contains = ['"name": "final_answer"', "say hello"]
calls = [{ name = "final_answer", arguments = { answer = "Hello!" } }]

[[rules]]
contains = "say hello"
answer = "Hello!"
"""
DONE = "All is done."


@attrs.frozen
class Job:
    """One job of a client: the kind of its conversation, the chat template, and what must come out of it."""

    name: str
    kind: str
    template: str = "several"
    thinks: bool = False
    slow: bool = False
    words: str = DONE
    rows: int = 1
    turns: int = 2


JOBS = (
    Job("several system messages", "tool"),
    Job("one system message", "tool", template="one system"),
    Job("thinking", "tool", template="thinking", thinks=True),
    Job("40 at once", "at once", words="40 x Hello!", rows=40, turns=40),
    Job("a long call", "long", slow=True),
)

PYTHON = VENV / "bin" / "python"
NODE = "node"
CLIENTS = {
    "openai, Chat Completions": (PYTHON, "vendors.py", "chat"),
    "openai, Responses": (PYTHON, "vendors.py", "responses"),
    "anthropic": (PYTHON, "vendors.py", "messages"),
    "openai-agents, Chat Completions": (PYTHON, "openai_agents.py", "chat"),
    "openai-agents, Responses": (PYTHON, "openai_agents.py", "responses"),
    "pydantic-ai, Chat Completions": (PYTHON, "pydantic_agents.py", "chat"),
    "pydantic-ai, Responses": (PYTHON, "pydantic_agents.py", "responses"),
    "pydantic-ai, Messages": (PYTHON, "pydantic_agents.py", "messages"),
    "LangChain, Chat Completions": (PYTHON, "langchain_agents.py", "chat"),
    "LangChain, Responses": (PYTHON, "langchain_agents.py", "responses"),
    "LangChain, Messages": (PYTHON, "langchain_agents.py", "messages"),
    "LiteLLM": (PYTHON, "litellm_loop.py"),
    "smolagents": (PYTHON, "smol.py"),
    "Vercel AI SDK, Chat Completions": (NODE, "vercel.mjs", "chat"),
    "Vercel AI SDK, Responses": (NODE, "vercel.mjs", "responses"),
    "Vercel AI SDK, Messages": (NODE, "vercel.mjs", "messages"),
}


DOCS = ROOT / "docs" / "agents.md"
BEGIN, END = "<!-- written by make test-agents -->\n", "<!-- end -->\n"


async def one(trajectory):
    return 1.0


def said(job):
    """Return what the model says to the clients of a library."""
    words = SCRIPT.replace("THOUGHT", "<think>I have to think.</think>" if job.thinks else "")
    return words.replace("LONG", "so many words " * 100)


@pytest.fixture(scope="module")
def table():
    """The rows of one conversation, by client and job; written to the docs when every client has done every job."""
    found = {}
    yield found
    if set(found) == CELLS:
        text = DOCS.read_text(encoding="utf-8")
        head, _, rest = text.partition(BEGIN)
        DOCS.write_text(f"{head}{BEGIN}{written(found)}{END}{rest.partition(END)[2]}", encoding="utf-8")


def written(found):
    """Return the table as Markdown."""
    names = [job.name for job in (*JOBS, MCP_JOB)]
    lines = [["client", *names], ["---"] * (len(names) + 1)]
    for client in (*CLIENTS, *AGENTS):
        rows = [found.get((client, name)) for name in names]
        lines.append([client, *("" if row is None else "yes" if row == 1 else f"{row} rows" for row in rows)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def test_the_table_in_the_docs_names_every_client_and_job():
    """The table itself is written by a run of all of them (``make test-agents``)."""
    table = DOCS.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    head, rows = shown[0][1:], shown[2:]
    assert {(row[0], name) for row in rows for name, cell in zip(head, row[1:], strict=True) if cell} == CELLS


@asynccontextmanager
async def open_session(job, folder, said):
    """A session of one rollout in a new engine; its trajectory is in the list that is yielded, after the block."""
    script = folder / "script.toml"
    script.write_text(said, encoding="utf-8")
    tiny = TinySettings(
        script=script,
        step_delay=0.02 if job.slow else 0.0,
        reasoning_parser="qwen3" if job.thinks else None,
    )
    opened, finished, rows = trio.Event(), trio.Event(), []
    found = []

    async def generate(prompt, rollout):
        async with rollout.session(sampling=SamplingParams(max_new_tokens=4000)) as session:
            found.append(session)
            opened.set()
            await finished.wait()
        return session.trajectory()

    async with (
        open_tiny_server(tiny) as server,
        open_sglang_servers([server.url]) as servers,
        open_gateway(
            servers,
            tokenizer=folder_with(TEMPLATES[job.template], folder / "tokenizer"),
            settings=GatewaySettings(heartbeat=0.5),
        ) as gateway,
        open_rollout_engine(
            IterableSource([Prompt(id="0", text="task")]),
            generate,
            servers=servers,
            reward=one,
            gateway=gateway,
            settings=EngineSettings(
                samples_per_prompt=1, retry=Retry(max_attempts=1), deadlines=Deadlines(abort=2.0, drain=8.0)
            ),
        ) as engine,
    ):
        await opened.wait()
        try:
            yield found[0], rows
        finally:
            finished.set()
        with suppress(EndOfData):  # a client that got no answer is reported with its words
            batch = await engine.next_batch(1)
            rows.extend(batch.groups[0].trajectories)


TASK = "Say what the weather is."
CALL = """
[[rules]]
last_contains = "<tool_response>"
answer = "THOUGHTAll is done."
FINISH

[[rules]]
contains = "Say what the weather is."
answer = "THOUGHTI look."
calls = [{ name = "TOOL", arguments = { ARGUMENTS } }]

[[rules]]
contains = "say hello"
answer = "Hello!"
"""
CODEX = """
model = "policy"
model_provider = "session"
[model_providers.session]
name = "session"
base_url = "{base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
stream_idle_timeout_ms = 2000
stream_max_retries = 0
"""
# Without these, both look for an MCP server's tools only when the model asks for some.
CODEX_MCP = """
[features]
tool_search = false
[mcp_servers.sky]
command = "{python}"
args = ["{sky}"]
required = true
"""
CLAUDE_MCP = {"MCP_CONNECTION_NONBLOCKING": "0", "ENABLE_TOOL_SEARCH": "false"}
MCP = '{{"mcpServers": {{"sky": {{"command": "{python}", "args": ["{sky}"]}}}}}}'


@attrs.frozen
class Agent:
    """A command-line agent: its command, how it calls a shell, its environment and files; ``mcp_files`` if it has an MCP server."""

    program: Path
    arguments: tuple[str, ...]
    shell: tuple[str, str]
    finish: str = ""
    env: dict = attrs.field(factory=dict)
    files: dict = attrs.field(factory=dict)
    mcp_files: dict = attrs.field(factory=dict)


def claude(version):
    """Claude Code of this version."""
    return Agent(
        MODULES / f"claude-code-{version.replace('.', '-')}" / "bin" / "claude.exe",
        ("-p", TASK, "--model", "policy", "--allowedTools", "Bash,mcp__sky__weather"),
        shell=("Bash", 'description = "Look", command'),
        env={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", **CLAUDE_MCP},
        mcp_files={".mcp.json": MCP, ".claude/settings.json": '{{"enableAllProjectMcpServers": true}}'},
    )


AGENTS = {
    "Codex 0.171.0": Agent(
        MODULES / ".bin" / "codex",
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK),
        shell=("exec_command", "cmd"),
        files={".codex/config.toml": CODEX},
        mcp_files={".codex/config.toml": CODEX + CODEX_MCP},
    ),
    "Claude Code 2.1.177": claude("2.1.177"),
    "Claude Code 2.1.332": claude("2.1.332"),
    "mini-swe-agent": Agent(
        VENV / "bin" / "mini",
        ("-m", "openai/policy", "-t", TASK, "-y", "--exit-immediately"),
        shell=("bash", "command"),
        finish='calls = [{ name = "bash", arguments = { command = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" } }]',
        env={
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    ),
}


def script_of(agent, job):
    """Return what the model says to this agent in this job."""
    if job.kind == "mcp":
        tool, arguments = "mcp__sky__weather", 'city = "Paris"'
    else:
        text = "so many words " * 100 if job.kind == "long" else "22 degrees"
        tool, arguments = agent.shell[0], f'{agent.shell[1]} = "echo {text}"'
    said = CALL.replace("TOOL", tool).replace("ARGUMENTS", arguments).replace("FINISH", agent.finish)
    return said.replace("THOUGHT", "<think>I have to think.</think>" if job.thinks else "")


async def run_in_sandbox(agent, session, folder, *, mcp=False):
    """Run an agent in a sandbox; return how it ended."""
    sandboxes = LocalSandboxes(folder / "sandbox", env={"PATH": f"{agent.program.parent}:/usr/local/bin:/usr/bin:/bin"})
    async with open_rollout_tools() as tools, tools.open_sandbox(sandboxes) as sandbox:
        for name, content in {**agent.files, **(agent.mcp_files if mcp else {})}.items():
            words = {"base_url": session.base_url, "python": PYTHON, "sky": HERE / "sky.py"}
            await sandbox.write_file(name, content.format(**words))
        return await run_agent([str(agent.program), *agent.arguments], session, sandbox, env=agent.env, seconds=200)


async def say_hello(session, answers):
    """Have forty answers at once."""
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:

        async def ask():
            ask = {"model": "policy", "messages": [{"role": "user", "content": "say hello"}]}
            answers.append((await client.chat.completions.create(**ask)).choices[0].message.content)

        async with trio.open_nursery() as nursery:
            for _ in range(40):
                nursery.start_soon(ask)


MCP_JOB = Job("an MCP tool", "mcp")
AGENT_JOBS = [(name, job) for name, agent in AGENTS.items() for job in (*JOBS, *([MCP_JOB] if agent.mcp_files else []))]


CELLS = {(client, job.name) for client in CLIENTS for job in JOBS} | {(name, job.name) for name, job in AGENT_JOBS}


@pytest.mark.agents
@pytest.mark.parametrize(("name", "job"), AGENT_JOBS, ids=lambda value: getattr(value, "name", value))
async def test_a_command_line_agent_does_its_jobs(name, job, tmp_path, table):
    agent = AGENTS[name]
    if not agent.program.exists():
        pytest.skip(f"{name} is not installed")
    crowd = []
    async with open_session(job, tmp_path, script_of(agent, job)) as (session, rows), trio.open_nursery() as nursery:
        if job.kind == "at once":
            nursery.start_soon(say_hello, session, crowd)
        ended = await run_in_sandbox(agent, session, tmp_path, mcp=job.kind == "mcp")
    assert ended.exit_code == 0, ended.model_text()
    assert agent.finish or DONE in ended.model_text()
    (trajectory,) = rows
    assert crowd == ["Hello!"] * (job.rows - 1 and 40)
    assert (len(trajectory.segments), trajectory.turns) == (1 + len(crowd), 2 + len(crowd)), ended.model_text()
    table[name, job.name] = 1


def command_of(client, folder):
    """Return the command of a client; Node looks for its packages beside the program."""
    program, script, *more = CLIENTS[client]
    if program is not NODE:
        return [program, HERE / script, *more]
    if not (folder / script).exists():
        (folder / "node_modules").symlink_to(MODULES)
        (folder / script).write_text((HERE / script).read_text(encoding="utf-8"), encoding="utf-8")
    return [program, folder / script, *more]


@pytest.mark.agents
@pytest.mark.parametrize("client", CLIENTS)
async def test_a_client_does_its_jobs(client, tmp_path, table):
    program, *more = command_of(client, tmp_path)
    if not (MODULES / "ai" if program is NODE else program).exists():
        pytest.skip(f"{client} is not installed")
    async with AsyncExitStack() as sessions:
        listed, rows = [], {}
        for number, job in enumerate(JOBS):
            folder = tmp_path / str(number)
            folder.mkdir()
            session, rows[job] = await sessions.enter_async_context(open_session(job, folder, said(job)))
            listed.append({"name": job.name, "kind": job.kind, "base_url": session.base_url, "key": session.api_key})
        with trio.fail_after(300):
            done = await trio.run_process(
                [program, more[0], json.dumps(listed), *more[1:]], capture_stdout=True, capture_stderr=True, check=False
            )
    assert done.returncode == 0, done.stderr.decode()
    words = json.loads(done.stdout.decode().splitlines()[-1])
    assert words == {job.name: job.words for job in JOBS}, done.stderr.decode()[-4000:]
    for job in JOBS:
        (trajectory,) = rows[job]
        # Its tools' results are words of the user, and such a template leaves out the thoughts before these.
        more = client == "smolagents" and job.thinks
        assert (job.name, len(trajectory.segments), trajectory.turns) == (job.name, job.rows + more, job.turns)
        table[client, job.name] = len(trajectory.segments) // job.turns if job.rows > 1 else len(trajectory.segments)
