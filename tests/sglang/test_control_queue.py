"""The queue of one server's control calls: their order, questions that a command interrupts, and calls that are left."""

from functools import partial

import pytest
import trio

from trio_rollout.sglang._server import ControlQueue


class Calls:
    """Calls that note when they begin and end, and how many run at once."""

    def __init__(self):
        self.log = []
        self.running = 0

    async def make(self, name, seconds=1.0):
        self.log.append(f"{name} begins")
        self.running += 1
        assert self.running == 1
        try:
            await trio.sleep(seconds)
        finally:
            self.running -= 1
        self.log.append(f"{name} ends")
        return name


@pytest.fixture
async def queue(nursery):
    opened = ControlQueue()
    nursery.start_soon(opened.serve)
    await trio.testing.wait_all_tasks_blocked()
    return opened


@pytest.fixture
def calls():
    return Calls()


async def test_commands_are_made_one_after_the_other_in_the_order_they_came(autojump_clock, queue, calls):
    async with trio.open_nursery() as nursery:
        for name in ("pause", "resume", "pause again"):
            nursery.start_soon(partial(queue.command, partial(calls.make, name), until=100))
            await trio.sleep(0.1)
    assert calls.log == [f"{name} {what}" for name in ("pause", "resume", "pause again") for what in ("begins", "ends")]


async def test_a_command_interrupts_a_question_which_is_asked_again_after_it(autojump_clock, queue, calls):
    answers = []

    async def ask():
        answers.append(await queue.ask(partial(calls.make, "question", 10), until=100))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.sleep(5)
        assert await queue.command(partial(calls.make, "pause"), until=6.5) == "pause"
        assert trio.current_time() == 6
    assert calls.log == ["question begins", "pause begins", "pause ends", "question begins", "question ends"]
    assert answers == ["question"]


async def test_commands_go_before_questions_that_wait(autojump_clock, queue, calls):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(queue.command, partial(calls.make, "resume"), until=100))
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(partial(queue.ask, partial(calls.make, "question"), until=100))
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(partial(queue.command, partial(calls.make, "pause"), until=100))
    assert [line for line in calls.log if "begins" in line] == ["resume begins", "pause begins", "question begins"]


@pytest.mark.parametrize("kind", ["command", "ask"])
async def test_a_call_whose_turn_does_not_come_in_time_is_not_made(autojump_clock, queue, calls, kind):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(queue.command, partial(calls.make, "resume", 10), until=100))
        await trio.testing.wait_all_tasks_blocked()
        assert await getattr(queue, kind)(partial(calls.make, "late"), until=3) is None
        assert trio.current_time() == 3
    await trio.sleep(5)
    assert calls.log == ["resume begins", "resume ends"]


@pytest.mark.parametrize("kind", ["command", "ask"])
async def test_a_call_that_is_cancelled_before_its_turn_is_not_made(autojump_clock, queue, calls, kind):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(queue.command, partial(calls.make, "resume", 10), until=100))
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(1):
            await getattr(queue, kind)(partial(calls.make, "cancelled"), until=100)
        assert trio.current_time() == 1
    await trio.sleep(5)
    assert calls.log == ["resume begins", "resume ends"]


async def test_a_command_that_is_cancelled_in_its_turn_is_waited_for_and_returns_its_answer(
    autojump_clock, queue, calls
):
    with trio.move_on_after(1):
        assert await queue.command(partial(calls.make, "pause", 5), until=100) == "pause"
    assert trio.current_time() == 5
    assert calls.log == ["pause begins", "pause ends"]


async def test_a_question_that_is_cancelled_in_its_turn_ends_at_once_and_is_not_asked_again(
    autojump_clock, queue, calls
):
    with trio.move_on_after(1):
        await queue.ask(partial(calls.make, "question", 5), until=100)
    assert trio.current_time() == 1
    assert await queue.command(partial(calls.make, "pause"), until=100) == "pause"
    await trio.sleep(10)
    assert calls.log == ["question begins", "pause begins", "pause ends"]


@pytest.mark.parametrize("kind", ["command", "ask"])
async def test_when_the_queue_ends_nothing_waits_in_it(autojump_clock, calls, kind):
    """The call under way, the one behind it, and one that comes too late: none of them blocks for ever."""
    queue, results = ControlQueue(), []

    async def call(name):
        results.append(await getattr(queue, kind)(partial(calls.make, name), until=100))

    async with trio.open_nursery() as nursery:
        serving = await nursery.start(_serve, queue)
        for name in ("first", "second"):
            nursery.start_soon(call, name)
        await trio.sleep(0.5)
        serving.cancel()
        await trio.testing.wait_all_tasks_blocked()
        await call("third")
    assert results == [None] * 3
    assert trio.current_time() == 0.5


async def _serve(queue, *, task_status):
    with trio.CancelScope() as scope:
        task_status.started(scope)
        await queue.serve()
