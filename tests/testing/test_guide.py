"""Every snippet of the guide runs as it is printed."""

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "testing.md"
SNIPPETS = re.findall(r"^## (.*?)$.*?```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(("title", "code"), SNIPPETS, ids=[title for title, _ in SNIPPETS])
def test_the_guide_s_snippets_run(title: str, code: str):
    exec(compile(code, f"{GUIDE.name}: {title}", "exec"), {"__name__": "snippet"})


def test_each_section_has_its_snippet():
    assert len(SNIPPETS) == GUIDE.read_text(encoding="utf-8").count("```python")
