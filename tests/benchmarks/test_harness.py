"""The benchmarks' arithmetic, and their fake server's."""

import json
import urllib.request

import pytest
from harness.fake import Latency, bottleneck
from harness.rounds import Run, exponent, ratio
from harness.spec import prompt_ids


def ask(server, number, tokens=4):
    body = {"rid": "f" * 32, "input_ids": prompt_ids(number, 8), "sampling_params": {"max_new_tokens": tokens}}
    with urllib.request.urlopen(f"{server.url}/generate", json.dumps(body).encode()) as answer:
        return json.load(answer)


def test_the_server_draws_the_latencies_that_the_ideal_schedule_is_made_of(server):
    """Of a prompt's number and how often it was asked for, whatever the order."""
    latency = Latency(median=5, sigma=0.5, cap=100, seed=3)
    server.configure(latency)
    for number, times in ((5, 0), (9, 0), (5, 1)):
        took = ask(server, number)["meta_info"]["e2e_latency"]
        assert took >= latency.draw(number, times)
    server.configure(Latency(median=5))
    assert latency.draw(5, 0) != latency.draw(5, 1) != latency.draw(9, 0)


@pytest.mark.parametrize("tokens", [0, 4, 512])
def test_an_answer_has_as_many_log_probs_as_tokens(server, tokens):
    server.configure()
    answer = ask(server, 1, tokens)
    rows = answer["meta_info"]["output_token_logprobs"]
    assert [row[1] for row in rows] == answer["output_ids"]
    assert len(rows) == tokens == answer["meta_info"]["completion_tokens"]


def test_a_busy_or_late_server_is_named_as_the_bottleneck():
    idle = {"wall": 2.0, "cpu": 0.2, "late_p50_ms": 1.0}
    assert bottleneck(idle) is None
    assert "busy 95%" in str(bottleneck({**idle, "cpu": 1.9}))
    assert "late" in str(bottleneck({**idle, "late_p50_ms": 40.0}))


def test_ratios_are_taken_round_by_round():
    """A round in which one of the two has no result does not count."""

    def run(arm, number, value, failed=None):
        return Run(cell="c", arm=arm, round=number, load=0.0, figures={"x": value}, failed=failed)

    runs = [
        run("a", 0, 2.0),
        run("b", 0, 4.0),
        run("a", 1, 9.0),
        run("b", 1, 10.0),
        run("a", 2, 1.0),
        run("b", 2, 1.0, "no"),
    ]
    found = ratio(runs, ("c", "a"), ("c", "b"), "x")
    assert (found.value, found.low, found.high, found.count) == (0.7, 0.5, 0.9, 2)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_a_power_law_gives_its_exponent(power):
    assert exponent([(x, 7 * x**power) for x in (10.0, 100.0, 1000.0)]) == pytest.approx(power)
