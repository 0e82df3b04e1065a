"""Generated tasks: the same for the same seed, scored by the data set's own verifier."""

import json
import pickle
import re
import sys

import pytest

from trio_rollout._core.values import Prompt, Segment, Trajectory
from trio_rollout.errors import RewardError, SettingsError, SourceError
from trio_rollout.sources import TaskSource
from trio_rollout.testing import run_inline

from ._files import ids


def tasks(name: str = "gcd", *, count: int = 5, seed: int = 1) -> TaskSource:
    return TaskSource(name, count=count, seed=seed, run_sync=run_inline)


def answered(prompt: Prompt, text: str) -> Trajectory:
    row = Segment(tokens=[1], response_length=0, loss_mask=[], log_probs=[], versions=(), text=text)
    return Trajectory(prompt=prompt, index=0, segments=[row])


async def test_a_task_is_a_question_with_its_answer_and_its_metadata():
    (prompt,) = await tasks().take(1)

    assert prompt.id == "0"
    assert isinstance(prompt.text, str)
    assert "Greatest Common Divisor" in prompt.text
    assert prompt.metadata["source_dataset"] == "gcd"
    assert json.loads(json.dumps(prompt.metadata)) == prompt.metadata
    assert await tasks().reward(answered(prompt, str(prompt.label))) == 1.0


async def test_the_same_seed_gives_the_same_tasks_and_another_seed_others():
    assert list(await tasks().take(5)) == list(await tasks().take(5))
    assert [prompt.text for prompt in await tasks().take(5)] != [prompt.text for prompt in await tasks(seed=2).take(5)]


async def test_all_are_given_once_returned_ones_first():
    source = tasks()
    taken = await source.take(3)
    await source.give_back(taken[1:])
    assert ids(await source.take(9)) == ["0/1", "0/2", "0/3", "0/4"]
    assert await source.take(9) == ()
    assert repr(source) == "<TaskSource 'gcd' 5 of 5 taken, 0 returned>"


async def test_a_restored_source_goes_on_like_the_first():
    source, other = tasks(), tasks()
    taken = await source.take(3)
    await source.give_back([taken[1]])
    state = json.loads(json.dumps(source.state()))

    other.restore(state)

    assert other.state() == source.state() == state
    assert list(await other.take(9)) == list(await source.take(9))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 2}, "another (name, count, seed): the state has ('gcd', 5, 2), this source has ('gcd', 5, 1)"),
        ({"count": 6}, "another (name, count, seed)"),
        ({"name": "lcm"}, "another (name, count, seed)"),
        ({"kind": "jsonl"}, "a state of kind 'jsonl', only 'tasks'"),
        ({"position": -1}, "damaged state: "),
        ({"position": 6}, "damaged state: position 6 of 5, returned []"),
        ({"returned": [4]}, "damaged state: position 2 of 5, returned [4]"),
    ],
)
async def test_what_does_not_fit_is_refused_and_changes_nothing(change: dict[str, object], message: str):
    source = tasks()
    await source.take(2)
    before = source.state()
    with pytest.raises(SourceError, match=re.escape(message)):
        source.restore(before | change)
    assert source.state() == before


async def test_giving_back_a_task_that_is_not_out_is_refused():
    source = tasks()
    taken = await source.take(2)
    await source.give_back(taken[:1])
    for wrong in (taken[:1], [taken[1], taken[1]], [Prompt(id="3", text="x")], [Prompt(id="x", text="x")]):
        with pytest.raises(SourceError, match=f"prompt 0/{wrong[0].id} was given back twice, or never taken"):
            await source.give_back(wrong)


def test_an_unknown_data_set_is_refused_with_the_known_ones():
    with pytest.raises(SourceError, match=r"reasoning-gym has no data set 'sums'; it has: .*\bgcd\b"):
        tasks("sums")


def test_a_data_set_that_needs_options_is_refused():
    with pytest.raises(SourceError, match="'composite' can't be made from count and seed alone: Must specify"):
        tasks("composite")


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(
        SourceError, match=r"TaskSource\('gcd'\) needs reasoning-gym: pip install 'trio-rollout\[tasks\]'"
    ):
        tasks()


@pytest.mark.parametrize(("count", "seed", "field"), [(0, 1, "count"), (5, -1, "seed")])
def test_count_and_seed_are_checked(count: int, seed: int, field: str):
    with pytest.raises(SettingsError, match=rf"TaskSource\.{field}: got"):
        tasks(count=count, seed=seed)


async def test_the_last_answer_tag_counts_or_else_the_whole_response():
    source = tasks()
    (prompt,) = await source.take(1)
    right = prompt.label
    assert await source.reward(answered(prompt, f"<answer>0</answer> no, <answer> {right} </answer> that is it")) == 1.0
    assert await source.reward(answered(prompt, f"  {right}\n")) == 1.0
    assert await source.reward(answered(prompt, f"<answer>{right}</answer><answer>none</answer>")) < 1.0


async def test_an_answer_that_the_verifier_can_not_parse_scores_zero():
    """The verifier of prime_factorization raises ValueError: the mistake is the policy's, not the scorer's."""
    source = tasks("prime_factorization")
    (prompt,) = await source.take(1)
    assert await source.reward(answered(prompt, "garbage")) == 0.0


async def test_a_broken_verifier_is_an_error():
    source = tasks()
    (prompt,) = await source.take(1)

    class Broken:
        def score_answer(self, answer: str, entry: object) -> float:
            raise OSError("no verifier")

    source.scorer._dataset = Broken()
    with pytest.raises(RewardError, match="the verifier of 'gcd' fails on its own answer: OSError"):
        await source.reward(answered(prompt, "4"))


async def test_a_generator_that_fails_is_a_source_error_and_nothing_is_taken():
    source = tasks()
    source._dataset = {0: source._dataset[0]}
    with pytest.raises(SourceError, match=r"generating \[0, 1\] failed: KeyError\(1\)"):
        await source.take(2)
    assert ids(await source.take(1)) == ["0/0"]


async def test_metadata_that_json_changes_is_not_what_is_scored_with():
    """The verifier of rearc compares tuples: with metadata that went through JSON its own answer scores 0.05."""
    source = tasks("rearc", count=1)
    (prompt,) = await source.take(1)
    assert await source.reward(answered(prompt, str(prompt.label))) == 1.0


@pytest.mark.parametrize("prompt_id", ["0", "9", "x"])
async def test_a_prompt_from_elsewhere_is_an_error(prompt_id: str):
    with pytest.raises(RewardError, match=rf"prompt 0/{prompt_id} is not (task 0|one of the 5 tasks) of 'gcd'"):
        await tasks().reward(answered(Prompt(id=prompt_id, text="something else"), "4"))


async def test_the_verifier_can_be_sent_to_another_process():
    source = tasks()
    (prompt,) = await source.take(1)

    sent = pickle.loads(pickle.dumps(source.scorer))

    assert not sent._entries
    assert sent(answered(prompt, str(prompt.label))) == 1.0


def test_a_scorer_remembers_a_bounded_number_of_entries():
    scorer = tasks().scorer
    for index in range(3000):
        scorer.remember(index, {})
    assert len(scorer._entries) == 1024


async def test_a_source_can_be_made_of_the_name_that_a_ledger_knows_it_by():
    again = TaskSource.of_identity(tasks(count=7, seed=3).identity)

    assert (again.name, again.count, again.seed) == ("gcd", 7, 3)
    with pytest.raises(SourceError, match="'JSONL of 6 prompts' names no generated tasks"):
        TaskSource.of_identity("JSONL of 6 prompts")
