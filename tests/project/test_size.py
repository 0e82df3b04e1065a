"""One concept per module: at most 500 lines, functions at most 40."""

import ast
from pathlib import Path

from ._source import modules, report

MODULE_LINES = 500
FUNCTION_LINES = 40


def too_long(path: Path) -> list[str]:
    """What in this file is over its limit."""
    text = path.read_text(encoding="utf-8")
    lines = len(text.splitlines())
    found = [f"{path}: {lines} lines, at most {MODULE_LINES}"] if lines > MODULE_LINES else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                found.append(f"{path}:{node.lineno} {node.name}: {length} lines, at most {FUNCTION_LINES}")
    return found


def test_modules_and_functions_are_short():
    wrong = [line for _, path in modules() for line in too_long(path)]
    assert not wrong, report(wrong)


def test_every_module_says_what_it_is():
    texts = {name: path.read_text(encoding="utf-8") for name, path in modules()}
    assert not [name for name, text in texts.items() if text.strip() and not ast.get_docstring(ast.parse(text))]


def test_the_limits_are_seen(tmp_path: Path):
    path = tmp_path / "long.py"
    path.write_text("def f():\n" + "    x = 1\n" * 40 + "y = 1\n" * 460)
    assert [line.partition(": ")[2] for line in too_long(path)] == ["501 lines, at most 500", "41 lines, at most 40"]
