"""docs/events.md lists the events of instruments, with their fields, as they are."""

import re

import attrs

from trio_rollout import abc

from ._source import ROOT

PAGE = (ROOT / "docs" / "events.md").read_text(encoding="utf-8")


def test_the_page_lists_each_event_with_its_fields():
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| .+ \|$", PAGE, re.MULTILINE)
    events = [value for value in vars(abc).values() if isinstance(value, type) and issubclass(value, abc.Event)]
    fields = {
        event.__name__: [field.name for field in attrs.fields(event)] for event in events if event is not abc.Event
    }

    assert {name: re.findall(r"`(\w+)`", listed) for name, listed in rows} == fields
    assert len(rows) == len(fields)


def test_the_example_is_an_instrument():
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, type] = {}
    exec(compile(block, "docs/events.md", "exec"), names)
    progress = names["Progress"]()
    progress.event(abc.GroupReady(id=None, attempt=1, group=None))
    progress.event(abc.GroupStarted(id=None, attempt=2))

    assert (progress.ready, progress.given_up) == (1, [])
