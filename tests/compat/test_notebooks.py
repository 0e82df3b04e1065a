"""A notebook's cells are asyncio's: the error is one line that says what to do, and what it says works."""

import asyncio
import traceback

import pytest
import trio

from trio_rollout import (
    IterableSource,
    Prompt,
    SingleTurn,
    exact_match,
    open_ledger,
    open_rollout_engine,
    open_scorer_processes,
    open_sglang_servers,
)
from trio_rollout.gateway import open_gateway
from trio_rollout.testing import FakeServers
from trio_rollout.tiny import open_tiny_process, open_tiny_server
from trio_rollout.tools import open_rollout_tools
from trio_rollout_compat import EngineThread

OPENED = {
    "open_rollout_engine": lambda: open_rollout_engine(IterableSource([]), SingleTurn(), servers=FakeServers()),
    "open_sglang_servers": lambda: open_sglang_servers(["http://127.0.0.1:1"]),
    "open_ledger": lambda: open_ledger("runs/never"),
    "open_gateway": lambda: open_gateway(FakeServers(), tokenizer="x"),
    "open_scorer_processes": lambda: open_scorer_processes(abs),
    "open_tiny_process": open_tiny_process,
    "open_tiny_server": open_tiny_server,
    "open_rollout_tools": open_rollout_tools,
}


@pytest.mark.parametrize("what", OPENED)
def test_f170_in_a_cell_the_error_is_one_line_that_says_what_to_do(what):
    async def cell():
        async with OPENED[what]():
            pass

    with pytest.raises(
        RuntimeError, match=rf"^{what} needs Trio, which does not run here \(the cells of a notebook"
    ) as caught:
        asyncio.run(cell())

    assert "EngineThread" in str(caught.value)
    assert "\n" not in str(caught.value)
    shown = "".join(traceback.format_exception(caught.value)).partition("in cell")[2]
    assert len(shown.splitlines()) <= 12
    assert "During handling" not in shown


def test_f170_without_any_loop_the_error_says_so():
    async def opened():
        async with open_ledger("runs/never"):
            pass

    with pytest.raises(RuntimeError, match="open_ledger needs Trio, which does not run here"):
        opened().send(None)


def test_f170_an_engine_on_a_thread_lives_over_cells():
    """Each call of the loop stands for a cell; docs/embedding.md, Notebooks."""

    def lifespan():
        prompts = [Prompt(id=str(n), input_ids=[1, 2], label="x") for n in range(2)]
        return open_rollout_engine(IterableSource(prompts), SingleTurn(), servers=FakeServers(), reward=exact_match)

    thread = EngineThread(lifespan)

    async def first():
        await thread.astart()

    async def second():
        return await thread.acall(thread.value.next_batch, 2)

    async def third():
        await thread.aclose()

    asyncio.run(first())
    batch = asyncio.run(second())
    asyncio.run(third())
    assert len(batch.groups) == 2
    with pytest.raises(RuntimeError):
        trio.lowlevel.current_task()
