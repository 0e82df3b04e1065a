"""A module is one concept: at most 500 lines, functions at most 40, and no small section of its only user."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from ._source import PACKAGES, imports, modules, report

MODULE_LINES = 500
FUNCTION_LINES = 40
# A module shorter than this has two importers, or a sentence in its docstring that begins with these words.
SMALL_MODULE_LINES = 60
REASON = "Separate because"
# Everything else in ``trio_rollout`` is in a room.
TOP_LEVEL = {"__init__.py", "abc.py", "errors.py", "lowlevel.py", "py.typed"}


def too_long(path: Path) -> list[str]:
    """Return the module and the functions of this file that are over their limits."""
    text = path.read_text(encoding="utf-8")
    lines = len(text.splitlines())
    found = [f"{path}: {lines} lines, at most {MODULE_LINES}"] if lines > MODULE_LINES else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                found.append(f"{path}:{node.lineno} {node.name}: {length} lines, at most {FUNCTION_LINES}")
    return found


def importers(shipped: Iterable[tuple[str, Path]]) -> dict[str, set[str]]:
    """Return the modules that import each module, by dotted name."""
    shipped = dict(shipped)
    found: dict[str, set[str]] = defaultdict(set)
    for name, path in shipped.items():
        for _, imported in imports(name, path):
            for target in {imported, imported.rpartition(".")[0]} & shipped.keys() - {name}:
                found[target].add(name)
    return found


def has_reason(text: str) -> bool:
    """Return True if the module's docstring gives the reason for a small module."""
    return (
        re.search(rf"(?:^|[.:]\s+){REASON}\s+\w+\s+\w+", ast.get_docstring(ast.parse(text)) or "", re.MULTILINE)
        is not None
    )


def too_small(shipped: Iterable[tuple[str, Path]]) -> list[str]:
    """List the small modules that have one importer and no reason."""
    shipped = list(shipped)
    users = importers(shipped)
    found = []
    for name, path in shipped:
        text = path.read_text(encoding="utf-8")
        lines = len(text.splitlines())
        if path.name in {"__init__.py", "__main__.py"} or lines >= SMALL_MODULE_LINES or has_reason(text):
            continue
        if len(users[name]) < 2:
            by = ", ".join(sorted(users[name])) or "no module"
            found.append(
                f"{path}: {lines} lines, imported by {by}: merge it with its user, or write "
                f"'{REASON} <reason>.' as a sentence of its docstring"
            )
    return found


def test_modules_and_functions_are_short():
    wrong = [line for _, path in modules() for line in too_long(path)]
    assert not wrong, report(wrong)


def test_a_small_module_has_two_importers_or_a_reason():
    wrong = too_small(modules())
    assert not wrong, report(wrong)


def test_the_top_level_holds_only_what_users_import_by_name():
    found = {path.name for path in PACKAGES["trio_rollout"].iterdir() if path.is_file()}
    assert found <= TOP_LEVEL


def test_every_module_says_what_it_is():
    texts = {name: path.read_text(encoding="utf-8") for name, path in modules()}
    assert not [name for name, text in texts.items() if text.strip() and not ast.get_docstring(ast.parse(text))]


def test_the_limits_are_seen(tmp_path: Path):
    path = tmp_path / "long.py"
    path.write_text("def f():\n" + "    x = 1\n" * 40 + "y = 1\n" * 460)
    assert [line.partition(": ")[2] for line in too_long(path)] == ["501 lines, at most 500", "41 lines, at most 40"]


@pytest.mark.parametrize(
    ("docstring", "small"),
    [
        ("One thing.", True),
        ("One thing.\n\nSeparate because both processes import it.", False),
        ("One thing. Separate because\nboth processes import it.", False),
        ("One thing. It is Separate because of history.", True),
    ],
)
def test_a_reason_is_a_sentence_of_the_docstring(tmp_path: Path, docstring, small):
    (tmp_path / "_small.py").write_text(f'"""{docstring}"""\n')
    (tmp_path / "_user.py").write_text("from ._small import x\n" + "y = 1\n" * 60)
    shipped = [("room._small", tmp_path / "_small.py"), ("room._user", tmp_path / "_user.py")]

    assert bool(too_small(shipped)) is small


def test_a_second_importer_is_seen(tmp_path: Path):
    names = ("_small", "_user", "_other")
    for name, text in zip(names, ("", "from . import _small\n", "import room._small\n"), strict=True):
        (tmp_path / f"{name}.py").write_text(text + "y = 1\n" * (60 if text else 1))
    shipped = [(f"room.{name}", tmp_path / f"{name}.py") for name in names]

    assert importers(shipped) == {"room._small": {"room._user", "room._other"}}
    assert not too_small(shipped)
