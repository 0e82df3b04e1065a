"""Token ids in, token ids and log-probs out."""

import math
from itertools import pairwise

import pytest

from ._server import PROMPT, Server, tiles

TOLERANCE = 1e-4


async def test_every_output_token_has_an_id_and_a_log_prob(server: Server):
    answer = await server.generate(max_new_tokens=12, return_logprob=True, ignore_eos=True, rid="0" * 31 + "a")
    meta = answer["meta_info"]

    assert len(answer["output_ids"]) == meta["completion_tokens"] == meta["output_token_logprobs_length"] == 12
    assert [triple[1] for triple in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(triple[0] <= 0 and triple[2] is None for triple in meta["output_token_logprobs"])
    assert meta["prompt_tokens"] == len(PROMPT)
    assert meta["id"] == "0" * 31 + "a"
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert tiles(meta["weight_versions"], 12)
    assert meta["weight_version"] == meta["weight_versions"][-1]["version"] == await server.version()
    assert meta["e2e_latency"] > 0


async def test_log_probs_come_only_when_asked_for(server: Server):
    answer = await server.generate()

    assert "output_token_logprobs" not in answer["meta_info"]
    assert "prompt_token_ids" not in answer


async def test_log_probs_are_what_a_prefill_of_the_same_tokens_gives(server: Server):
    answer = await server.generate(max_new_tokens=40, return_logprob=True, ignore_eos=True)

    sampled = [triple[0] for triple in answer["meta_info"]["output_token_logprobs"]]
    assert sampled == pytest.approx(await server.log_probs(PROMPT, answer["output_ids"]), abs=TOLERANCE)


async def test_log_probs_are_taken_after_the_temperature(server: Server):
    """Renormalised over the whole vocabulary: log softmax(logits / T)."""
    answer = await server.generate(max_new_tokens=1, temperature=0.5, return_logprob=True, ignore_eos=True)
    ((log_prob, token, _),) = answer["meta_info"]["output_token_logprobs"]

    every = {"logprob_start_len": 0, "top_logprobs_num": server.target.vocabulary}
    scored = await server.generate(input_ids=[*PROMPT, token], max_new_tokens=0, return_logprob=True, **every)
    at_1 = {triple[1]: triple[0] for triple in scored["meta_info"]["input_top_logprobs"][-1]}
    total = math.log(math.fsum(math.exp(value / 0.5) for value in at_1.values()))
    assert len(at_1) == server.target.vocabulary
    assert log_prob == pytest.approx(at_1[token] / 0.5 - total, abs=TOLERANCE)


async def test_greedy_is_repeatable_and_takes_the_likeliest(server: Server):
    first = await server.generate(temperature=0, max_new_tokens=6, return_logprob=True, top_logprobs_num=1)
    second = await server.generate(temperature=0, max_new_tokens=6)

    assert first["output_ids"] == second["output_ids"]
    assert [tops[0][1] for tops in first["meta_info"]["output_top_logprobs"]] == first["output_ids"]


async def test_prompt_ids_are_echoed_when_asked_for(server: Server):
    by_ids = await server.generate(return_prompt_token_ids=True)
    by_text = await server.generate(text="def main():", return_prompt_token_ids=True)

    assert by_ids["prompt_token_ids"] == PROMPT
    assert len(by_text["prompt_token_ids"]) == by_text["meta_info"]["prompt_tokens"] > 0


async def test_ids_win_over_text(server: Server):
    answer = await server.generate(text="something else", input_ids=PROMPT, return_prompt_token_ids=True)

    assert answer["prompt_token_ids"] == PROMPT


async def test_scoring_samples_nothing(server: Server):
    answer = await server.generate(max_new_tokens=0, return_logprob=True, logprob_start_len=0)

    assert answer["output_ids"] == []
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert answer["meta_info"]["completion_tokens"] == 0
    assert answer["meta_info"]["input_token_logprobs"][0] == [None, PROMPT[0], None]
    assert tiles(answer["meta_info"]["weight_versions"], 0)


async def test_a_stop_id_ends_the_answer_and_is_part_of_it(server: Server):
    free = await server.generate(temperature=0, max_new_tokens=8)
    stop = free["output_ids"][4]
    expected = free["output_ids"][: free["output_ids"].index(stop) + 1]
    answer = await server.generate(temperature=0, max_new_tokens=8, stop_token_ids=[stop])

    assert answer["output_ids"] == expected
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


async def test_a_stop_string_is_cut_from_the_text_but_not_from_the_ids(server: Server):
    free = await server.generate(temperature=0, max_new_tokens=8)
    stop = next(pair for pair in map("".join, pairwise(free["text"][4:])) if pair.isascii())
    answer = await server.generate(temperature=0, max_new_tokens=8, stop=[stop])

    assert answer["text"] == free["text"].partition(stop)[0]
    assert answer["output_ids"] == free["output_ids"][: len(answer["output_ids"])]
    assert len(answer["output_ids"]) > 0
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


async def test_several_prompts_give_an_array_in_order(server: Server):
    rids = "b" * 31
    answers = await server.generate(input_ids=[[1, 2, 3], [4, 5]], rid=rids, max_new_tokens=2, ignore_eos=True)

    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [3, 2]
    assert [answer["meta_info"]["id"] for answer in answers] == [f"{rids}_0", f"{rids}_1"]


async def test_several_samples_give_an_array_and_lose_the_rid(server: Server):
    answers = await server.generate(n=2, rid="c" * 32, max_new_tokens=2, ignore_eos=True)

    assert len(answers) == 2
    assert "c" * 32 not in [answer["meta_info"]["id"] for answer in answers]


async def test_a_repeated_prefix_is_cached(server: Server):
    await server.generate(input_ids=list(range(100, 132)))
    answer = await server.generate(input_ids=list(range(100, 140)))

    assert answer["meta_info"]["cached_tokens"] == 32


async def test_an_unknown_top_level_key_is_ignored(server: Server):
    response = await server.post("/generate", input_ids=PROMPT, sampling_params={"max_new_tokens": 1}, nonsense=1)

    assert response.status_code == 200


@pytest.mark.parametrize("stop", ["", [""], ["never there", ""]], ids=repr)
async def test_f114_an_empty_stop_string_ends_an_answer_after_one_token(server: Server, stop: str | list[str]):
    answer = await server.generate(max_new_tokens=5, stop=stop, ignore_eos=True)

    assert (answer["text"], len(answer["output_ids"])) == ("", 1)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": ""}


async def test_f114_a_stop_token_outside_the_vocabulary_is_never_met(server: Server):
    """By itself; together with ``min_new_tokens`` it kills the server, see the tests of the tiny one."""
    answer = await server.generate(max_new_tokens=5, stop_token_ids=[5_000_000], ignore_eos=False)

    assert answer["meta_info"]["finish_reason"]["type"] in {"length", "stop"}


async def test_f114_a_temperature_of_null_is_the_default(server: Server):
    """So an infinite one, which is sent as null, would change the policy without a word."""
    answer = await server.generate(max_new_tokens=5, temperature=None, ignore_eos=True)

    assert len(answer["output_ids"]) == 5
