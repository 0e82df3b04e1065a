"""Train agents as they are: `python examples/unmodified_agent.py --agent mini --program mini`.

Each rollout opens a session and a sandbox, and runs a command-line agent in it that knows nothing of all this: mini-swe-agent
(PyPI), Codex or Claude Code (npm). The agent talks to the session; the rows that come out hold just the tokens that were
sampled. The "model" is the tiny server, made to say what a script says, so that the example needs no GPU and no network.
"""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import click
import trio
from rich.console import Console
from rich.text import Text

from trio_rollout import (
    Deadlines,
    EngineSettings,
    Group,
    IterableSource,
    Prompt,
    SamplingParams,
    Status,
    Trajectory,
    open_rollout_engine,
    open_sglang_servers,
)
from trio_rollout.abc import Rollout
from trio_rollout.gateway import open_gateway, run_agent
from trio_rollout.tiny import DATA, TinySettings, TinyTokenizer, open_tiny_process
from trio_rollout.tools import LocalSandboxes, Sandbox, open_rollout_tools

TASK = "Write the word rollout into the file answer.txt."
WRITE = "echo rollout > answer.txt"

# What the model says, by the tool that the agent offers: the first rule that fits the conversation so far.
SCRIPT = f"""
[[rules]]
contains = ['"name": "bash"', "<tool_response>"]
answer = "The file is written."
calls = [{{ name = "bash", arguments = {{ command = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" }} }}]

[[rules]]
contains = '"name": "bash"'
answer = "I write the file."
calls = [{{ name = "bash", arguments = {{ command = "{WRITE}" }} }}]

[[rules]]
contains = "<tool_response>"
answer = "The file is written."

[[rules]]
contains = '"name": "exec_command"'
answer = "I write the file."
calls = [{{ name = "exec_command", arguments = {{ cmd = "{WRITE}" }} }}]

[[rules]]
contains = '"name": "Bash"'
answer = "I write the file."
calls = [{{ name = "Bash", arguments = {{ command = "{WRITE}", description = "Write the file" }} }}]

[[rules]]
answer = "A file with one word."
"""


@attrs.frozen
class Agent:
    """The command that starts an agent, and the files and variables that it needs."""

    arguments: tuple[str, ...]
    env: Mapping[str, str] = attrs.field(factory=dict)
    files: Mapping[str, str] = attrs.field(factory=dict)


CODEX = """
model = "policy"
model_provider = "session"
[model_providers.session]
name = "session"
base_url = "{base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""

AGENTS = {
    "mini": Agent(
        ("-m", "openai/policy", "-t", TASK, "-y", "--exit-immediately"),
        env={
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    ),
    "codex": Agent(
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK),
        files={".codex/config.toml": CODEX},
    ),
    "claude": Agent(
        ("-p", TASK, "--model", "policy", "--allowedTools", "Bash"),
        env={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
    ),
}


async def wrote_the_word(sandbox: Sandbox) -> float:
    """1 if the agent did what it was asked to."""
    found = await sandbox.exec(["cat", "answer.txt"])
    return float(found.stdout.strip() == b"rollout")


@attrs.frozen
class UnmodifiedAgent:
    """A generate function: one run of the agent."""

    program: str
    agent: Agent
    sandboxes: LocalSandboxes
    show: bool
    sampling: SamplingParams = SamplingParams(max_new_tokens=512)  # noqa: RUF009  frozen

    async def __call__(self, prompt: Prompt, rollout: Rollout, /) -> Trajectory:
        """The agent is gone before its session closes, and the sandbox when both are."""
        del prompt  # the task stands in the agent's arguments
        async with (
            open_rollout_tools(deadline=rollout.deadline) as tools,
            tools.open_sandbox(self.sandboxes) as sandbox,
        ):
            async with rollout.session() as session:
                for path, content in self.agent.files.items():
                    await sandbox.write_file(path, content.format(base_url=session.base_url))
                command = [self.program, *self.agent.arguments]
                ended = await run_agent(command, session, sandbox, env=self.agent.env, seconds=300)
            if self.show:
                Console().print(Text(ended.model_text()))
            status = Status.TRUNCATED if ended.timed_out else Status.COMPLETED
            trajectory = session.trajectory(status=status)
            return attrs.evolve(trajectory, metadata={"success": await wrote_the_word(sandbox)})


async def success(trajectory: Trajectory) -> float:  # noqa: ASYNC124  a reward is async, whether it waits or not
    """Return the output of the sandbox before its end."""
    await trio.lowlevel.checkpoint()
    return float(str(trajectory.metadata["success"]))


async def run(agent: str, program: str, *, groups: int, samples: int, show: bool) -> list[Group]:
    """Run the agent for every prompt."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.toml"
        await trio.Path(script).write_text(SCRIPT, encoding="utf-8")
        # Where the program and what it needs lie: a sandbox knows nothing of this process's environment.
        path = f"{Path(program).parent}:{Path(shutil.which('node') or '/usr/bin/node').parent}:/usr/local/bin:/usr/bin:/bin"
        sandboxes = LocalSandboxes(Path(folder) / "sandboxes", env={"PATH": path})
        source = IterableSource([Prompt(id=str(number), text=TASK) for number in range(groups)])
        generate = UnmodifiedAgent(program, AGENTS[agent], sandboxes, show)
        settings = EngineSettings(samples_per_prompt=samples, max_running=4, deadlines=Deadlines(group=600.0))
        done: list[Group] = []
        async with (
            open_tiny_process(TinySettings(script=script)) as tiny,
            open_sglang_servers([tiny.url]) as servers,
            open_gateway(servers, tokenizer=DATA) as gateway,
            open_rollout_engine(
                source, generate, servers=servers, reward=success, gateway=gateway, settings=settings
            ) as engine,
        ):
            async for batch in engine.batches(1):
                done.extend(batch.groups)
                await batch.ack()
            for report in engine.quarantined():
                Console(stderr=True).print(Text(f"given up: {report.id}: {report.error}"))
        return done


def rows(group: Group) -> Sequence[str]:
    """Each row of a group in a line."""
    tokenizer = TinyTokenizer.load()
    lines = []
    for trajectory in group.trajectories:
        for segment in trajectory.segments:
            response = segment.tokens[len(segment.tokens) - segment.response_length :]
            trained = tokenizer.decode(response[segment.loss_mask == 1].tolist(), skip_special=False)
            lines.append(f"{len(segment.tokens)} tokens, {int(segment.loss_mask.sum())} trained: {trained!r}")
    return lines


@click.command()
@click.option("--agent", type=click.Choice(list(AGENTS)), required=True)
@click.option("--program", type=click.Path(exists=True, dir_okay=False, resolve_path=False), required=True)
@click.option("--groups", default=1, show_default=True)
@click.option("--samples", default=2, show_default=True)
@click.option("--show", is_flag=True, help="Print what the agent prints.")
def main(agent: str, program: str, groups: int, samples: int, *, show: bool) -> None:
    """Run an agent as it is, and show what would be trained."""
    done = trio.run(lambda: run(agent, str(Path(program).absolute()), groups=groups, samples=samples, show=show))
    console = Console()
    for group in done:
        rewards = [trajectory.reward for trajectory in group.trajectories]
        console.print(Text(f"group {group.id}: rewards {rewards}, turns {[t.turns for t in group.trajectories]}"))
        for line in rows(group):
            console.print(Text(f"  {line}"))
    if len(done) < groups or not all(trajectory.reward for group in done for trajectory in group.trajectories):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
