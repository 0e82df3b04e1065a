"""Recorded turns come back through the gateway, to any client, as the first try got them; then the servers are asked again."""

import pytest

from trio_rollout import Resume, Retry, SamplingParams
from trio_rollout.errors import InfrastructureError

from .conftest import WEATHER
from .talk import IDS, WAYS, talking, tool_loop

pytestmark = pytest.mark.usefixtures("clients_leave_generators")

TURNS = {"resume": Resume.TURNS, "retry": Retry(max_attempts=1, backoff_base=0)}


def said(answer):
    """Return an answer without the time at which it was sent."""
    raw = answer.raw.model_dump(exclude={"created", "created_at", "completed_at"})
    return answer.id, answer.text, [(call.id, call.name, call.arguments) for call in answer.calls], raw["usage"]


@pytest.mark.parametrize("way", WAYS, ids=IDS)
async def test_an_agent_that_begins_anew_gets_its_answers_back(open_stage, way):
    """With the same texts, ids of answers and of tool calls, and counts of tokens; the third turn is sampled."""
    tries, sampled = [], []

    async def generate(prompt, rollout):
        async with (
            rollout.session(sampling=SamplingParams(max_new_tokens=256)) as session,
            talking(session, way) as talk,
        ):
            talk.tools = [WEATHER]
            talk.user("the weather, please")
            answers = await tool_loop(talk, turns=1 + rollout.attempt)
            tries.append([said(answer) for answer in answers])
            sampled.append(stage.servers.statistics().servers[0].requests)
            if rollout.attempt == 1:
                raise InfrastructureError("sandbox")
        return session.trajectory()

    async with open_stage(None, generate=generate, **TURNS) as stage:
        batch = await stage.engine.next_batch(1)
    first, second = tries
    assert second[:2] == first
    assert len(second) == 3
    assert [len(calls) for _, _, calls, _ in first] == [1, 0]
    assert sampled == [2, 3]
    assert batch.groups[0].trajectories[0].turns == 3


async def test_equal_requests_of_one_session_have_answers_with_different_ids(open_stage):
    """An agent may ask for several samples of one prompt, and gets each of them back."""
    tries = []

    async def generate(prompt, rollout):
        sampling = SamplingParams(max_new_tokens=8, temperature=1.0)
        async with rollout.session(sampling=sampling) as session, talking(session, ("chat", False)) as talk:
            answers = []
            for _ in range(3):
                talk.history.clear()
                answers.append(said(await talk.user("tell me something").ask()))
            tries.append(answers)
            if rollout.attempt == 1:
                raise InfrastructureError("sandbox")
        return session.trajectory()

    async with open_stage(None, generate=generate, **TURNS) as stage:
        await stage.engine.next_batch(1)
        assert stage.servers.statistics().servers[0].requests == 3
    assert tries[0] == tries[1]
    assert len({answer[0] for answer in tries[0]}) == 3


async def test_an_agent_that_asks_for_something_else_is_sampled_from_there(open_stage):
    async def generate(prompt, rollout):
        async with rollout.session() as session, talking(session, ("messages", True)) as talk:
            for turn in range(3):
                await talk.user(f"say hello in try {rollout.attempt}" if turn == 1 else "say hello").ask()
            if rollout.attempt == 1:
                raise InfrastructureError("sandbox")
        return session.trajectory()

    async with open_stage(None, generate=generate, **TURNS) as stage:
        await stage.engine.next_batch(1)
        assert stage.servers.statistics().servers[0].requests == 5
