"""The bridge and the engine thread say on which thread each of their classes runs."""

import ast
import enum
import importlib
import inspect
from pathlib import Path

import pytest

import trio_rollout_compat

ROOM = Path(trio_rollout_compat.__file__).parent
MODULES = sorted([*ROOM.glob("bridge/_[a-z]*.py"), *ROOM.glob("thread/_[a-z]*.py")])
PLACES = ("on trio's thread", "on the loop's thread", "on the engine's thread", "on the host's threads", "on any thread",
          "on both threads", "on the thread of the asking loop")  # fmt: skip


def places_named_in(docstring: str) -> list[str]:
    first, _, _ = docstring.partition("\n\n")
    return [place for place in PLACES if place in " ".join(first.split()).lower()]


def is_told_apart(owner: type) -> bool:
    """Return False for classes that any code may have: enumerations, errors, settings and counts."""
    return not issubclass(owner, enum.Enum | BaseException) and not owner.__module__.endswith("_settings")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_every_class_names_its_thread_in_the_first_sentence(path):
    module = importlib.import_module(f"trio_rollout_compat.{path.parent.name}.{path.stem}")
    names = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    owners = [getattr(module, name) for name in names]

    assert not [
        owner.__name__ for owner in owners if is_told_apart(owner) and not places_named_in(inspect.getdoc(owner))
    ]


def test_a_missing_place_is_seen():
    assert places_named_in("On Trio's thread: calls functions.\n\nMore.")
    assert not places_named_in("Calls functions.\n\nOn Trio's thread.")
