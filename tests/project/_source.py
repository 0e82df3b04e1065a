"""The project's own source, as the tests of this directory read it."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"trio_rollout": ROOT / "trio_rollout", "trio_rollout_compat": ROOT / "compat" / "trio_rollout_compat"}


def modules() -> Iterator[tuple[str, Path]]:
    """The dotted name and the file of every module that is shipped."""
    for package, directory in PACKAGES.items():
        for path in sorted(directory.rglob("*.py")):
            parts = path.relative_to(directory).with_suffix("").parts
            yield ".".join([package, *parts]).removesuffix(".__init__"), path


def imports(name: str, path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything a module imports, wherever in it; names taken from a package too."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def tracked_files() -> list[Path]:
    """Return the files that git knows; without git (an unpacked sdist) every file."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        return [path for path in ROOT.rglob("*") if path.is_file() and ".venv" not in str(path)]
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


def report(wrong: list[str]) -> str:
    """One thing a line, which pytest shows in full."""
    return "\n".join(["", *wrong])
