"""Continuous batching without a server: the running, the waiting, and the tokens of each request."""

import numpy as np
import pytest

from trio_rollout.tiny import TinyModel
from trio_rollout.tiny._model.model import Limits
from trio_rollout.tiny._scheduler.prefix_cache import PrefixCache
from trio_rollout.tiny._scheduler.request import Penalties, Request, Sampling, Wanted
from trio_rollout.tiny._scheduler.scheduler import Load, OutOfVocabulary, Scheduler

MODEL = TinyModel.random(vocab=64, context_tokens=3, seed=1)


def scheduler(**limits: int | None) -> Scheduler:
    whole = {"max_running": 2, "max_queued": None} | limits
    return Scheduler(model=MODEL, piece=lambda token: bytes([token]), cache=PrefixCache(10_000), **whole)


def request(rid: str = "r", *, prompt: tuple[int, ...] = (1, 2, 3), **fields: object) -> Request:
    fields = {"sampling": Sampling(max_new_tokens=4), "seed": sum(rid.encode())} | fields
    return Request(rid=rid, prompt=np.array(prompt, np.int64), **fields)


def run(one: Scheduler, *requests: Request) -> list[str]:
    """Add these, step until nothing is left, and return the rids in the order of their ends."""
    for each in requests:
        assert one.add(each)
    ended = []
    while one.has_work:
        ended += [each.rid for each in one.step().ended]
    return ended


def test_no_more_run_than_may_and_the_rest_follow_in_order():
    one = scheduler(max_running=2)
    requests = [request(str(index), sampling=Sampling(max_new_tokens=2 + index)) for index in range(4)]
    for each in requests:
        one.add(each)
    widths = []
    while one.has_work:
        one.step()
        widths.append(len(one.running))

    assert max(widths) <= 2
    assert [len(each.output_ids) for each in requests] == [2, 3, 4, 5]


def test_a_freed_slot_is_taken_in_the_next_step():
    one = scheduler(max_running=1)
    ended = run(
        one, request("a", sampling=Sampling(max_new_tokens=1)), request("b", sampling=Sampling(max_new_tokens=1))
    )

    assert ended == ["a", "b"]


def test_the_queue_has_its_limit():
    one = scheduler(max_running=1, max_queued=1)

    assert one.add(request("a"))
    assert not one.add(request("b"))
    one.step()
    assert one.add(request("b"))


def test_a_request_gets_the_same_tokens_alone_and_in_company():
    alone = request("x", sampling=Sampling(max_new_tokens=20, temperature=0.8))
    run(scheduler(), alone)
    together = request("x", sampling=Sampling(max_new_tokens=20, temperature=0.8))
    others = [request(str(index), prompt=(index,), sampling=Sampling(max_new_tokens=7 + index)) for index in range(5)]
    run(scheduler(max_running=4), *others[:2], together, *others[2:])

    assert alone.output_ids == together.output_ids
    assert alone.log_probs == pytest.approx(together.log_probs, abs=1e-6)


def test_scoring_gives_the_log_probs_it_was_sampled_with():
    sampled = request("x", sampling=Sampling(max_new_tokens=30))
    run(scheduler(), sampled)
    whole = (1, 2, 3, *sampled.output_ids)
    scored = request(
        "y", prompt=whole, sampling=Sampling(max_new_tokens=0), wanted=Wanted(log_probs=True, log_probs_from=0)
    )
    run(scheduler(), scored)

    assert scored.finish == {"type": "length", "length": 0}
    assert scored.output_ids == []
    assert scored.input_log_probs[0] is None
    assert scored.input_log_probs[3:] == pytest.approx(sampled.log_probs, abs=1e-6)


def test_scoring_from_the_middle_begins_with_nothing():
    scored = request(prompt=tuple(range(10)), wanted=Wanted(log_probs=True, log_probs_from=6))
    run(scheduler(), scored)

    assert scored.input_log_probs[0] is None
    assert scored.input_log_probs[1:] == pytest.approx(MODEL.log_probs(range(10), 7).tolist(), abs=1e-6)


