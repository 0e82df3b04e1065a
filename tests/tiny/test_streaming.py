"""Streams: cumulative chunks, or deltas that add up to the whole answer."""

import itertools

import pytest

from ._client import Client

FORMS = {
    "plain": {"max_new_tokens": 12},
    "with log-probs": {
        "max_new_tokens": 12,
        "return_logprob": True,
        "top_logprobs_num": 2,
        "token_ids_logprob": [1, 2],
    },
    "characters of several bytes": {"logit_bias": {str(token): 30 for token in (195, 164, 182)}, "max_new_tokens": 30},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
async def test_deltas_add_up_to_the_whole(open_client, form):
    async with open_client(incremental=True) as client:
        whole = await client.generate(rid="a", **form)
        chunks = await client.chunks(rid="a", **form)

    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert [token for chunk in chunks for token in chunk["output_ids"]] == whole["output_ids"]
    for name in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
        if name in whole["meta_info"]:
            assert [one for chunk in chunks for one in chunk["meta_info"][name]] == whole["meta_info"][name]
    assert [chunk["meta_info"]["completion_tokens"] for chunk in chunks] == list(range(1, len(chunks) + 1))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
async def test_cumulative_chunks_grow_into_the_whole(client: Client, form):
    whole = await client.generate(rid="a", **form)
    chunks = await client.chunks(rid="a", **form)

    for earlier, later in itertools.pairwise(chunks):
        assert later["text"].startswith(earlier["text"])
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        assert earlier["meta_info"]["finish_reason"] is None
        assert "weight_versions" not in earlier["meta_info"]
    volatile = {"e2e_latency", "response_sent_to_client_ts", "cached_tokens"}
    last, meta = chunks[-1], whole["meta_info"]
    assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])
    assert {name: last["meta_info"][name] for name in meta.keys() - volatile} == {
        name: meta[name] for name in meta.keys() - volatile
    }


async def test_what_may_become_a_stop_string_is_held_back(open_client):
    forced = {"logit_bias": {str(ord(letter)): 50 for letter in "ab"}, "max_new_tokens": 40}
    async with open_client(incremental=True) as client:
        free = await client.generate(rid="a", **forced)
        stop = free["text"][10:14]
        whole = await client.generate(rid="a", stop=stop, **forced)
        chunks = await client.chunks(rid="a", stop=stop, **forced)
        kept = await client.generate(rid="a", stop=stop, no_stop_trim=True, **forced)

    assert whole["text"] == free["text"][: free["text"].index(stop)]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert [token for chunk in chunks for token in chunk["output_ids"]] == whole["output_ids"]
    assert kept["text"] == whole["text"] + stop


async def test_an_end_token_is_in_the_ids_and_not_in_the_text(client: Client):
    end = {"logit_bias": {"258": 100}, "ignore_eos": False}
    answer = await client.generate(**end)
    shown = await client.generate(no_stop_trim=True, skip_special_tokens=False, **end)

    assert answer["output_ids"] == [258]
    assert not answer["text"]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 258}
    assert shown["text"] == "<|im_end|>"


async def test_a_stop_id_is_silenced_by_ignore_eos_as_in_sglang(client: Client):
    bias = {"logit_bias": {"65": 100}, "stop_token_ids": [65], "max_new_tokens": 3}

    assert (await client.generate(**bias, ignore_eos=False))["output_ids"] == [65]
    assert (await client.generate(**bias, ignore_eos=True))["output_ids"] == [65, 65, 65]


async def test_an_abort_in_the_queue_sends_the_last_token_again(open_client, nursery):
    """A bug of SGLang in incremental mode; ``completion_tokens`` is the true number."""
    async with open_client(incremental=True) as client:
        got = []

        async def stream() -> None:
            got.extend(await client.chunks(rid="r", max_new_tokens=50))

        nursery.start_soon(stream)
        pending = client.start(rid="other", max_new_tokens=5)
        await pending.result()
        await client.call("/pause_generation", {"mode": "retract"})
        await client.call("/abort_request", {"rid": "r"})
        await client.call("/continue_generation", {})
        await client.generate(max_new_tokens=2)

    sent = [token for chunk in got[:-1] for token in chunk["output_ids"]]
    assert got[-1]["output_ids"] == sent[-1:]
    assert got[-1]["meta_info"]["completion_tokens"] == len(sent)


async def test_texts_of_log_probs_on_demand(client: Client):
    answer = await client.generate(
        input_ids=[72, 105], return_logprob=True, logprob_start_len=0, return_text_in_logprobs=True
    )

    assert [triple[1:] for triple in answer["meta_info"]["input_token_logprobs"]] == [[72, "H"], [105, "i"]]
    assert all(isinstance(triple[2], str) for triple in answer["meta_info"]["output_token_logprobs"])


async def test_prompt_ids_are_echoed_on_demand(client: Client):
    answer = await client.generate(text="Hi<|im_end|>", return_prompt_token_ids=True)

    assert answer["prompt_token_ids"] == [72, 105, 258]
    assert "prompt_token_ids" not in await client.generate(text="Hi")
