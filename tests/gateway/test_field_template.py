"""Failures from the field: variables of chat templates, words of the assistant at the end, and forms behind thoughts."""

import httpx
import openai
import pytest

from trio_rollout import Prompt, SamplingParams, open_sglang_servers
from trio_rollout.errors import RequestRejected, SettingsError
from trio_rollout.gateway import Drift, GatewaySettings, open_gateway
from trio_rollout.tiny import DATA, open_tiny_server
from trio_rollout.tokenizer import load_tokenizer

from .conftest import WEATHER
from .talk import APIS, IDS, WAYS, talking
from .templates import ONE_SYSTEM, THINKING, folder_with
from .test_field_turns import PATHS, body_of
from .virtual import LoneRollout, NoParser

pytestmark = pytest.mark.usefixtures("clients_leave_generators")

OFF = "<think>\n\n</think>\n\n"
SCRIPT = """
[[rules]]
contains = "degrees at 2"
answer = "It is sunny."

[[rules]]
contains = "weather"
answer = "Let me look."
calls = [{ name = "weather", arguments = { city = "Paris" } }]

[[rules]]
answer = " fine and sunny."
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.toml"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


@pytest.fixture
def thinking(tmp_path):
    """A folder whose chat template has the variables ``enable_thinking`` and ``reasoning_effort``."""
    return folder_with(THINKING, tmp_path / "model")


def thinking_off(api):
    """Return the fields of a request that switch thinking off in this protocol."""
    return {
        "chat": {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        "responses": {"reasoning": {"effort": "none"}},
        "messages": {"thinking": {"type": "disabled"}},
    }[api]


def effort(api, value):
    return {
        "chat": {"reasoning_effort": value},
        "responses": {"reasoning": {"effort": value}},
        "messages": {"output_config": {"effort": value}},
    }[api]


async def asked(session, way, **options):
    async with talking(session, way, options=options) as talk:
        await talk.user("hello").ask()


@pytest.mark.parametrize("way", WAYS, ids=IDS)
async def test_f152_a_request_gives_the_template_its_variables(run_agent_once, thinking, tiny_tokenizer, way):
    async def agent(session):
        await asked(session, way)
        await asked(session, way, **thinking_off(way[0]))
        await asked(session, way, **effort(way[0], "low"))

    rows = (await run_agent_once(agent, tokenizer=thinking)).segments
    plain, off, low = [tiny_tokenizer.decode(row.tokens[: len(row.tokens) - row.response_length]) for row in rows]

    assert OFF not in plain
    assert off.endswith(f"<|im_start|>assistant\n{OFF}")
    assert low.startswith("<effort>low</effort>")
    assert "<effort>" not in plain


@pytest.mark.parametrize("way", [("chat", False), ("chat", True)], ids=["whole", "streamed"])
async def test_f152_an_effort_of_none_switches_thinking_off_in_chat_too(run_agent_once, thinking, tiny_tokenizer, way):
    async def agent(session):
        await asked(session, way, reasoning_effort="none")

    (row,) = (await run_agent_once(agent, tokenizer=thinking)).segments
    assert OFF in tiny_tokenizer.decode(row.tokens)


@pytest.mark.parametrize("way", WAYS, ids=IDS)
async def test_f152_settings_give_variables_and_a_request_wins(run_agent_once, thinking, tiny_tokenizer, way):
    """The tokenizer's are the weakest, then those of the gateway, then those of the request."""
    tokenizer = load_tokenizer(thinking, variables={"enable_thinking": False, "reasoning_effort": "tiny"})

    async def agent(session):
        await asked(session, way)
        await asked(session, way, **effort(way[0], "high"))

    settings = {"template_variables": {"reasoning_effort": "low"}}
    rows = (await run_agent_once(agent, tokenizer=tokenizer, gateway=settings)).segments
    first, second = [tiny_tokenizer.decode(row.tokens) for row in rows]

    assert first.startswith("<effort>low</effort>")
    assert second.startswith("<effort>high</effort>")
    assert OFF in first
    assert OFF in second


@pytest.mark.parametrize("way", WAYS, ids=IDS)
async def test_f152_a_tool_loop_without_thinking_is_one_row(run_agent_once, thinking, way):
    """Templates write an empty thought into the newest answer only: the same words."""
    drift = []

    async def agent(session):
        async with talking(session, way, tools=[WEATHER], options=thinking_off(way[0])) as talk:
            talk.user("the weather, please")
            for turn in range(3):
                talk.result((await talk.ask()).calls[0], f"degrees at {turn}")
            assert (await talk.ask()).text == "It is sunny."
        drift.append(session.statistics().drift)

    assert len((await run_agent_once(agent, tokenizer=thinking)).segments) == 1
    assert Drift.FORKED not in drift[0]


async def test_f152_other_variables_in_front_of_a_known_answer_are_a_fork(run_agent_once, thinking):
    drift = []

    async def agent(session):
        async with talking(session, ("chat", False)) as talk:
            for value in ("low", "low", "high"):
                talk.options = effort("chat", value)
                await talk.user("hello").ask()
        drift.append(session.statistics().drift)

    assert len((await run_agent_once(agent, tokenizer=thinking)).segments) == 2
    assert drift[0][Drift.FORKED] == 1


