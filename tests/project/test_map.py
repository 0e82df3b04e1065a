"""The map of the code: every place that the documents name exists."""

import ast
import re
from pathlib import Path

import pytest

from ._source import PACKAGES, ROOT, report, tracked_files

MAP = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
PLACES = re.findall(r"^\| ([^|`]+) \| `([\w/]+\.py)` \| `([\w.]+)` \|$", MAP, re.MULTILINE)
DOCUMENTS = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
DOCUMENTS += sorted((ROOT / "docs").rglob("*.md"))
# A document may leave out the folders that most of its paths begin with.
BEGINNINGS = ("", "trio_rollout/", "compat/trio_rollout_compat/", "compat/", "tests/", "docs/")
# Files of the reader's, in examples.
NOT_OURS = {"main.py", "solve.py", "train_async.py"}


def defined(path: Path) -> set[str]:
    """Return the names of a module's functions, and of its classes' methods as ``Class.method``."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{member.name}" for member in node.body if hasattr(member, "name")}
    return names


def test_the_table_has_the_twelve_things():
    assert len(PLACES) == 12
    assert len({thing for thing, *_ in PLACES}) == 12


@pytest.mark.parametrize(("path", "function"), [place[1:] for place in PLACES], ids=[place[0] for place in PLACES])
def test_each_thing_is_where_the_map_says(path: str, function: str):
    assert (ROOT / path).is_file(), f"ARCHITECTURE.md names {path}: name its new place"
    assert function in defined(ROOT / path), f"ARCHITECTURE.md names {function} in {path}: name its new place"


def test_every_room_is_in_the_tree_and_the_other_way_round():
    tree = re.findall(r"^  ((?:\w+/ ?)+)", MAP.partition("## Rooms")[2].partition("```\ntests/")[0], re.MULTILINE)
    named = {room for line in tree for room in re.findall(r"\w+", line)}
    rooms = {path.parent.name for package in PACKAGES.values() for path in package.glob("*/__init__.py")}

    assert named == rooms


def missing(document: Path) -> list[str]:
    """List the paths of Python files, and of folders, that a document names and that do not exist."""
    text = document.read_text(encoding="utf-8")
    named = re.findall(r"(?<![\w./-])((?:[\w.-]+/)*[\w-]+\.(?:py|c|h))\b", text)
    named += re.findall(r"`((?:[\w-]+/)+)`", text)
    return [
        f"{document.name}: {name}"
        for name in named
        if name not in NOT_OURS and not any((ROOT / beginning / name).exists() for beginning in BEGINNINGS)
    ]


def test_every_file_that_a_document_names_exists():
    wrong = [line for document in DOCUMENTS for line in missing(document)]
    assert not wrong, report(wrong)


def test_every_link_of_a_document_leads_to_a_file():
    wrong = [
        f"{document.name}: {target}"
        for document in DOCUMENTS
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", document.read_text(encoding="utf-8"))
        if not (document.parent / target).exists()
    ]
    assert not wrong, report(wrong)


def test_every_decision_that_the_code_names_exists():
    wrong = [
        f"{path}: {name}"
        for path in tracked_files()
        if path.suffix == ".py"
        for name in re.findall(r"\b00\d\d-[a-z][a-z0-9-]*\.md\b", path.read_text(encoding="utf-8"))
        if not (ROOT / "docs" / "decisions" / name).is_file()
    ]
    assert not wrong, report(wrong)


def test_a_path_that_is_gone_is_seen(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("In `engine/_pool.py` and `_gone.py`, not `_core/`, `attic/` or trio_rollout/sglang/_none.py.")

    assert missing(page) == ["page.md: _gone.py", "page.md: trio_rollout/sglang/_none.py", "page.md: attic/"]