def test_likeliest_and_chosen_tokens_are_listed():
    wanted = Wanted(log_probs=True, log_probs_from=0, top=2, token_ids=(5, 6))
    one = request(prompt=(1, 2), wanted=wanted, sampling=Sampling(max_new_tokens=3, limits=Limits(top_k=1)))
    run(scheduler(), one)

    assert [top[0][1] for top in one.top] == one.output_ids
    assert [top[0][0] for top in one.top] == pytest.approx(one.log_probs)
    assert all(top[0][0] >= top[1][0] for top in one.top)
    assert [[triple[1] for triple in chosen] for chosen in one.chosen] == [[5, 6]] * 3
    assert (one.input_top[0], one.input_chosen[0]) == (None, None)
    assert one.input_chosen[1][0][0] == pytest.approx(MODEL.log_probs([1, 5], 1)[0], abs=1e-5)


def test_a_stop_id_ends_it_and_is_part_of_the_output():
    free = request("x", sampling=Sampling(max_new_tokens=20))
    run(scheduler(), free)
    stop = free.output_ids[9]
    stopped = request("x", sampling=Sampling(max_new_tokens=20, stop_ids=frozenset({stop})))
    run(scheduler(), stopped)

    assert stopped.finish == {"type": "stop", "matched": stop}
    assert stopped.output_ids == free.output_ids[: free.output_ids.index(stop) + 1]


def test_a_stop_string_across_tokens_ends_it():
    free = request("x", sampling=Sampling(max_new_tokens=20))
    run(scheduler(), free)
    stop = bytes(free.output_ids[7:10]).decode()
    stopped = request("x", sampling=Sampling(max_new_tokens=20, stop=("nowhere", stop)))
    run(scheduler(), stopped)

    assert stopped.finish == {"type": "stop", "matched": stop}
    assert len(stopped.output_ids) == bytes(free.output_ids).decode().index(stop) + 3


def test_a_stop_pattern_ends_it():
    one = request("x", sampling=Sampling(max_new_tokens=200, stop_regex=("[0-9]",)))
    run(scheduler(), one)

    assert one.finish == {"type": "stop", "matched": "[0-9]"}
    assert chr(one.output_ids[-1]).isdigit()
    assert not any(chr(token).isdigit() for token in one.output_ids[:-1])


def test_forced_tokens_carry_the_models_own_log_probs():
    one = request(forced=(9, 8, 7), sampling=Sampling(max_new_tokens=3))
    run(scheduler(), one)

    assert one.output_ids == [9, 8, 7]
    assert one.log_probs == pytest.approx(MODEL.log_probs([1, 2, 3, 9, 8, 7], 3).tolist(), abs=1e-5)


def test_penalties_and_biases_change_what_comes():
    banned = Penalties(logit_bias=dict.fromkeys(range(63), -1e9))
    one = request(sampling=Sampling(max_new_tokens=5, penalties=banned))
    run(scheduler(), one)
    assert one.output_ids == [63] * 5

    never_twice = Penalties(presence=2.0, frequency=2.0, repetition=2.0)
    two = request(sampling=Sampling(max_new_tokens=20, temperature=0.01, penalties=never_twice))
    greedy = request(sampling=Sampling(max_new_tokens=20, temperature=0.01))
    run(scheduler(), two, greedy)
    assert len({*two.output_ids}) > len({*greedy.output_ids}) or len({*two.output_ids}) == 20


def test_no_end_before_the_least_number_of_tokens():
    ends = frozenset(range(64))
    one = request(sampling=Sampling(max_new_tokens=9, stop_ids=ends - {63}, penalties=Penalties(min_new_tokens=4)))
    run(scheduler(), one)

    assert one.output_ids[:4] == [63] * 4


def test_the_prompt_is_cached_up_to_its_last_token():
    one = scheduler(max_running=1)
    first, second, other = request("a"), request("b"), request("c", prompt=(1, 2, 9))
    run(one, first, second, other)

    assert (first.cached_tokens, second.cached_tokens, other.cached_tokens) == (0, 2, 2)


