"""Failures from the field: calls, tools and tool results of every shape."""

import json

import anthropic
import attrs
import openai
import pytest

from trio_rollout import Prompt, SamplingParams, ServerSettings, open_sglang_servers
from trio_rollout.gateway import Call, Drift, Parsed, open_gateway
from trio_rollout.gateway._fields import CHAT_TOOLS, MESSAGES_TOOLS, RESPONSES_TOOLS, Use
from trio_rollout.testing import Reply, open_fake_sglang

from .conftest import WEATHER
from .talk import APIS, IDS, WAYS, talking
from .templates import ONE_SYSTEM, folder_with

pytestmark = pytest.mark.usefixtures("clients_leave_generators")


@pytest.fixture
def script(tmp_path):
    """Scripts are written by the tests: see ``says``."""
    path = tmp_path / "script.toml"
    path.write_text('[[rules]]\nanswer = "Hello!"\n', encoding="utf-8")
    return path


@pytest.fixture
def says(script):
    """Make the model answer with these texts: each by a part of the prompt's last message, or the last of all."""

    def write(default="Hello!", **by_last):
        rules = [
            f"[[rules]]\nlast_contains = {json.dumps(last)}\nanswer = {json.dumps(text)}\n"
            for last, text in by_last.items()
        ]
        script.write_text("\n".join([*rules, f"[[rules]]\nanswer = {json.dumps(default)}\n"]), encoding="utf-8")

    return write