async def test_f152_variables_that_the_caller_of_a_template_sets_are_refused(run_agent_once, thinking):
    with pytest.raises(SettingsError, match="template_variables: got messages"):
        GatewaySettings(template_variables={"messages": []})
    with pytest.raises(SettingsError, match="variables: got tools"):
        load_tokenizer(thinking, variables={"tools": []})

    async def agent(session):
        with pytest.raises(openai.BadRequestError, match="chat_template_kwargs: got messages"):
            await asked(session, ("chat", False), extra_body={"chat_template_kwargs": {"messages": []}})
        await asked(session, ("chat", False))

    await run_agent_once(agent)


@pytest.mark.parametrize("joined", [True, False], ids=["joined", "two messages"])
@pytest.mark.parametrize("way", WAYS, ids=IDS)
async def test_f152_words_of_the_assistant_are_continued(run_agent_once, tmp_path, tiny_tokenizer, way, joined):
    """The answer goes on behind them; they are context, and the next turn goes on behind both."""

    async def agent(session):
        async with talking(session, way) as talk:
            for _ in range(2):
                talk.user("How is it?").history.append({"role": "assistant", "content": "It is"})
                assert (await talk.ask()).text == " fine and sunny."
                if joined:
                    talk.history[-2:] = [{"role": "assistant", "content": "It is fine and sunny."}]
        assert Drift.FORKED not in session.statistics().drift

    folder = folder_with(ONE_SYSTEM, tmp_path / "model")
    (row,) = (await run_agent_once(agent, tokenizer=folder)).segments
    written = tiny_tokenizer.decode(row.tokens)
    trained = tiny_tokenizer.decode(row.tokens[len(row.tokens) - row.response_length :][row.loss_mask == 1])
    assert written.count("<|im_start|>assistant\nIt is fine and sunny.<|im_end|>") == 2
    assert trained == " fine and sunny.<|im_end|>" * 2


async def test_f152_words_in_front_of_an_answer_that_is_known_are_continued(run_agent_once, tmp_path, tiny_tokenizer):
    """The words come behind a recorded answer: its ids are kept, and the words are context."""

    async def agent(session):
        async with talking(session, ("messages", False), tools=[WEATHER]) as talk:
            first = await talk.user("the weather, please").ask()
            talk.result(first.calls[0], "degrees at 2").history.append({"role": "assistant", "content": "I say:"})
            assert (await talk.ask()).text

    (row,) = (await run_agent_once(agent)).segments
    assert "<|im_start|>assistant\nI say:" in tiny_tokenizer.decode(row.tokens)


async def test_f152_prompts_of_a_program_are_continued_and_have_variables(thinking):
    tokenizer = load_tokenizer(thinking, variables={"reasoning_effort": "low"})
    ends = [{"role": "user", "content": "How is it?"}, {"role": "assistant", "content": "It is "}]
    async with open_tiny_server() as tiny, open_sglang_servers([tiny.url], tokenizer=tokenizer) as servers:
        written = tokenizer.decode(servers.encode(Prompt(id="1", messages=ends)))
        assert written.startswith("<effort>low</effort>")
        assert written.endswith("It is ")
        assert list(servers.encode(Prompt(id="1", messages=ends[:1]))) == tokenizer.apply_chat_template(ends[:1])
    with pytest.raises(RequestRejected, match="can't be continued"):
        tokenizer.render_chat([ends[0], {"role": "assistant", "content": ""}], continue_final_message=True)


class Thinks(NoParser):
    finds_thoughts = True


class Watched(LoneRollout):
    """A rollout that keeps what was sent beside the ids."""

    def __init__(self):
        super().__init__()
        self.sent = []

    async def generate(self, input_ids, sampling=None, *, extra=None, on_tokens=None):
        self.sent.append(dict(extra or {}))
        return await super().generate(input_ids, sampling, on_tokens=on_tokens)


def with_schema(api):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "answer", "schema": schema}
    return {
        "chat": {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}},
        "responses": {"text": {"format": form}},
        "messages": {"output_config": {"format": form}},
    }[api]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", APIS)
async def test_f149_a_form_of_the_answer_begins_behind_the_thoughts(autojump_clock, api, stream):
    """Only for a policy that thinks, and in a request that does not switch thinking off."""
    off = {
        "chat": {"chat_template_kwargs": {"enable_thinking": False}},
        "responses": {"reasoning": {"effort": "none"}},
        "messages": {"thinking": {"type": "disabled"}},
    }[api]
    cases = [(Thinks(), {}, True), (Thinks(), off, False), (NoParser(), {}, False)]
    for parser, more, wanted in cases:
        rollout = Watched()
        async with open_gateway(rollout.servers, tokenizer=DATA, parser=parser) as gateway:
            opened = gateway.open_session(rollout, prompt=Prompt(id="p", text="x"), sampling=SamplingParams())
            async with opened as session, httpx.AsyncClient(trust_env=False) as client:
                for form in ({}, with_schema(api)):
                    body = {**body_of(api, stream=stream), **more, **form}
                    answer = await client.post(
                        session.base_url + PATHS[api], json=body, headers={"x-api-key": session.api_key}
                    )
                    assert answer.status_code == 200, answer.text
        assert rollout.sent == [{}, {"require_reasoning": True} if wanted else {}]
