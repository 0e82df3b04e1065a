"""Nothing in the repository belongs to one machine, or was left for later."""

import re
from pathlib import Path

import pytest

from ._source import ROOT, report, tracked_files

# Spelt so that this file does not contain what it looks for.
REGISTRY_HOSTS = (
    r"py[p]i\.(?:python\.)?org|python[h]osted\.org|"
    r"npm[j]s\.(?:org|com)|yarn[p]kg\.com|"
    r"crate[s]\.io|ruby[g]ems\.org|anacond[a]\.org|mave[n]\.(?:apache\.)?org|"
    r"(?:prox[y]|su[m])\.golang\.org|"
    r"docke[r]\.io|hu[b]\.docker\.com|ghc[r]\.io|qua[y]\.io|gc[r]\.io|"
    r"(?:de[b]|ft[p]|securit[y]|snapsho[t]|archiv[e])\.debian\.org|(?:archiv[e]|securit[y]|port[s])\.ubuntu\.com"
)
FORBIDDEN = {
    "a path of one machine": r"(?<![\w.$/-])/(?:work|farm|root|home|Users|tmp/[a-z])(?![\w-])/?",
    "the host of a package registry": rf"index-ur[l]|https?://[^\s/]*registr[y][^\s/]*|https?://\S*/simpl[e]\b|(?i:{REGISTRY_HOSTS})",
    "something left for later": r"\b(?:TOD[O]|FIXM[E]|XX[X])\b",
}
SAFE = {ROOT / "tests" / "project" / "test_clean_text.py"}


def findings(path: Path) -> list[str]:
    """Return the forbidden texts of this file, with their lines."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return []
    return [
        f"{path}:{number}: {what}: {line.strip()[:100]}"
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in FORBIDDEN.items()
        if re.search(pattern, line)
    ]


def test_tracked_files_are_clean():
    wrong = [line for path in tracked_files() if path not in SAFE for line in findings(path)]
    assert not wrong, report(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "cd /wo" + "rk/main",
        "open('/ro" + "ot/x')",
        "--index-ur" + "l=x",
        "https://py" + "pi.org/project",
        "# FIX" + "ME: later",
    ],
)
def test_each_kind_is_seen(line: str, tmp_path: Path):
    (tmp_path / "file.md").write_text(f"fine\n{line}\n")
    assert [found.partition(":")[2].partition(":")[0] for found in findings(tmp_path / "file.md")] == ["2"]


@pytest.mark.parametrize(
    "host",
    [
        "py" + "pi.org",
        "Py" + "PI.org.",
        "*.python" + "hosted.org",
        "files.python" + "hosted.org:443",
        "regis" + "try.npm" + "js.org",
        "static.crate" + "s.io",
        "docke" + "r.io/library/python",
        "hu" + "b.docker.com",
        "de" + "b.debian.org",
        "archiv" + "e.ubuntu.com",
        "prox" + "y.golang.org",
    ],
)
def test_f171_a_package_registrys_host_is_seen_in_any_form(host: str, tmp_path: Path):
    (tmp_path / "file.py").write_text(f'hosts = ["{host}"]\n')
    assert findings(tmp_path / "file.py")


@pytest.mark.parametrize(
    "line",
    [
        "run /dev/null",
        "POST /generate",
        "see docs/work/x",
        "a/home/b",
        "$TMPDIR/a",
        "self.registry.settle()",
        "https://docs.python.org",
    ],
)
def test_what_is_fine_is_not(line: str, tmp_path: Path):
    (tmp_path / "file.md").write_text(line)
    assert not findings(tmp_path / "file.md")
