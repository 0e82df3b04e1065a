"""Write the state diagrams of docs/lifecycles.md, made from the tables in trio_rollout/_core (``make pictures``)."""

import enum
from collections.abc import Callable, Mapping
from pathlib import Path

from trio_rollout._core import lifecycle, samples, server

PAGE = Path(__file__).with_name("lifecycles.md")


Table = Mapping[enum.Enum, Mapping[enum.Enum, enum.Enum]]


def diagram(transitions: Table, first: enum.Enum, entered: str) -> str:
    """Return a table of states and events as a mermaid state diagram.

    Events with the same effect share an arrow; events that change no state are left out. A state without events is an end. An
    event that leads from every state to the same one is a sentence below the diagram.
    """
    common = from_everywhere(transitions)
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first.value}: {entered}"]
    for state, events in transitions.items():
        for after in dict.fromkeys(events.values()):
            labels = [event.value for event, then in events.items() if then is after and event not in common]
            if labels and after is not state:
                lines.append(f"    {state.value} --> {after.value}: {', '.join(labels)}")
        if not events:
            lines.append(f"    {state.value} --> [*]")
    sentences = [f"\nFrom every state, `{event.value}` leads to `{after.value}`." for event, after in common.items()]
    return "\n".join([*lines, "```", *sentences])


def from_everywhere(transitions: Table) -> dict[enum.Enum, enum.Enum]:
    """Return the events that lead from every state to the same one, with that state."""
    rows = [set(events.items()) for events in transitions.values()]
    return dict(sorted(set.intersection(*rows), key=str))


def group() -> str:
    """Return the picture of a group's life."""
    return diagram(lifecycle.TRANSITIONS, lifecycle.State.WAITING, "pulled")


def sample() -> str:
    """Return the picture of a sample's life."""
    return diagram(samples.SAMPLE_TRANSITIONS, samples.SampleState.MISSING, "its group is pulled")


def one_server() -> str:
    """Return the picture of a server's life."""
    return diagram(server.TRANSITIONS, server.State.OUTSIDE, "named by the user or a router")


PICTURES: dict[str, Callable[[], str]] = {"group": group, "sample": sample, "server": one_server}


def with_pictures(page: str) -> str:
    """Return the page with each picture replaced by that of its table.

    Raises:
      LookupError: a picture has no place in the page.
    """
    for name, draw in PICTURES.items():
        before, begin, rest = page.partition(f"<!-- picture: {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not end:
            raise LookupError(f"{PAGE.name} has no place for the picture {name!r}")
        page = f"{before}{begin}{draw()}\n{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_pictures(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
