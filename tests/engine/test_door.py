"""The door of the package: a wrong argument is named when a public function is called, and not in a rollout."""

import functools
import re

import attrs
import pytest

import trio_rollout as tr
from trio_rollout.errors import RolloutError, SettingsError, SettingsTypeError, SourceError
from trio_rollout.gateway import GatewaySettings, open_gateway
from trio_rollout.testing import FakeServers
from trio_rollout.tiny import TinySettings
from trio_rollout.tools import ExecLimits, SandboxSettings


async def entered(manager):
    """Open something and leave it at once."""
    async with manager:
        pass


async def score(trajectory):
    return 1.0


def sync_score(trajectory):
    return 1.0


class SyncScorer:
    def __call__(self, trajectory) -> float:
        return 1.0

    def method(self, trajectory):
        return 1.0


class AsyncScorer:
    async def __call__(self, trajectory):
        return 1.0


WRAPPER = lambda t: sync_score(trajectory=t)
HANDS_ON = lambda t: score(trajectory=t)


def source():
    return tr.IterableSource([])


def engine(**changes):
    """Return an engine to open, with some parts replaced."""
    parts = {"source": source(), "generate": tr.SingleTurn(), "servers": FakeServers()} | changes
    return tr.open_rollout_engine(parts.pop("source"), parts.pop("generate"), **parts)


ENGINE = {
    "a list of URLs": ({"servers": ["http://127.0.0.1:1"]}, "servers: got list ['http://127.0.0.1:1'], allowed: what open_sglang_servers(urls)"),
    "a client that is not open": ({"servers": tr.open_sglang_servers(["http://127.0.0.1:1"])}, "servers: got _AsyncGeneratorContextManager"),
    "servers as a class": ({"servers": FakeServers}, "servers: got type"),
    "a list of prompts": ({"source": [tr.Prompt(id="1", text="x")]}, "source: got list [Prompt(id='1'"),
    "a path": ({"source": "prompts.jsonl"}, "a JsonlSource(path) of a file"),
    "a source as a class": ({"source": tr.JsonlSource}, "source: got type"),
    "a synchronous generate function": ({"generate": sync_score}, "generate: got function"),
    "no generate function": ({"generate": tr.SamplingParams()}, "generate: got SamplingParams"),
    "a generate function as a class": ({"generate": tr.SingleTurn}, "generate: got type"),
    "a synchronous reward": ({"reward": sync_score}, "this one is synchronous: trio_rollout.in_thread(f) makes it async"),
    "a synchronous method": ({"reward": SyncScorer().method}, "this one is synchronous"),
    "a synchronous object": ({"reward": SyncScorer()}, "this one is synchronous"),
    "a wrapped synchronous function": ({"reward": functools.wraps(sync_score)(WRAPPER)}, "this one is synchronous"),
    "a name": ({"reward": "exact_match"}, "reward: got str 'exact_match', allowed: an async function"),
    "a synchronous group reward": ({"group_reward": sync_score}, "group_reward: got function"),
    "a synchronous filter": ({"group_filter": sync_score}, "group_filter: got function"),
    "a ledger's path": ({"ledger": "runs/demo"}, "ledger: got str 'runs/demo', allowed: what open_ledger(path) gives"),
    "a ledger that is not open": ({"ledger": tr.open_ledger("runs/demo")}, "ledger: got _AsyncGeneratorContextManager"),
    "settings as a dict": ({"settings": {"max_running": 4}}, "settings: got dict"),
    "settings as a class": ({"settings": tr.EngineSettings}, "settings: got type"),
    "an instrument as a class": ({"instruments": [type("I", (), {"event": print})]}, "instruments: got type"),
    "a function as an instrument": ({"instruments": [print]}, "instruments: got builtin_function_or_method"),
    "a gateway that is not open": ({"gateway": "http://x"}, "gateway: got str"),
}  # fmt: skip


