"""Imports point towards the core; stages do not know each other."""

import ast
import graphlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ._source import imports, modules, report

# The path of one prompt. The modules of one stage may import each other; a stage never imports another one.
STAGES = {
    "sources": "sources",
    "engine": "engine",
    "sglang": "sglang",
    "rewards": "rewards",
    "ledger": "ledger",
    "gateway": "gateway",
    "tools": "tools",
    "observe": "observe",
    "tiny": "tiny",
}
STAGE_OF = {room: stage for stage, rooms in STAGES.items() for room in rooms.split()}
# These put stages together. Every other room is shared: it imports no stage, and all may import it.
WIRING = {"", "testing", "cli", "sessions"}
# The one module of the engine that puts stages together, and the parts of the engine that do not know each other.
ENGINE_WIRING = "trio_rollout.engine._engine"
ENGINE_PARTS = {f"trio_rollout.engine._{name}" for name in ("pool", "delivery", "weights", "evaluation")}
# The ground floor: what a shared room may import of the package.
FLOORS = {"_util": {"_util", "_core", "errors"}, "_http": {"_http", "_util", "_core", "errors"}}

# For type checkers only: what a generate function sees of its tools. Nothing of it is imported at run time.
TYPES_ONLY = {
    f"trio_rollout.{here}": "trio_rollout.tools.RolloutTools" for here in ("abc", "engine._context", "engine._rollout")
}

# What values and decisions may be made of. Nothing here has a clock, a file, a socket or a source of randomness.
CORE_IMPORTS = {
    "abc", "array", "attrs", "base64", "bisect", "collections", "contextlib", "copy", "difflib", "enum", "fractions", "functools", "hashlib",
    "heapq", "itertools", "math", "numpy", "operator", "re", "reprlib", "textwrap", "traceback", "types", "typing",
}  # fmt: skip

# Private names of Python and of trio-asyncio that compat can't do without; each is explained where it is used.
FOREIGN_PRIVATE = {
    "_FakedPolicy", "_base", "_current_frames", "_get_running_loop", "_main_loop", "_main_loop_one", "_original_policy", "_unregister_task",
    "_value2member_map_",
}  # fmt: skip

# Where a module may be used that the rest of the package must do without, as prefixes of module names.
RESERVED = {
    "asyncio": ["trio_rollout_compat", "trio_rollout.cli"],
    "trio_asyncio": ["trio_rollout_compat"],
    "argparse": ["trio_rollout_compat", "trio_rollout.cli"],
    "importlib": ["trio_rollout_compat", "trio_rollout.cli"],
    "threading": [
        "trio_rollout_compat",
        "trio_rollout.cli",
        "trio_rollout.testing",
        "trio_rollout.observe._watchdog",
        "trio_rollout._util.user_code",
    ],
    "pytest": ["trio_rollout.testing"],
}


def top(module: str) -> str:
    """The package a module belongs to."""
    return module.partition(".")[0]


def room(module: str) -> str:
    """The part right below ``trio_rollout``; empty for the package itself."""
    return module.partition(".")[2].partition(".")[0]


def forbidden(importer: str, imported: str) -> str | None:
    """Return the reason why a module of ``trio_rollout`` must not import this one of ``trio_rollout``, or None."""
    here, there = room(importer), room(imported)
    if here == there or here in WIRING or importer == ENGINE_WIRING or TYPES_ONLY.get(importer) == imported:
        return None
    if here in FLOORS and there not in FLOORS[here]:
        return f"{here} is a ground floor: it knows {', '.join(sorted(FLOORS[here]))}"
    if here == "_core" and there != "errors":
        return "the core knows only itself and the errors"
    if there in WIRING - {""}:
        return "only wiring imports wiring"
    if there in STAGE_OF and STAGE_OF.get(here) != STAGE_OF[there]:
        return f"{here} is not wiring, and {there} is a stage"
    return None


