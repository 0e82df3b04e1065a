"""Failures from the field: histories that clients, vendors and templates write in their own way; each stays one row."""

import json

import openai
import pytest

from trio_rollout import Prompt, open_sglang_servers
from trio_rollout.gateway import Drift
from trio_rollout.gateway._openai_responses import Responses
from trio_rollout.tiny import open_tiny_server
from trio_rollout.tokenizer import load_tokenizer

from .conftest import WEATHER
from .talk import APIS, IDS, WAYS, nonces, talking, tool_loop
from .templates import TEMPLATES, folder_with

pytestmark = pytest.mark.usefixtures("clients_leave_generators")

SCRIPT = """
[[rules]]
contains = "weather"
answer = "Let me look."
calls = [{ name = "weather", arguments = { city = "Paris", days = 2 } }]

[[rules]]
answer = "Hello, world!"
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.toml"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


@pytest.fixture
def run(run_agent_once):
    """Run an agent; return its trajectory and the last statistics of its session."""

    async def run(agent, **options):
        found = []

        async def watched(session):
            await agent(session)
            found.append(session.statistics())

        trajectory = await run_agent_once(watched, **options)
        return trajectory, found[-1]

    return run


@pytest.mark.parametrize("way", WAYS, ids=IDS)
async def test_f143_a_nonce_in_a_system_message_is_no_other_conversation(run, way):
    nonce = nonces()

    async def agent(session):
        async with talking(session, way, tools=[WEATHER]) as talk:
            talk.user("the weather, please")
            await tool_loop(talk, before=lambda turn: renew_header(talk, nonce()))

    def renew_header(talk, value):
        talk.system = [f"x-vendor-header: version=2.1.177.b3f; cch={value};", "Be kind."]

    trajectory, counts = await run(agent)

    assert len(trajectory.segments) == 1
    assert counts.drift == {Drift.NONE: 1, Drift.REUSED: 3}


@pytest.mark.parametrize(
    "nonce", ["8c2d7a90-11ce-4b3e-9f5a-00000000000{0}", "request 00ffee11223344556677889900aabbc{0}"]
)
@pytest.mark.parametrize("api", APIS)
async def test_f143_other_kinds_of_nonces(run, api, nonce):
    async def agent(session):
        async with talking(session, (api, False), tools=[WEATHER]) as talk:
            talk.user("the weather, please")
            await tool_loop(talk, before=lambda turn: setattr(talk, "system", [f"Id {nonce.format(turn)}. Be kind."]))

    trajectory, counts = await run(agent)

    assert len(trajectory.segments) == 1
    assert counts.drift == {Drift.NONE: 1, Drift.REUSED: 3}


@pytest.mark.parametrize("change", ["system", "tools", "user", "tool result"])
@pytest.mark.parametrize("way", WAYS, ids=IDS)
async def test_f143_any_other_change_before_a_known_answer_is_counted(run, way, change):
    async def agent(session):
        async with talking(session, way, tools=[WEATHER], system=["Be kind."]) as talk:
            talk.user("the weather, please")
            await tool_loop(talk, turns=2)
            if change == "system":
                talk.system = ["It is 12:01 now."]
            elif change == "tools":
                talk.tools = [WEATHER, {**WEATHER, "name": "other"}]
            elif change == "user":
                talk.history[0] = {"role": "user", "content": "the weather, at once"}
            else:
                place = next(at for at, one in enumerate(talk.history) if "22 degrees at 0" in str(one))
                talk.history[place] = json.loads(
                    json.dumps(talk.history[place]).replace("22 degrees at 0", "[cleared]")
                )
            await talk.ask()

    trajectory, counts = await run(agent)

    assert len(trajectory.segments) == 2
    assert counts.drift[Drift.FORKED] == 1


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("way", WAYS, ids=IDS)
async def test_f144_several_system_messages_go_where_the_template_takes_them(
    run, way, template, tmp_path, tiny_tokenizer
):
    """At the beginning they are joined; one in the middle stays where it is, and the conversation is one row."""
    later = {"role": "system", "content": "A reminder."}

    async def agent(session):
        async with talking(session, way, tools=[WEATHER], system=["Be kind.", "Be brief."]) as talk:
            talk.user("the weather, please")
            talk.history.append(later)
            first = await talk.ask()
            talk.result(first.calls[0])
            second = await talk.ask()
            talk.result(second.calls[0]).history.append(later)
            await talk.ask()

    folder = folder_with(TEMPLATES[template], tmp_path / "model")
    trajectory, counts = await run(agent, tokenizer=folder)

    (row,) = trajectory.segments
    written = tiny_tokenizer.decode(row.tokens)
    assert "Be kind.\n\nBe brief." in written.replace("Be kind.\nBe brief.", "Be kind.\n\nBe brief.")
    assert written.count("Be kind.") == written.count("Be brief.") == 1
    assert written.count("A reminder.") == 2
    assert written.index("the weather, please") < written.index("A reminder.") < written.index("Let me look.")
    assert Drift.FORKED not in counts.drift


@pytest.mark.parametrize("template", TEMPLATES)
async def test_f144_messages_of_a_program_are_arranged_as_those_of_an_agent(template, tmp_path):
    tokenizer = load_tokenizer(folder_with(TEMPLATES[template], tmp_path / "model"))
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "system", "content": "A reminder."},
    ]
    async with open_tiny_server() as tiny, open_sglang_servers([tiny.url], tokenizer=tokenizer) as servers:
        written = tokenizer.decode(servers.encode(Prompt(id="1", messages=messages)))
    places = [written.index(text) for text in ("Be kind.", "Be brief.", "hello", "A reminder.")]
    assert places == sorted(places)


THOUGHTS = """
[[rules]]
last_contains = "degrees at 2"
answer = "<think>Enough.</think>It is sunny."

