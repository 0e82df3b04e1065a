"""An agent with tools on a scripted model: `python examples/agent_tools.py`.

Each rollout has its own sandbox. The model writes a file with one command and reads it with another, then answers with
what it has read; for some prompts its command runs for too long, which it is told, and says. The "model" is the tiny
server, made to say what a script says, so that the example needs no GPU; its log-probs are real.

What to look at: tools are cancelled, timed out and cleaned up with the rollout; the row that the trainer gets is the whole
conversation, in which what the model wrote is trained (mask 1) and what the tools answered is not (mask 0).
"""

import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
import trio
from rich.console import Console
from rich.text import Text

from trio_rollout import (
    EngineSettings,
    Group,
    IterableSource,
    Prompt,
    SamplingParams,
    Trajectory,
    Turn,
    open_rollout_engine,
    open_sglang_servers,
)
from trio_rollout.abc import Rollout
from trio_rollout.tiny import DATA, TinySettings, TinyTokenizer, open_tiny_process
from trio_rollout.tools import ShellTool, ToolCall, ToolName, ToolResult, TurnCancellation

MOST_TURNS = 5
CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)

# What the model says: the first rule that fits the conversation so far.
SCRIPT = r"""
[[rules]]
turn = 0
matches = 'Multiply (\d+) and (\d+)'
answer = '''I write the product down.
<tool_call>
{"name": "shell", "arguments": {"cmd": "expr {1} \\* {2} > product.txt"}}
</tool_call>'''

[[rules]]
turn = 1
contains = "Multiply"
answer = '''Now I read it.
<tool_call>
{"name": "shell", "arguments": {"argv": ["cat", "product.txt"]}}
</tool_call>'''

[[rules]]
matches = 'Exit code: 0\nOutput:\n(\d+)'
answer = "The product is {1}."

[[rules]]
turn = 0
contains = "Wait"
answer = '''I wait.
<tool_call>
{"name": "shell", "arguments": {"argv": ["sleep", "60"], "timeout_ms": 200}}
</tool_call>'''

[[rules]]
last_contains = "command timed out"
answer = "That took too long."
"""


def prompts(count: int) -> list[Prompt]:
    """Products to compute, and every fourth time something that takes too long."""
    made = []
    for number in range(count):
        a, b = 6 + number, 7 + 2 * number
        slow = number % 4 == 3  # ruff: ignore[magic-value-comparison]  every fourth
        text = "Wait for a minute." if slow else f"Multiply {a} and {b}."
        label = "too long" if slow else str(a * b)
        made.append(Prompt(id=str(number), messages=[{"role": "user", "content": text}], label=label))
    return made


class Agent:
    """A generate function: turns and tool calls, until the model calls no tool."""

    sampling = SamplingParams(max_new_tokens=400)

    def __init__(self, tokenizer: TinyTokenizer) -> None:
        self._tokenizer = tokenizer

    async def __call__(self, _prompt: Prompt, rollout: Rollout, /) -> Trajectory:
        """Run one rollout in a new sandbox."""
        async with rollout.tools.open_sandbox() as sandbox:
            turns = [await rollout.generate(rollout.input)]
            while (calls := self._calls(turns[-1])) and len(turns) < MOST_TURNS:
                runtime = rollout.tools.runtime([ShellTool(sandbox.exec, interpreter=("sh", "-c"))])
                results = await runtime.call_all(calls, turn=TurnCancellation())
                turns.append(
                    await rollout.generate([*turns[-1].prompt_ids, *turns[-1].output_ids, *self._said(results)])
                )
            return rollout.finish(turns)

    @staticmethod
    def _calls(turn: Turn) -> list[ToolCall]:
        """Return the tool calls that the model wrote, each with a new id."""
        found = [json.loads(block) for block in CALL.findall(turn.text)]
        return [
            ToolCall(call_id=f"{turn.rid}-{place}", name=ToolName(call["name"]), payload=call["arguments"])
            for place, call in enumerate(found)
        ]

    def _said(self, results: Sequence[ToolResult]) -> list[int]:
        """Return the tools' answers as the model's chat template writes them: the ids between two turns."""
        answers = "".join(f"\n<tool_response>\n{result.output.model_text()}\n</tool_response>" for result in results)
        return self._tokenizer.encode(f"\n<|im_start|>user{answers}<|im_end|>\n<|im_start|>assistant\n")


async def says_the_label(trajectory: Trajectory) -> float:
    """1 where the last answer has what was wanted in it."""
    await trio.lowlevel.checkpoint()
    return float(str(trajectory.prompt.label) in trajectory.text)


async def run(prompt_count: int, samples: int) -> list[Group]:
    """Roll everything out; the groups in the order of their prompts."""
    tokenizer = TinyTokenizer.load()
    groups: list[Group] = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.toml")
        await trio.Path(script).write_text(SCRIPT, encoding="utf-8")
        async with (
            open_tiny_process(TinySettings(script=script)) as tiny,
            open_sglang_servers([tiny.url], tokenizer=DATA) as servers,
            open_rollout_engine(
                IterableSource(prompts(prompt_count)),
                Agent(tokenizer),
                servers=servers,
                reward=says_the_label,
                settings=EngineSettings(samples_per_prompt=samples),
            ) as engine,
        ):
            async for batch in engine.batches(prompt_count):
                groups += batch.groups
                await batch.ack()
    return sorted(groups, key=lambda group: int(group.id.prompt))


def show(console: Console, tokenizer: TinyTokenizer, trajectory: Trajectory) -> None:
    """The row as the trainer gets it: what is trained in bold green, what is masked dimmed."""
    (row,) = trajectory.segments
    start = len(row.tokens) - row.response_length
    text = Text(tokenizer.decode(row.tokens[:start].tolist()), style="dim")
    for token, trained in zip(row.tokens[start:].tolist(), row.loss_mask.tolist(), strict=True):
        text.append(tokenizer.decode([token]), style="bold green" if trained else "dim")
    console.print(text)
    trained, masked = int(row.loss_mask.sum()), int((row.loss_mask == 0).sum())
    console.print(
        f"→ reward {trajectory.reward}, {trajectory.turns} turns, {trained} tokens trained, {masked} masked\n"
    )


@click.command(help=__doc__)
@click.option("--prompts", "prompt_count", default=8, show_default=True)
@click.option("--samples", default=4, show_default=True)
def main(prompt_count: int, samples: int) -> None:
    """Run it and show one rollout of each kind."""
    groups = trio.run(run, prompt_count, samples)
    console, tokenizer = Console(highlight=False), TinyTokenizer.load()
    slow = [group for group in groups if group.prompt.label == "too long"]
    for group in (groups[0], *slow[:1]):
        show(console, tokenizer, group.trajectories[0])
    rewards = [row.reward for group in groups for row in group.trajectories]
    console.print(f"{len(groups)} groups, {len(rewards)} rollouts, all rewards 1.0: {set(rewards) == {1.0}}")


if __name__ == "__main__":
    main()
