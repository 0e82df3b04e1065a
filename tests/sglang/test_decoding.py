"""Small answers are decoded on the loop, large ones in a thread, one at a time."""

import json

import attrs
import trio

from trio_rollout import SamplingParams, Stop
from trio_rollout.testing import Fault, Reply, Run

from .helpers import EXPECTED, FIVE, PROMPT, memory_world, socket_world

LARGE = SamplingParams(max_new_tokens=60_000)


@attrs.define
class Threads:
    """The port behind which threads are: each call waits until it is let through."""

    gate: trio.Event = attrs.field(factory=trio.Event)
    began: trio.Event = attrs.field(factory=trio.Event)
    calls: int = 0
    running: int = 0
    most: int = 0

    async def run_sync(self, fn, /, *args):
        self.calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        self.began.set()
        try:
            with trio.CancelScope(shield=True):
                await self.gate.wait()
            return fn(*args)
        finally:
            self.running -= 1


async def test_a_small_answer_never_pays_for_a_thread(autojump_clock):
    threads = Threads()
    async with memory_world(run_sync=threads.run_sync) as run:
        turn = await run.servers.generate(PROMPT, FIVE)
        assert (turn.output_ids.tolist(), threads.calls) == (EXPECTED, 0)


async def test_while_large_answers_are_decoded_one_by_one_the_others_go_on(autojump_clock):
    """With its thread stuck, no large answer comes; small ones do, also those that are sent meanwhile."""
    threads, turns = Threads(), []

    async with memory_world(run_sync=threads.run_sync) as run, trio.open_nursery() as nursery:

        async def large():
            turns.append(await run.servers.generate(PROMPT, LARGE))

        for _ in range(3):
            nursery.start_soon(large)
        await threads.began.wait()
        assert (await run.servers.generate(PROMPT, FIVE)).output_ids.tolist() == EXPECTED
        assert (turns, threads.calls) == ([], 1)
        threads.gate.set()
    assert [len(turn.output_ids) for turn in turns] == [60_000] * 3
    assert (threads.calls, threads.most) == (3, 1)


async def test_the_same_turn_comes_out_of_a_thread():
    async with socket_world() as run:
        ids = list(range(7))
        one, other = [await run.servers.generate(ids, SamplingParams(max_new_tokens=count)) for count in (50, 60_000)]
        assert one.output_ids.tolist() == other.output_ids[:50].tolist()
        assert one.log_probs.tolist() == other.log_probs[:50].tolist()
        assert other.stop is Stop.LENGTH
        assert not other.output_ids.flags.writeable


def large_event(rid):
    """One event with 60,000 tokens, and the end of the stream."""
    meta = {
        "id": rid,
        "finish_reason": {"type": "length", "length": 60_000},
        "completion_tokens": 60_000,
        "weight_version": "default",
        "output_token_logprobs": [[-0.5, 7, None]] * 60_000,
    }
    event = json.dumps({"text": "", "output_ids": [7] * 60_000, "meta_info": meta}).encode()
    return b"data: %b\n\ndata: [DONE]\n\n" % event


async def test_a_large_stream_that_comes_in_one_piece_tells_of_its_progress_on_the_loop(autojump_clock):
    """Progress is never reported from a thread, which has no clock to reset."""
    threads, told = Threads(), []

    def plan(seen):
        headers = {"content-type": "text/event-stream"}
        return Reply(body=large_event(seen.rid), headers=headers) if seen.path == "/generate" else None

    async with memory_world(plan, run_sync=threads.run_sync) as run:
        turn = await run.servers.generate(PROMPT, LARGE, on_progress=lambda: told.append(trio.current_time()))
        assert (len(turn.output_ids), threads.calls, len(told)) == (60_000, 0, 1)


async def test_cancelled_while_it_waits_for_the_thread_an_answer_leaves_nothing(autojump_clock):
    """It is complete, so there is nothing to abort, and its connection carries the next request."""
    threads = Threads()
    async with memory_world(run_sync=threads.run_sync) as run, trio.open_nursery() as nursery:
        nursery.start_soon(run.servers.generate, PROMPT, LARGE)
        await threads.began.wait()
        with trio.move_on_after(0.5) as scope:
            await run.servers.generate(PROMPT, LARGE)
        assert (scope.cancelled_caught, threads.calls) == (True, 1)
        connections = run.servers.statistics().connections
        assert (await run.servers.generate(PROMPT, FIVE)).output_ids.tolist() == EXPECTED
        assert run.servers.statistics().connections == connections
        assert (run.fake.aborts, run.servers.statistics().orphans) == ([], 0)
        threads.gate.set()


async def test_an_answer_whose_decoding_has_begun_counts_although_its_deadline_passes(autojump_clock):
    threads = Threads()
    async with memory_world(run_sync=threads.run_sync) as run, trio.open_nursery() as nursery:

        async def let_through():
            await threads.began.wait()
            await trio.sleep(10)
            threads.gate.set()

        nursery.start_soon(let_through)
        turn = None
        with trio.move_on_after(5):
            turn = await run.servers.generate(PROMPT, LARGE)
        assert turn is not None


async def test_a_large_answer_that_came_too_late_is_counted_and_not_decoded(autojump_clock):
    done, threads = trio.Event(), Threads()

    def plan(seen):
        if seen.path == "/abort_request":
            done.set()
            return Fault.IGNORE
        return Run(until=done) if seen.path == "/generate" else None

    async with memory_world(plan, run_sync=threads.run_sync) as run:
        with trio.move_on_after(5):
            await run.servers.generate(PROMPT, LARGE)
        counts = run.servers.statistics()
        assert (counts.late, counts.orphans, threads.calls) == (1, 0, 0)