[[rules]]
contains = "weather"
answer = "<think>I have to look.</think>Let me look."
calls = [{ name = "weather", arguments = { city = "Paris" } }]
"""
THINKING = {"tiny": {"reasoning_parser": "qwen3", "step_delay": 0.001}}


@pytest.fixture
def thoughts(script):
    script.write_text(THOUGHTS, encoding="utf-8")


@pytest.mark.usefixtures("thoughts")
@pytest.mark.parametrize("way", WAYS, ids=IDS)
async def test_f146_clients_that_keep_only_signed_thoughts_keep_these(run, tmp_path, way):
    """A thought without a signature or an encrypted content would come back as text of the assistant: a new row each turn."""
    api, _ = way
    options = {"include": ["reasoning.encrypted_content"], "store": False} if api == "responses" else {}

    async def agent(session):
        async with talking(session, way, tools=[WEATHER], options=options) as talk:
            talk.user("the weather, please")
            for turn in range(4):
                said = await talk.ask()
                assert said.thoughts == ("Enough." if turn == 3 else "I have to look.")
                kept = [item for item in talk.history if item.get("type") == "reasoning"]
                for item in kept:
                    assert item["encrypted_content"]
                    item.pop("content", None)
                for message in talk.history if api == "messages" else ():
                    for block in message["content"] if isinstance(message["content"], list) else ():
                        assert block["type"] != "thinking" or block["signature"]
                for call in said.calls:
                    talk.result(call, f"degrees at {turn}")

    folder = folder_with(TEMPLATES["thinking"], tmp_path / "model")
    trajectory, counts = await run(agent, tokenizer=folder, **THINKING)

    assert len(trajectory.segments) == 1
    assert Drift.FORKED not in counts.drift


@pytest.mark.usefixtures("thoughts")
async def test_f146_whole_and_streamed_thoughts_have_one_signature(run):
    """In a stream the signature is the last delta of its block."""
    signed = []

    async def agent(session):
        for stream in (False, True):
            async with talking(session, ("messages", stream), tools=[WEATHER]) as talk:
                signed.append((await talk.user("the weather").ask()).raw.content[0].signature)
        async with talking(session, ("messages", True)) as talk:
            events = [
                event
                async for event in await talk.client.messages.create(**talk.user("the weather").body(), stream=True)
            ]
            kinds = [event.delta.type if event.type == "content_block_delta" else event.type for event in events]
            assert kinds[kinds.index("content_block_stop") - 1] == "signature_delta"
            assert kinds.count("signature_delta") == 1

    await run(agent, **THINKING)

    assert signed[0] == signed[1]
    assert len(signed[0]) > 40


@pytest.mark.usefixtures("thoughts")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_f146_encrypted_thoughts_come_if_they_are_asked_for_and_are_read_again(run, stream):
    async def agent(session):
        items = []
        for options in ({}, {"include": ["reasoning.encrypted_content"]}):
            async with talking(session, ("responses", stream), tools=[WEATHER], options=options) as talk:
                items.append((await talk.user("the weather").ask()).raw.output[0])
        assert items[0].encrypted_content is None
        given = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": items[1].encrypted_content}
        for item, thoughts in ((given, "I have to look."), ({**given, "encrypted_content": "gAAAAAB"}, "")):
            body = json.dumps({"input": [{"role": "user", "content": "x"}, item]}).encode()
            assert Responses().request(body).messages[-1].get("reasoning_content", "") == thoughts

    await run(agent, **THINKING)


@pytest.mark.usefixtures("thoughts")
@pytest.mark.parametrize("parts", ["all", "without thoughts", "only the call"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_f147_references_to_items_of_the_session_are_resolved(run, tmp_path, stream, parts):
    left = {"all": 0, "without thoughts": 1, "only the call": 2}[parts]

    async def agent(session):
        async with talking(session, ("responses", stream), tools=[WEATHER]) as talk:
            talk.user("the weather, please")
            for turn in range(4):
                said = await talk.ask()
                items = [{"type": "item_reference", "id": item.id} for item in said.raw.output]
                if turn == 1:
                    items = [{"id": item["id"]} for item in items]
                talk.history[-len(items) :] = items[left if said.calls else 0 :]
                for call in said.calls:
                    talk.result(call, f"degrees at {turn}")
            assert said.text == "It is sunny."

    folder = folder_with(TEMPLATES["thinking"], tmp_path / "model")
    trajectory, _ = await run(agent, tokenizer=folder, **THINKING)

    assert len(trajectory.segments) == (4 if parts == "only the call" else 1)


async def test_f147_references_to_nothing_are_refused_by_name(run):
    """An unknown id, one of another session, one that was not to be stored, and a call that the answer does not have."""
    ids = []

    async def agent(session):
        async with talking(session, ("responses", False), tools=[WEATHER]) as talk:
            stored = (await talk.user("the weather").ask()).raw.output[-1].id
            talk.options, talk.history = {"store": False}, [{"role": "user", "content": "the weather"}]
            ids.append((await talk.ask()).raw.output[0].id)
            for name in ("msg_1", "", "item", ids[0], f"{stored}7"):
                talk.history = [{"role": "user", "content": "x"}, {"type": "item_reference", "id": name}]
                with pytest.raises(openai.BadRequestError, match=f"no item '{name}'"):
                    await talk.ask()

    await run(agent)
