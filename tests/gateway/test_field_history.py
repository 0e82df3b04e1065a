"""Failures from the field: histories that clients, vendors and templates write in their own way; each stays one row."""

import json

import pytest

from trio_rollout import Prompt, open_sglang_servers
from trio_rollout.gateway import Drift
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