@pytest.mark.parametrize("what", ENGINE)
async def test_f167_a_part_of_another_kind_is_refused_when_the_engine_is_opened(what):
    changes, words = ENGINE[what]
    with pytest.raises(SettingsTypeError, match=re.escape(words)) as caught:
        await entered(engine(**changes))
    assert isinstance(caught.value, SettingsError)
    assert isinstance(caught.value, TypeError)


async def test_f167_a_coroutine_in_place_of_its_function_is_refused(recwarn):
    with pytest.raises(SettingsTypeError, match="the async function itself, without a call"):
        await entered(engine(reward=score(None)))
    assert not recwarn.list, "no warning that it was never awaited"


def hands_on(trajectory) -> "tr.abc.Awaitable[float]":
    return score(trajectory)


@pytest.mark.parametrize(
    "reward",
    [score, AsyncScorer(), AsyncScorer().__call__, functools.partial(score), HANDS_ON, hands_on,
     tr.in_thread(sync_score), tr.exact_match, tr.regex_reward("x"), functools.wraps(score)(HANDS_ON), None],
)  # fmt: skip
async def test_f167_what_may_be_async_is_taken(reward):
    await entered(engine(reward=reward))


async def test_f167_an_evaluation_and_batches_check_at_once():
    async with engine() as opened:
        with pytest.raises(SettingsTypeError, match=r"source: got list \[\]"):
            await opened.evaluate([])
        with pytest.raises(SettingsTypeError, match="this one is synchronous"):
            await opened.evaluate(source(), sync_score)
        with pytest.raises(ValueError, match="samples_per_prompt must be an integer >= 1, got 0"):
            await opened.evaluate(source(), samples_per_prompt=0)
        for size in (0, "8", 1.5, True):
            with pytest.raises(ValueError, match="batches: size must be an integer >= 1"):
                opened.batches(size)
        for grace in ("soon", float("nan")):
            with pytest.raises(ValueError, match="drain: grace must be a number of seconds"):
                await opened.drain(grace)


