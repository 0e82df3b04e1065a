"""Failures from the field: calls, tools and tool results of every shape."""

import json

import attrs
import pytest

from trio_rollout.gateway import Call, Drift, Parsed

from .conftest import WEATHER
from .talk import IDS, WAYS, talking
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