def call_text(arguments, name="weather"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@attrs.define
class FixedParser:
    """Finds one call with these parameters in every answer to a request with tools."""

    parameters: str = ""
    finds_thoughts = False

    def parses_markup(self, tools):
        return bool(tools)

    async def parse(self, text, tools):
        calls = (Call(name="weather", parameters=self.parameters),) if "call" in text else ()
        return Parsed(text="" if calls else text, calls=calls)


ARGUMENTS = {
    "null": {},
    "[1, 2]": {"arguments": [1, 2]},
    '"Paris"': {"arguments": "Paris"},
    "3": {"arguments": 3},
    "false": {"arguments": False},
    '"{\\"city\\": \\"Paris\\"}"': {"city": "Paris"},
    '{"city": "Paris", "days": 2.0, "deep": {"a": [1.0, null]}}': {
        "city": "Paris",
        "days": 2.0,
        "deep": {"a": [1.0, None]},
    },
}


@pytest.mark.parametrize("way", WAYS, ids=IDS)
async def test_f151_arguments_are_an_object_and_are_recognised(run_agent_once, says, tmp_path, way):
    says(**{f"case {place}.": call_text(written) for place, written in enumerate(ARGUMENTS)}, default="It is sunny.")

    async def agent(session):
        async with talking(session, way, tools=[WEATHER]) as talk:
            for place, wanted in enumerate(ARGUMENTS.values()):
                first = await talk.user(f"case {place}.").ask()
                assert [(call.name, call.arguments) for call in first.calls] == [("weather", wanted)]
                # A client in JavaScript writes 2.0 as 2, and most write their own spacing.
                talk.history = json.loads(json.dumps(talk.history).replace("2.0", "2").replace("1.0", "1"))
                assert (await talk.result(first.calls[0]).ask()).text == "It is sunny."
        assert Drift.FORKED not in session.statistics().drift

    folder = folder_with(ONE_SYSTEM, tmp_path / "model")
    assert len((await run_agent_once(agent, tokenizer=folder)).segments) == 1


@pytest.mark.parametrize("way", WAYS, ids=IDS)
async def test_f151_arguments_that_are_no_json_are_an_object_too(run_agent_once, says, way):
    says(default="I call.", **{"22 degrees": "It is sunny."})
    parser = FixedParser()

    async def agent(session):
        async with talking(session, way, tools=[WEATHER]) as talk:
            for parser.parameters in ("", "{bad", '{"a": 1', "[", "9" * 5000, "[" * 20_000, '{"a": 1} x'):
                (call,) = (await talk.user("the weather, please").ask()).calls
                assert call.arguments == ({"arguments": parser.parameters} if parser.parameters else {})
                assert (await talk.result(call).ask()).text == "It is sunny."

    assert len((await run_agent_once(agent, parser=parser)).segments) == 1


@pytest.mark.parametrize("way", WAYS, ids=IDS)
async def test_f154_a_malformed_call_is_text_that_the_agent_sees(run_agent_once, says, way):
    broken = ["{bad json", '{"name": "weather", "arg', '{"name": "unknown", "arguments": {}}']
    texts = [f"Let me look.\n<tool_call>\n{text}\n</tool_call>" for text in broken]
    says(**{f"case {place}.": text for place, text in enumerate(texts)})

    async def agent(session):
        async with talking(session, way, tools=[WEATHER]) as talk:
            for place, text in enumerate(texts):
                said = await talk.user(f"case {place}.").ask()
                assert (said.text, said.calls) == (text, [])

    assert len((await run_agent_once(agent)).segments) == 1


@pytest.mark.parametrize("way", WAYS, ids=IDS)
async def test_f154_whole_and_streamed_answers_are_the_same_text(run_agent_once, says, way):
    cases = [(thoughts, space) for thoughts in ("hm", "\n\nhm\n", "\n\n") for space in ("", "\n\n", "\n \n")]
    answer = "Hello!\n\nBye. \n"
    says(**{f"case {at}.": f"<think>{thoughts}</think>{space}{answer}" for at, (thoughts, space) in enumerate(cases)})

    async def agent(session):
        async with talking(session, way) as talk:
            for place, (thoughts, _) in enumerate(cases):
                said = await talk.user(f"case {place}.").ask()
                assert (said.thoughts, said.text) == (thoughts.strip(), answer)

    trajectory = await run_agent_once(agent, tiny={"reasoning_parser": "qwen3", "step_delay": 0.001})
    assert len(trajectory.segments) == 1


STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
PATCH = '*** Begin Patch\n*** Add File: a\n+"x"\n*** End Patch'
READ = {"type": "function", "name": "read", "description": "Read a file.", "strict": False, "parameters": {}}


@STREAMED
@pytest.mark.parametrize("namespace", ["mcp__files__", "files"])
async def test_f145_tools_of_a_namespace_are_offered_and_called_in_their_own_shape(
    run_agent_once, says, stream, namespace
):
    offered = "mcp__files__read" if namespace.startswith("mcp") else "files__read"
    says(
        call_text('{"path": "a"}', offered),
        **{"22 degrees": call_text('{"input": "text"}', "files__write"), "done": "Done."},
    )
    write = {"type": "custom", "name": "write", "description": "Write."}
    tools = [
        {"type": "namespace", "name": namespace, "description": "Files.", "tools": [READ]},
        {"type": "namespace", "name": "files_", "description": "More.", "tools": [{**write, "name": "_write"}]},
        {"type": "web_search"},
    ]

    async def agent(session):
        async with talking(session, ("responses", stream), options={"tools": tools}) as talk:
            first = await talk.user("read it").ask()
            (item,) = first.raw.output
            assert (item.type, item.namespace, item.name) == ("function_call", namespace, "read")
            assert json.loads(item.arguments) == {"path": "a"}
            second = await talk.result(first.calls[0]).ask()
            (item,) = second.raw.output
            assert (item.type, item.namespace, item.name, item.input) == (
                "custom_tool_call",
                "files_",
                "_write",
                "text",
            )
            talk.history.append({"type": "custom_tool_call_output", "call_id": item.call_id, "output": "done"})
            assert (await talk.ask()).text == "Done."

    assert len((await run_agent_once(agent)).segments) == 1


@STREAMED
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_f145_a_custom_tool_takes_a_text(run_agent_once, says, tiny_tokenizer, api, stream):
    """It is offered with its grammar; whatever object the model calls it with becomes its text."""
    grammar = {"syntax": "lark", "definition": 'start: "*** Begin Patch"'}
    written = {
        json.dumps({"input": PATCH}): PATCH,
        json.dumps(PATCH): PATCH,
        '{"patch": 1}': '{"patch": 1}',
    }
    says(
        **{f"case {at}.": call_text(text, "apply_patch") for at, text in enumerate(written)}, **{"22 degrees": "Done."}
    )
    if api == "chat":
        form = {"type": "grammar", "grammar": grammar}
        tools = [{"type": "custom", "custom": {"name": "apply_patch", "description": "Patch.", "format": form}}]
    else:
        tools = [
            {"type": "custom", "name": "apply_patch", "description": "Patch.", "format": {"type": "grammar", **grammar}}
        ]

    async def agent(session):
        async with talking(session, (api, stream), options={"tools": tools}) as talk:
            for place, text in enumerate(written.values()):
                (call,) = (await talk.user(f"case {place}.").ask()).calls
                assert (call.name, call.arguments) == ("apply_patch", text)
                if api == "chat":
                    talk.result(call)
                else:
                    talk.history.append({"type": "custom_tool_call_output", "call_id": call.id, "output": "22 degrees"})
                assert (await talk.ask()).text == "Done."

    (row,) = (await run_agent_once(agent)).segments
    assert "Begin Patch" in tiny_tokenizer.decode(row.tokens[: len(row.tokens) - row.response_length])


@STREAMED
@pytest.mark.parametrize("kind", [name for name, use in MESSAGES_TOOLS.items() if use is Use.USED])
async def test_f145_the_vendors_tools_that_an_agent_runs_are_offered(run_agent_once, says, stream, kind):
    says(call_text('{"command": "view", "path": "/a"}', "hands"), **{"22 degrees": "Done."})
    tool = {"type": kind, "name": "hands"}

    async def agent(session):
        async with talking(session, ("messages", stream), options={"tools": [tool]}) as talk:
            (call,) = (await talk.user("look").ask()).calls
            assert (call.name, call.arguments) == ("hands", {"command": "view", "path": "/a"})
            assert (await talk.result(call).ask()).text == "Done."

    assert len((await run_agent_once(agent)).segments) == 1


async def test_f145_no_agent_is_left_without_hands(run_agent_once):
    """A tool that can't be offered is refused by name; one that the vendor would run is left out only beside others."""

    async def agent(session):
        for api, table in (("chat", CHAT_TOOLS), ("responses", RESPONSES_TOOLS), ("messages", MESSAGES_TOOLS)):
            async with talking(session, (api, False), tools=[WEATHER]) as talk:
                plain = talk.user("hello").body()["tools"]
                for kind, use in [*table.items(), ("a_kind_of_2030", Use.REFUSED)]:
                    alone = [{"type": kind, "name": "hands"}]
                    if use is Use.USED:
                        continue
                    talk.options = {"tools": [*plain, *alone]}
                    if use is Use.LEFT_OUT:
                        await talk.ask()
                        talk.options = {"tools": alone}
                    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match=kind):
                        await talk.ask()
        async with talking(session, ("chat", False), options={"functions": [WEATHER]}) as talk:
            with pytest.raises(openai.BadRequestError, match="functions"):
                await talk.user("hello").ask()
            talk.options = {"tools": [{"type": "function"}]}
            with pytest.raises(openai.BadRequestError, match=r"tools\[0\]"):
                await talk.ask()

    await run_agent_once(agent)