def between_parts(importer: str, imported: str) -> str | None:
    """Return the reason why a part of the engine must not import this one, or None."""
    foreign = importer in ENGINE_PARTS and imported.rpartition(".")[0] in ENGINE_PARTS - {importer}
    return "the engine's parts meet in its state, and do not know each other" if foreign else None


def against_private(importer: str, imported: str) -> str | None:
    """Return the reason why compat must not import this, or None."""
    private = any(part.startswith("_") and not part.endswith("__") for part in imported.split("."))
    foreign = top(importer) == "trio_rollout_compat" and top(imported) == "trio_rollout"
    return (
        "compat is built on public names only; adapters' are in trio_rollout.lowlevel" if private and foreign else None
    )


def private_attributes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each private attribute that is used on another object, and is not defined in the same module."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    own |= {
        item.target.id
        for item in ast.walk(tree)
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    own |= {node.attr for node in attributes if isinstance(node.ctx, ast.Store) and is_self(node.value)}
    for node in attributes:
        private = node.attr.startswith("_") and not node.attr.endswith("__")
        if private and not is_self(node.value) and node.attr not in own | FOREIGN_PRIVATE:
            yield node.lineno, ast.unparse(node)


def is_self(node: ast.expr) -> bool:
    """Return True for the object whose method the node is in."""
    return isinstance(node, ast.Name) and node.id in {"self", "cls"}


def violations(reason_against: Callable[[str, str], str | None]) -> list[str]:
    """Every import of the project that this function has a reason against."""
    return [
        f"{path}:{line} imports {imported}: {reason}"
        for name, path in modules()
        for line, imported in imports(name, path)
        if (reason := reason_against(name, imported)) is not None
    ]


def against_room(importer: str, imported: str) -> str | None:
    """Sideways and upwards inside the package, and from the package into compat."""
    if top(importer) == "trio_rollout" and top(imported) == "trio_rollout_compat":
        return "compat is for hosts, the package does not know it"
    if reason := between_parts(importer, imported):
        return reason
    return forbidden(importer, imported) if top(importer) == top(imported) == "trio_rollout" else None


def folder(module: str, path: Path) -> str:
    """Return the package that the module is in; for a package itself its own name."""
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


def circle(arrows: Iterable[tuple[str, str]]) -> list[str]:
    """Return folders that import each other in a circle, the first one again at the end. A package and its suites are none."""
    graph: dict[str, set[str]] = defaultdict(set)
    for here, there in arrows:
        if not f"{here}.".startswith(f"{there}.") and not f"{there}.".startswith(f"{here}."):
            graph[here].add(there)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def folders_that_import() -> Iterator[tuple[str, str]]:
    """Yield who imports whom among the folders of both packages."""
    paths = dict(modules())
    for name, path in paths.items():
        for _, imported in imports(name, path):
            target = imported if imported in paths else imported.rpartition(".")[0]
            if target in paths:
                yield folder(name, path), folder(target, paths[target])


def against_io(importer: str, imported: str) -> str | None:
    """Anything in the core that is not known to be free of I/O."""
    allowed = room(importer) != "_core" or top(imported) in {*CORE_IMPORTS, "trio_rollout"}
    return None if allowed else "the core does no I/O, and neither a clock nor randomness"


def against_reserved(importer: str, imported: str) -> str | None:
    """A module that has its place, outside of it."""
    places = RESERVED.get(top(imported))
    return None if places is None or importer.startswith(tuple(places)) else f"only in {', '.join(places)}"


def test_rooms_import_only_towards_the_core():
    wrong = violations(against_room)
    assert not wrong, report(wrong)


def test_no_rooms_import_each_other():
    assert not circle(folders_that_import())


def test_a_circle_of_rooms_is_seen():
    found = circle([("p.a", "p.b"), ("p.b", "p.c"), ("p.c", "p.a"), ("p.d", "p.a")])
    assert len(found) == 4
    assert set(found) == {"p.a", "p.b", "p.c"}
    assert not circle([("p.a", "p.b"), ("p.b", "p.c"), ("p.a", "p.c")])
    assert not circle([("p", "p._suite"), ("p._suite", "p")])


