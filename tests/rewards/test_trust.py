"""A scorer's process is trusted less than the host: its replies are data, and nothing that it starts outlives it."""

import json
import pickle
import re
import signal
import struct
import sys

import pytest
import trio

from trio_rollout._core.scores import score_of, scores_of
from trio_rollout.errors import RewardError
from trio_rollout.rewards import in_process, open_scorer_processes
from trio_rollout.rewards._worker import REPLY_LIMIT

from .conftest import appeared, runs, until_gone


def framed(body):
    """Return a message as a process sends it."""
    return struct.pack("<Q", len(body)) + body


def reply(*content):
    """Return a reply as a process sends it."""
    return framed(json.dumps([1, *content]).encode())


MALFORMED = {
    "no JSON": (framed(b"{oops"), "b'{oops' is not JSON"),
    "half a character": (framed(b'["value", "\xff"]'), "is not JSON"),
    "endless nesting": (framed(b"[" * 100_000), "is not JSON"),
    "a number of 5000 digits": (framed(b'["value", ' + b"1" * 5000 + b"]"), "is not JSON"),
    "nothing": (framed(b""), "is not JSON"),
    "too long": (struct.pack("<Q", 2**63) + b"x", f"a reply of {2**63} bytes, allowed: {REPLY_LIMIT}"),
    "a little too long": (struct.pack("<Q", REPLY_LIMIT + 1), f"a reply of {REPLY_LIMIT + 1} bytes"),
    "another form": (framed(b"5"), "got int 5"),
    "no value": (reply("value"), "got list [1, 'value']"),
    "two values": (reply("value", 1, 2), "got list [1, 'value', 1, 2]"),
    "another kind": (reply("values", 1), "got list [1, 'values', 1]"),
    "the reply to the setup": (reply("ready", 5), "got list [1, 'ready', 5]"),
    "an error without a class": (reply("error", [], "m", "t"), "got list [1, 'error', []"),
    "an error whose class is a number": (reply("error", [1], "m", "t"), "got list [1, 'error', [1]"),
    "an error without a traceback": (reply("error", ["a.B"], "m"), "got list [1, 'error'"),
    "an error whose text is none": (reply("error", ["a.B"], None, "t"), "got list [1, 'error'"),
    "a reply to no request": (framed(b'[0, "value", 1]'), "the reply to request 0, wanted: to 1"),
    "a number that is no number": (framed(b'["1", "value", 1]'), "got list ['1', 'value', 1]"),
    "an array of texts": (reply("array", ["x"]), "got list [1, 'array', ['x']]"),
    "no array": (reply("array", 5), "got list [1, 'array', 5]"),
}


@pytest.mark.parametrize("what", MALFORMED)
async def test_f176_a_malformed_reply_is_a_reward_error_that_says_what_was_seen(scorers, what):
    """The process is ended, and the next call has another one."""
    data, words = MALFORMED[what]
    async with open_scorer_processes(scorers.forge, workers=1) as reward:
        (pid,) = reward.pids
        with pytest.raises(RewardError, match=re.escape(words)) as caught:
            await reward(data)
        assert f"the scorer's process {pid} sent a malformed reply and was ended: " in str(caught.value)
        assert len(str(caught.value)) < 400
        assert reward.pids == ()
        assert not runs(pid)
        with pytest.raises(RewardError, match="malformed"):
            await reward(data)


async def test_f176_no_reply_runs_code_here(scorers):
    """Neither a result that pickles itself as a call nor a pickle in place of a reply."""
    with pytest.raises(RewardError, match="not Evil"):
        await in_process(scorers.evil_result)(0)
    with pytest.raises(RewardError, match="is not JSON"):
        await in_process(scorers.forge)(framed(pickle.dumps(("value", scorers.Evil()))))
    assert not await trio.Path(scorers.EVIDENCE).exists()


@pytest.mark.parametrize("cut", [0, 4, 8, 20])
async def test_f176_a_process_that_ends_within_a_reply_has_died(opened, scorers, cut):
    async with opened(scorers.forge_and_exit) as reward:
        with pytest.raises(RewardError, match="died while it was asked, exit status 0"):
            await reward(reply("value", "a text of some length")[:cut])


async def test_f176_a_second_reply_is_not_taken_for_that_of_the_next_call(scorers):
    async with open_scorer_processes(scorers.reply_twice, workers=1) as reward:
        assert await reward(reply("value", 7)) == 7  # nothing tells this one from the scorer's own
        with pytest.raises(RewardError, match=r"malformed reply .* the reply to request 1, wanted: to 2"):
            await reward(reply("value", 7))


