"""docs/lifecycles.md shows the tables as they are, and explains each of their states and events."""

import enum
import importlib.util
import re
from types import ModuleType

import pytest

from trio_rollout._core import lifecycle, samples, server

from ._source import ROOT, report

PAGE = (ROOT / "docs" / "lifecycles.md").read_text(encoding="utf-8")
WORDS = {
    "A group": (lifecycle.State, lifecycle.Event),
    "A sample": (samples.SampleState, samples.SampleEvent),
    "A server": (server.State, server.Event),
}


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    """The script that makes the pictures."""
    spec = importlib.util.spec_from_file_location("make_pictures", ROOT / "docs" / "make_pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def section(title: str) -> str:
    """Return the part of the page below this heading."""
    return re.split(r"^## ", PAGE.partition(f"\n## {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def test_the_pictures_are_those_of_the_tables(pictures):
    assert pictures.with_pictures(PAGE) == PAGE, "run make pictures"


def test_a_picture_that_is_out_of_date_or_missing_is_seen(pictures):
    assert pictures.with_pictures(PAGE.replace("waiting --> running: start", "")) == PAGE
    with pytest.raises(LookupError, match="'group'"):
        pictures.with_pictures("# Lifecycles")


@pytest.mark.parametrize("title", WORDS)
def test_each_state_and_event_is_explained_once(title: str):
    rows = re.findall(r"^\| `([^`]+)` \| .+ \|$", section(title), re.MULTILINE)
    names = [member.value for words in WORDS[title] for member in words]

    assert rows == names, report([name for name in names if name not in rows])


def test_a_diagram_has_every_arrow_the_first_state_and_the_ends(pictures):
    class Lamp(enum.Enum):
        OFF = "off"
        BROKEN = "broken"

    class Does(enum.Enum):
        BREAK = "break"
        BURN = "burn"
        BLINK = "blink"

    events = {Does.BREAK: Lamp.BROKEN, Does.BLINK: Lamp.OFF, Does.BURN: Lamp.BROKEN}
    assert pictures.diagram({Lamp.OFF: events, Lamp.BROKEN: {}}, Lamp.OFF, "made").splitlines() == [
        "```mermaid",
        "stateDiagram-v2",
        "    [*] --> off: made",
        "    off --> broken: break, burn",
        "    broken --> [*]",
        "```",
    ]


def test_an_event_that_leads_from_everywhere_to_one_state_is_a_sentence(pictures):
    class Door(enum.Enum):
        OPEN = "open"
        SHUT = "shut"

    class Does(enum.Enum):
        PUSH = "push"
        SLAM = "slam"

    both = {Does.SLAM: Door.SHUT}
    assert pictures.diagram(
        {Door.OPEN: both, Door.SHUT: {**both, Does.PUSH: Door.OPEN}}, Door.OPEN, "built"
    ).splitlines() == [
        "```mermaid",
        "stateDiagram-v2",
        "    [*] --> open: built",
        "    shut --> open: push",
        "```",
        "",
        "From every state, `slam` leads to `shut`.",
    ]