def test_the_core_does_no_io():
    wrong = violations(against_io)
    assert not wrong, report(wrong)


def test_reserved_modules_are_used_only_where_they_belong():
    wrong = violations(against_reserved)
    assert not wrong, report(wrong)


def test_compat_imports_public_names_only():
    wrong = violations(against_private)
    assert not wrong, report(wrong)


def test_compat_uses_private_attributes_only_where_they_are_defined():
    wrong = [
        f"{path}:{line} uses {attribute}"
        for name, path in modules()
        if top(name) == "trio_rollout_compat"
        for line, attribute in private_attributes(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not wrong, report(wrong)


def test_a_foreign_private_attribute_is_seen():
    code = """
class Handle:
    _engine: object
    def close(self):
        self._engine._parts.stop()
        self._open = False
def left(handle):
    return handle._open, handle._engine, handle.__class__
"""
    assert list(private_attributes(ast.parse(code))) == [(5, "self._engine._parts")]


def test_the_rules_see_a_violation():
    """The rules of the tests above refuse forbidden imports."""
    assert forbidden("trio_rollout.sglang._fleet", "trio_rollout.ledger.open_ledger")
    assert forbidden("trio_rollout._core.values", "trio_rollout._util.ports.Ports")
    assert forbidden("trio_rollout._util.service", "trio_rollout.tools")
    assert forbidden("trio_rollout._util.service", "trio_rollout._http.exchange.Pool")
    assert forbidden("trio_rollout._http.exchange", "trio_rollout._util.time.wait_s") is None
    assert between_parts("trio_rollout.engine._pool", "trio_rollout.engine._delivery.Delivery")
    assert forbidden("trio_rollout.engine._pool", "trio_rollout.observe.task_tree")
    assert forbidden("trio_rollout.engine._pool", "trio_rollout.engine._attempt.run") is None
    assert forbidden("trio_rollout.rewards._match", "trio_rollout.abc") is None
    assert forbidden("trio_rollout.engine._engine", "trio_rollout.observe.task_tree") is None
    assert against_room("trio_rollout.engine._slots", "trio_rollout_compat.open_bridge")
    assert against_room("trio_rollout_compat._bridge", "trio_rollout.engine._engine") is None
    assert against_io("trio_rollout._core.values", "socket.socket")
    assert against_io("trio_rollout._util.ports", "random") is None
    assert against_reserved("trio_rollout.tools._commands.capture", "asyncio.run")
    assert against_reserved("trio_rollout_compat._bridge", "asyncio.run") is None
    assert against_private("trio_rollout_compat.thread._run", "trio_rollout._util.service.open_service")
    assert against_private("trio_rollout_compat.thread._run", "trio_rollout.engine._engine")
    assert against_private("trio_rollout_compat.thread._run", "trio_rollout.lowlevel._secret")
    assert against_private("trio_rollout_compat.thread._run", "trio_rollout.lowlevel.open_service") is None
    assert against_private("trio_rollout_compat.thread._run", "trio_rollout_compat.bridge._errors.apart") is None
    assert against_private("trio_rollout.lowlevel", "trio_rollout._util.service.open_service") is None
    assert {"socket", "time", "os", "random", "ssl"} <= sys.stdlib_module_names - CORE_IMPORTS
    assert "trio" not in CORE_IMPORTS


def test_imports_are_resolved(tmp_path: Path):
    path = tmp_path / "_x.py"
    path.write_text(
        "import os.path\nfrom . import _y\ndef f():\n    from ..errors import RolloutError\nfrom ._z.a import b\n"
    )
    found = {imported for _, imported in imports("trio_rollout.room._x", path)}
    assert found == {
        "os.path",
        "trio_rollout.room._y",
        "trio_rollout.errors.RolloutError",
        "trio_rollout.room._z.a.b",
    }