async def test_f176_a_result_that_is_too_large_is_a_reward_error(opened, scorers):
    async with opened(scorers.Scale(2)) as reward:
        with pytest.raises(RewardError, match=rf"takes \d+ bytes, at most {REPLY_LIMIT} can be sent back"):
            await reward("x" * (REPLY_LIMIT // 2))


async def test_f176_an_error_with_a_long_text_keeps_its_class(opened, scorers):
    async with opened(scorers.complain) as reward:
        with pytest.raises(RewardError, match="the scorer raised: ValueError: xxx") as caught:
            await reward("x" * 2 * REPLY_LIMIT)
    assert caught.value.raised[0] == "builtins.ValueError"


REWARDS = {
    "a number": "0.1",
    "an integer": "3",
    "numpy's number": "__import__('numpy').float32(0.5)",
    "an array of one": "__import__('numpy').array([0.5])",
    "an array without dimensions": "__import__('numpy').array(0.5)",
    "a fraction": "__import__('fractions').Fraction(1, 2)",
    "a decimal": "__import__('decimal').Decimal('0.5')",
    "by name": "{'a': 1, 'b': __import__('numpy').float64(0.1)}",
    "by other names": "{1: 0.5}",
}


@pytest.mark.parametrize("what", REWARDS)
async def test_f176_what_may_be_a_reward_here_may_come_from_a_process(opened, scorers, what):
    async with opened(scorers.identity) as reward:
        assert score_of(await reward(REWARDS[what]), "r") == score_of(eval(REWARDS[what]), "r")


@pytest.mark.parametrize("values", ["[1, 0.5]", "(1, 0.5)", "__import__('numpy').array([1, 0.5])"])
async def test_f176_so_may_the_rewards_of_a_group(opened, scorers, values):
    async with opened(scorers.identity) as reward:
        assert scores_of(await reward(values), 2, "r", str) == [1.0, 0.5]


@pytest.mark.parametrize("value", ["float('nan')", "None", "'text'", "[1]", "{}", "__import__('numpy').zeros((2, 2))"])
async def test_f176_what_is_no_reward_is_none_from_a_process(scorers, value):
    found = await in_process(scorers.identity)(value)
    with pytest.raises(RewardError):
        score_of(found, "r")


@pytest.mark.parametrize("value", ["b'x'", "{1, 2}", "object()", "[len]", "{'a': 1j}", "{1: 0, '1': 0}"])
async def test_f176_a_result_that_is_no_data_is_a_reward_error(scorers, value):
    with pytest.raises(RewardError, match=r"the scorer raised: (TypeError|ValueError): "):
        await in_process(scorers.identity)(value)


async def test_f177_what_a_scorer_leaves_in_another_session_ends_with_the_call(scorers, tmp_path):
    assert await in_process(scorers.daemon)(str(tmp_path / "pid")) == 1.0
    assert not runs(int(await appeared(tmp_path / "pid.done")))


async def test_f177_or_with_the_processes(scorers, tmp_path):
    async with open_scorer_processes(scorers.daemon, workers=1) as reward:
        assert await reward(str(tmp_path / "pid")) == 1.0
        pid = int(await appeared(tmp_path / "pid.done"))
        assert runs(pid)
    assert not runs(pid)


async def test_f177_or_when_the_call_is_cancelled(opened, scorers, tmp_path):
    async with opened(scorers.daemon_and_spin) as reward, trio.open_nursery() as nursery:
        nursery.start_soon(reward, str(tmp_path / "pid"))
        pid = int(await appeared(tmp_path / "pid.done"))
        nursery.cancel_scope.cancel()
    assert not runs(pid)


async def test_f177_or_when_the_scorer_dies(opened, scorers, tmp_path):
    async with opened(scorers.daemon_and_die) as reward:
        with pytest.raises(RewardError, match=f"exit status {-signal.SIGSEGV}$"):
            await reward(str(tmp_path / "pid"))
        assert not runs(int(await appeared(tmp_path / "pid.done")))


async def test_f177_or_although_the_scorer_has_stopped_its_keeper(opened, scorers, tmp_path):
    async with opened(scorers.daemon_and_stop_the_keeper) as reward:
        assert await reward(str(tmp_path / "pid")) == 1.0
    assert not runs(int(await appeared(tmp_path / "pid.done")))


async def test_f177_a_scorer_dies_with_its_keeper(opened, scorers, tmp_path):
    async with opened(scorers.kill_the_keeper) as reward:
        with pytest.raises(RewardError, match=f"exit status {-signal.SIGKILL}$"):
            await reward(str(tmp_path / "pid"))
    await until_gone(int(await appeared(tmp_path / "pid.done")))


HOST = """
import sys
import trio
import scorers_of_a_user
from trio_rollout.rewards import in_process

trio.run(in_process(scorers_of_a_user.daemon_and_spin), sys.argv[1])
"""


async def test_f177_what_a_scorer_has_left_dies_with_the_host(scorers, tmp_path):
    (tmp_path / "main.py").write_text(HOST, encoding="utf-8")
    host = await trio.lowlevel.open_process([sys.executable, "main.py", str(tmp_path / "pid")], cwd=tmp_path)
    pid = int(await appeared(tmp_path / "pid.done"))

    host.kill()
    await host.wait()

    await until_gone(pid)