async def test_f145_tools_that_would_be_called_by_one_name_are_refused(run_agent_once):
    tools = [
        {**READ, "name": "files__read"},
        {"type": "namespace", "name": "files", "description": "", "tools": [READ]},
    ]

    async def agent(session):
        async with talking(session, ("responses", False), options={"tools": tools}) as talk:
            with pytest.raises(openai.BadRequestError, match="two tools would be called 'files__read'"):
                await talk.user("hello").ask()
            talk.options = {"tools": tools[1:]}
            await talk.ask()

    await run_agent_once(agent)


PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYGBgAAAABQABh6FO1AAAAABJRU5ErkJggg=="
PICTURES = {
    "chat": [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
        {"type": "input_audio", "input_audio": {"data": PIXEL, "format": "wav"}},
        {"type": "file", "file": {"file_data": PIXEL}},
    ],
    "responses": [
        {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}", "detail": "auto"},
        {"type": "input_file", "file_data": PIXEL},
    ],
    "messages": [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": PIXEL}},
    ],
}


@pytest.mark.parametrize("way", WAYS, ids=IDS)
async def test_f150_an_image_that_a_tool_brings_becomes_a_text(run_agent_once, says, tiny_tokenizer, way):
    """So does one in a later message of the user; one in the task is refused, because no policy that reads text can do it."""
    says(call_text("{}"), **{"not shown": "I see nothing.", "look": "Nor now."})
    api, _ = way

    async def agent(session):
        async with talking(session, way, tools=[WEATHER]) as talk:
            text = {"responses": "input_text"}.get(api, "text")
            with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match="can't be tokenised"):
                await talk.user([PICTURES[api][0]]).ask()
            talk.history.clear()
            for picture in PICTURES[api]:
                (call,) = (await talk.user("show me").ask()).calls
                assert (
                    await talk.result(call, [{"type": text, "text": "here:"}, picture]).ask()
                ).text == "I see nothing."
                assert (await talk.user([{"type": text, "text": "look"}, picture]).ask()).text == "I see nothing."

    (row,) = (await run_agent_once(agent)).segments
    written = tiny_tokenizer.decode(row.tokens)
    assert written.count("not shown, because the model is given text only]") == 2 * len(PICTURES[api])
    assert PIXEL not in written