SETTINGS = {
    tr.EngineSettings: [("samples", "samples_per_prompt"), ("max_runing", "max_running"), ("deadline", "deadlines")],
    tr.Deadlines: [("groups", "group"), ("progress", "no_progress")],
    tr.Retry: [("attempts", "max_attempts"), ("max_attempt", "max_attempts")],
    tr.Staleness: [("max_version", "max_versions"), ("versions", "max_versions")],
    tr.Discard: [("recycles", "max_recycles")],
    tr.SamplingParams: [("temprature", "temperature"), ("max_tokens", "max_new_tokens"), ("stops", "stop")],
    tr.ServerSettings: [("vocabsize", "vocab_size"), ("key", "api_key")],
    GatewaySettings: [("ports", "port")],
    TinySettings: [("vocabs", "vocab")],
    ExecLimits: [("max_process", "max_processes")],
    SandboxSettings: [("creates", "create")],
    tr.JsonlSource: [("prompts_key", "prompt_key"), ("shuffle", "shuffle_seed")],
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_f167_an_unknown_name_of_a_setting_is_refused_with_the_closest(kind):
    for name, meant in SETTINGS[kind]:
        assert meant in {field.alias for field in attrs.fields(kind)}
        with pytest.raises(
            SettingsTypeError, match=rf"{kind.__name__} has no setting '{name}': did you mean .*\b{meant}\b.*\?"
        ):
            kind(**{name: 1})
    with pytest.raises(SettingsTypeError, match=f"{kind.__name__} has no setting 'zzzz': allowed: "):
        kind(zzzz=1)


def test_f167_a_setting_of_another_type_is_refused_in_the_same_form():
    for name, value, allowed in (
        ("deadlines", 5, "Deadlines"),
        ("retry", {"max_attempts": 3}, "Retry"),
        ("staleness", 3, "Staleness"),
        ("partial", "no", "bool"),
        ("wait_for_weights", 1, "bool"),
    ):
        with pytest.raises(
            SettingsTypeError, match=re.escape(f"EngineSettings.{name}: got {value!r}, allowed: {allowed}")
        ):
            tr.EngineSettings(**{name: value})
    with pytest.raises(SettingsTypeError, match=r"Staleness\.policy: got 'pace', allowed: Pace or Discard"):
        tr.Staleness(policy="pace")


URLS = {
    "htp://host:1": "its scheme is 'htp'",
    "ftp://host:1": "its scheme is 'ftp'",
    "host:1": "it has no scheme",
    "localhost": "it has no scheme",
    "http://": "it has no host",
    "http://host:99999": "Port out of range",
    "http://user@host:1": "a user, a query or a fragment",
    "": "it has no scheme",
}


@pytest.mark.parametrize("url", URLS)
async def test_f167_a_url_that_is_none_is_refused_when_the_client_is_opened(url):
    for arguments in ({"urls": [url]}, {"urls": ["http://127.0.0.1:1", url]}, {"router": url}):
        with pytest.raises(SettingsError, match=re.escape(URLS[url])):
            await entered(tr.open_sglang_servers(**arguments))


CALLS = {
    "one URL": (lambda: tr.open_sglang_servers("http://127.0.0.1:1"), "urls: got str 'http://127.0.0.1:1', allowed: a sequence of URLs"),
    "a URL that is a number": (lambda: tr.open_sglang_servers([5]), "a server's URL: got 5"),
    "settings of the client": (lambda: tr.open_sglang_servers(["http://127.0.0.1:1"], settings={}), "settings: got dict {}"),
    "a tokenizer": (lambda: tr.open_sglang_servers(["http://127.0.0.1:1"], tokenizer=5), "tokenizer: got int 5"),
    "a ledger's path": (lambda: tr.open_ledger(5), "path: got int 5, allowed: the path of a directory"),
    "a ledger's settings": (lambda: tr.open_ledger("x", settings={"a": 1}), "settings: got dict {'a': 1}, allowed: texts by name"),
    "a gateway's settings": (lambda: open_gateway(FakeServers(), tokenizer="x", settings=5), "settings: got int 5"),
    "a gateway's tokenizer": (lambda: open_gateway(FakeServers(), tokenizer=5), "tokenizer: got int 5"),
    "processes": (lambda: tr.open_scorer_processes(5), "fn: got int 5, allowed: a synchronous function"),
}  # fmt: skip


@pytest.mark.parametrize("what", CALLS)
async def test_f167_an_argument_of_another_type_is_refused_when_something_is_opened(what):
    call, words = CALLS[what]
    with pytest.raises(SettingsTypeError, match=re.escape(words)):
        await entered(call())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tr.in_thread(5), "fn: got int 5, allowed: a synchronous function"),
        (lambda: tr.in_thread(score), "an async one needs no thread"),
        (lambda: tr.in_process(5), "fn: got int 5"),
        (lambda: tr.in_process(score), "an async one needs no process"),
        (lambda: tr.regex_reward(5), "pattern: got int 5"),
        (
            lambda: tr.SingleTurn({"temperature": 1}),
            "SingleTurn.sampling: got {'temperature': 1}, allowed: SamplingParams",
        ),
        (lambda: tr.JsonlSource(5), "JsonlSource.path: got 5"),
        (lambda: tr.JsonlSource(__file__, prompt_key=None), "JsonlSource.prompt_key: got None, allowed: a string"),
        (lambda: tr.JsonlSource(__file__, label_key=5), "JsonlSource.label_key: got 5, allowed: a string or None"),
    ],
)
def test_f167_an_argument_of_another_type_is_refused_when_something_is_made(call, words):
    with pytest.raises(SettingsTypeError, match=re.escape(words)):
        call()


@pytest.mark.parametrize("prompts", ["prompts", b"x", {"id": 1}, 5, None])
def test_f167_what_gives_no_prompts_is_refused(prompts):
    with pytest.raises((SourceError, RolloutError), match="IterableSource needs an iterable of Prompt"):
        tr.IterableSource(prompts)
