"""Plain English: docstrings begin with what a thing does or is, and some words of an older dialect are gone."""

import ast
import re
from collections.abc import Iterable, Iterator

import pytest

from ._source import ROOT, report, tracked_files

# A docstring that begins with one of these describes a question in place of the thing.
QUESTION = re.compile(r"(?:What|Whether|Who(?:se|ever)?|How|Where|Why|Which)\b")
MOST_QUESTIONS = 0.04
FOLDERS = ("trio_rollout", "compat", "tests", "benchmarks", "examples")

# Spelt so that this file does not contain what it looks for. A phrase may be broken over two lines, or two comments.
WORDS = ("no" + "body", "some" + "body", "who" + "ever", "fat" + "es?", "of its " + "own")
BANNED = re.compile(
    "|".join(rf"(?<![a-z]){word}(?![a-z])" for word in WORDS).replace(" ", r"[\s#/*\\|]+"), re.IGNORECASE
)
CHECKED = {".py", ".pyi", ".md", ".c", ".h", ".toml", ".sh", ".patch"}
CHECKED_NAMES = {"Makefile", "run"}


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of the docstrings of a module, its classes, functions and attributes."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from found(node.body[:1])
        if isinstance(node, ast.Module | ast.ClassDef):
            assignments = zip(node.body, node.body[1:], strict=False)
            yield from found(after for member, after in assignments if isinstance(member, ast.Assign | ast.AnnAssign))


def found(statements: Iterable[ast.stmt]) -> Iterator[tuple[int, str]]:
    """Yield line and text of the statements that are bare strings."""
    for statement in statements:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            value = statement.value.value
            if isinstance(value, str):
                yield statement.lineno, value.strip()


def questions(text: str) -> tuple[list[str], int]:
    """Return the docstrings that begin with a question word, with their lines, and the number of all docstrings."""
    every = list(docstrings(text))
    return [f"{line}: {doc.splitlines()[0]}" for line, doc in every if QUESTION.match(doc)], len(every)


def banned(text: str) -> list[str]:
    """Return each banned word with its line."""
    return [f"{text.count(chr(10), 0, match.start()) + 1}: {match[0]}" for match in BANNED.finditer(text)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_say_what_a_thing_is(folder: str):
    wrong, total = [], 0
    for path in tracked_files():
        if path.suffix == ".py" and path.is_relative_to(ROOT / folder):
            begins, count = questions(path.read_text(encoding="utf-8"))
            wrong += [f"{path}:{line}" for line in begins]
            total += count

    assert len(wrong) <= MOST_QUESTIONS * total, report([f"{len(wrong)} of {total}:", *wrong])


def test_no_file_has_a_banned_word():
    wrong = [
        f"{path}:{line}"
        for path in tracked_files()
        if path.suffix in CHECKED or path.name in CHECKED_NAMES
        for line in banned(path.read_text(encoding="utf-8"))
    ]

    assert not wrong, report(wrong)


@pytest.mark.parametrize(
    "text",
    [
        '"""What it is."""',
        'class A:\n    """Whether it is."""',
        'def f():\n    """\n    How it is.\n    """',
        'async def f():\n    """Whose it is."""',
        'class A:\n    x: int = 1\n    """Which it is."""',
        'X = 1\n"""Where it is."""',
    ],
)
def test_a_question_is_seen(text: str):
    assert questions(text)[0]


@pytest.mark.parametrize(
    "text",
    ['"""Whatever: a name."""', '"""The place where it is."""', 'def f():\n    """Return what it is."""\n    "How"'],
)
def test_other_beginnings_are_not_counted(text: str):
    assert questions(text) == ([], 1)


@pytest.mark.parametrize("word", ["No" + "body", "some" + "body's", "who" + "ever", "_fat" + "e", "of\n# its " + "own"])
def test_a_banned_word_is_seen(word: str):
    assert banned(f"fine\nx = {word}") == [f"2: {word.removesuffix(chr(39) + 's').removeprefix('_')}"]


@pytest.mark.parametrize("text", ["fatal", "its own", "of its owner", "somebodyelse"])
def test_words_that_only_look_alike_are_not(text: str):
    assert not banned(text)