async def test_f150_documents_and_results_that_hold_text_are_read(run_agent_once, says, tiny_tokenizer):
    says(call_text("{}"), **{"22 degrees": "Read."})
    blocks = [
        {"type": "document", "title": "A", "source": {"type": "text", "media_type": "text/plain", "data": "first"}},
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "second"}]}},
        {"type": "search_result", "title": "B", "source": "a.md", "content": [{"type": "text", "text": "third"}]},
        {"type": "tool_reference", "tool_name": "fourth"},
        {"type": "text", "text": "22 degrees"},
    ]

    async def agent(session):
        async with talking(session, ("messages", False), tools=[WEATHER]) as talk:
            (call,) = (await talk.user([blocks[0], {"type": "text", "text": "show me"}]).ask()).calls
            assert (await talk.result(call, blocks).ask()).text == "Read."

    (row,) = (await run_agent_once(agent)).segments
    written = tiny_tokenizer.decode(row.tokens)
    assert "A\nfirst\nshow me" in written
    assert "A\nfirst\nsecond\nB\na.md\nthird\nfourth\n22 degrees" in written


# Writes an image as its marks, and takes a text as well as parts.
SEES = r"""
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}{% if part.type == 'image' %}<|endoftext|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""


class OnServers:
    """A rollout that samples on these servers, without an engine."""

    index = 0

    def __init__(self, servers):
        self.servers = servers

    async def generate(self, input_ids, sampling=None, *, extra=None, on_tokens=None):
        return await self.servers.generate(input_ids, sampling, extra=extra or {}, on_tokens=on_tokens)


@pytest.mark.parametrize("way", [*((api, False) for api in APIS), ("messages", True)], ids=str)
async def test_f150_a_policy_that_sees_gets_the_image(tmp_path, tiny_tokenizer, way):
    """In the task and from a tool; the prompt has the template's marks in its place, and another image is another history.

    OpenAI's helpers for streams refuse the fake server's answers, which end at their limit.
    """
    folder, (api, _) = folder_with(SEES, tmp_path / "model"), way
    texts = {
        "/model_info": {"model_path": "x", "weight_version": "0", "has_image_understanding": True},
        "/v1/models": {},
        "/server_info": {},
    }

    def plan(seen):
        return Reply(body=texts[seen.path]) if seen.path in texts else None

    async with (
        open_fake_sglang(plan) as fake,
        open_sglang_servers([fake.url], settings=ServerSettings(vocab_size=1024)) as servers,
        open_gateway(servers, tokenizer=folder) as gateway,
    ):
        opened = gateway.open_session(OnServers(servers), prompt=Prompt(id="p", text="x"), sampling=SamplingParams())
        async with opened as session, talking(session, way) as talk:
            await talk.user([PICTURES[api][0]]).ask()
            talk.history.append({"role": "user", "content": [PICTURES[api][0]]})
            await talk.ask()
            talk.history[0] = json.loads(json.dumps(talk.history[0]).replace(PIXEL, PIXEL[::-1]))
            await talk.ask()
            assert session.statistics().drift[Drift.FORKED] == 1

    asked = [seen.body for seen in fake.seen if seen.path == "/generate"]
    assert [len(body["image_data"]) for body in asked] == [1, 2, 2]
    assert asked[0]["image_data"] == [f"data:image/png;base64,{PIXEL}"]
    assert tiny_tokenizer.decode(asked[0]["input_ids"]).startswith("<|im_start|>user\n<|endoftext|><|im_end|>")
