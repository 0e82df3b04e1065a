"""tests/README.md maps every reported failure to a test that exists, or to a reason."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ENTRIES = (
    *(
        *range(1, 100),
        *range(101, 108),
    ),
    *(
        *range(111, 117),
        *range(118, 121),
        *range(126, 141),
    ),
    *(*range(141, 155),),
    *(
        *range(161, 172),
        *range(176, 180),
    ),
)
"""The entries of both catalogues that are answered; add a number together with its row."""
ROWS = re.findall(r"^\| (F\d{3}) \| (.+?) \| (.+) \|$", (TESTS / "README.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_no_entry_is_missing_or_listed_twice():
    assert [number for number, *_ in ROWS] == [f"F{entry:03}" for entry in ENTRIES]


@pytest.mark.parametrize(("number", "answer"), [(number, answer) for number, _, answer in ROWS])
def test_each_entry_names_tests_that_exist_or_a_reason(number, answer):
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", answer)
    if not named:
        assert len(answer.split()) > 4, "a reason is a sentence"
    for file, test in named:
        text = (TESTS / file).read_text(encoding="utf-8")
        assert f"def {test}(" in text if test else number in text.upper(), f"{file} has no test for {number}"