def test_those_that_start_together_do_not_share():
    first, second = request("a"), request("b")
    run(scheduler(max_running=2), first, second)

    assert (first.cached_tokens, second.cached_tokens) == (0, 0)


def test_an_answer_is_cached_but_for_its_last_token():
    one = scheduler()
    first = request("a", sampling=Sampling(max_new_tokens=5))
    run(one, first)
    follow_up = request("b", prompt=(1, 2, 3, *first.output_ids, 7))
    run(one, follow_up)

    assert follow_up.cached_tokens == 3 + 4


def test_a_prompt_that_is_scored_is_not_taken_from_the_cache():
    one = scheduler()
    run(one, request("a"))
    scored = request("b", wanted=Wanted(log_probs=True, log_probs_from=0))
    run(one, scored)

    assert scored.cached_tokens == 0


def test_retracted_requests_go_behind_the_queue_and_on_from_where_they_were():
    one = scheduler(max_running=1)
    first, second = request("a", sampling=Sampling(max_new_tokens=6)), request("b")
    one.add(first)
    one.step()
    one.step()
    one.add(second)
    one.pause(retract=True)
    assert (len(one.running), len(one.waiting), one.idle, one.has_work) == (0, 2, True, False)
    one.resume()
    assert run(one) == ["b", "a"]
    uninterrupted = request("a", sampling=Sampling(max_new_tokens=6))
    run(scheduler(), uninterrupted)

    assert first.output_ids == uninterrupted.output_ids
    assert first.retractions == 1


def test_a_retraction_gives_up_what_the_queue_has_no_room_for():
    one = scheduler(max_running=3, max_queued=2)
    requests = [request(rid) for rid in "abc"]
    for each in requests:
        one.add(each)
        one.step()
    (lost,) = one.pause(retract=True)

    assert lost is requests[2]
    assert lost.finish["status_code"] == 503
    assert len(lost.output_ids) == 1
    assert one.load == Load(running=3, waiting=0, used_tokens=3 * 3 + 3 + 2 + 1)
    assert one.load_now() == Load(running=0, waiting=2, retracted=2)


def test_spans_say_which_weights_sampled_what():
    one = scheduler()
    running, late = request("a", sampling=Sampling(max_new_tokens=6)), request("b")
    one.add(running)
    one.set_version("w1")
    one.step()
    one.step()
    one.set_version("w1")
    one.set_model(TinyModel.random(vocab=64, seed=2))
    one.set_version("w2")
    one.set_version("w3")
    one.step()
    run(one, late)

    assert running.spans(one.version) == [
        {"version": "w1", "start": 0, "end": 2},
        {"version": "w3", "start": 2, "end": 6},
    ]
    assert late.spans(one.version) == [{"version": "w3", "start": 0, "end": 4}]


def test_new_weights_sample_from_the_next_token_on():
    other = TinyModel.random(vocab=64, context_tokens=3, seed=2)
    one = scheduler()
    each = request(sampling=Sampling(max_new_tokens=10))
    one.add(each)
    for _ in range(4):
        one.step()
    one.set_model(other)
    run(one)
    whole = [1, 2, 3, *each.output_ids]

    assert each.log_probs[:4] == pytest.approx(MODEL.log_probs(whole[:7], 3).tolist(), abs=1e-5)
    assert each.log_probs[4:] == pytest.approx(other.log_probs(whole, 7).tolist(), abs=1e-5)


@pytest.mark.parametrize("token", [64, -1, 10**9])
def test_a_token_outside_the_vocabulary_is_fatal(token):
    one = scheduler()
    one.add(request(prompt=(1, token)))

    with pytest.raises(OutOfVocabulary, match=r"must lie in 0\.\.63"):
        one.step()


def test_everything_shows_its_state():
    one = scheduler()
    one.add(request("a"))
    one.step()

    assert repr(one) == "<Scheduler 1 running, 0 waiting | weights default>"
    assert repr(one.running[0]) == "<Request a 3+1 tokens, live>"
