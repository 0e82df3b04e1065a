"""The public API: complete, documented, closed, and without side effects."""

import ast
import enum
import importlib
import inspect
import subprocess
import sys
from types import ModuleType

import attrs
import pytest

from ._source import PACKAGES, modules

# Names without an underscore on the way are public; the command line is used by its name in the shell only.
PUBLIC = [
    name
    for name, path in modules()
    if not any(part.startswith("_") for part in name.split(".")[1:])
    and not name.startswith(("trio_rollout.cli", "trio_rollout.testing.pytest"))
    and path.read_text(encoding="utf-8").strip()
]


@pytest.fixture(params=PUBLIC)
def module(request: pytest.FixtureRequest) -> ModuleType:
    """One public module after the other; what needs an extra that is not installed is left out."""
    if request.param.startswith("trio_rollout_compat.ray"):
        pytest.importorskip("ray")
    return importlib.import_module(request.param)


def defined_names(module: ModuleType) -> set[str]:
    """Return the names without an underscore that a module defines, or imports as ``x as x``: public to its readers."""
    body = ast.parse(inspect.getsource(module)).body
    own = {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)}
    taken = [alias for node in body if isinstance(node, ast.ImportFrom) for alias in node.names]
    return {name for name in own | {alias.name for alias in taken if alias.asname == alias.name} if name[0] != "_"}


def exported(module: ModuleType) -> dict[str, object]:
    """Return the public names of a module: its ``__all__``, which every package has."""
    names = getattr(module, "__all__", None if hasattr(module, "__path__") else sorted(defined_names(module)))
    assert names is not None, f"{module.__name__} has no __all__"
    return {name: getattr(module, name) for name in names}


def own_classes(module: ModuleType) -> list[type]:
    """The classes it offers that are the project's."""
    return [
        item
        for item in exported(module).values()
        if isinstance(item, type) and item.__module__.startswith("trio_rollout")
    ]


def test_all_names_exactly_what_is_public(module: ModuleType):
    """A name without an underscore that is not in ``__all__`` would be offered by accident."""
    names = list(exported(module))

    assert len(names) == len(set(names))
    assert defined_names(module) <= set(names)


def test_tools_offer_few_names():
    """docs/decisions/0038: names that only tests use are not public."""
    assert len(exported(importlib.import_module("trio_rollout.tools"))) < 50


def test_everything_public_has_a_docstring(module: ModuleType):
    missing = [
        name
        for name, item in exported(module).items()
        if (inspect.isfunction(item) or isinstance(item, type)) and not item.__doc__
    ]
    for owner in own_classes(module):
        for name, member in vars(owner).items():
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if not name.startswith("_") and inspect.isfunction(function) and not function.__doc__:
                missing.append(f"{owner.__name__}.{name}")
    assert not missing


def is_open(owner: type) -> bool:
    """Return True if users may subclass it: protocols, errors, enumerations, and frozen values and tuples, which own nothing."""
    frozen = attrs.has(owner) and getattr(owner, "__setattr__", None) is not object.__setattr__ and hash_by_value(owner)
    return getattr(owner, "_is_protocol", False) or issubclass(owner, BaseException | enum.Enum | tuple) or frozen


def hash_by_value(owner: type) -> bool:
    """Return True if attrs made the class comparable, as it does for values and not for owners."""
    return owner.__eq__ is not object.__eq__


def test_classes_that_own_state_are_final(module: ModuleType):
    assert not [
        owner.__name__ for owner in own_classes(module) if not is_open(owner) and not getattr(owner, "__final__", False)
    ]


def test_every_member_of_an_enumeration_is_explained():
    unexplained = []
    for name, path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef) or not any("Enum" in ast.unparse(base) for base in node.bases):
                continue
            for member, after in zip(node.body, [*node.body[1:], ast.Pass()], strict=True):
                explained = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                if isinstance(member, ast.Assign) and not explained:
                    unexplained.append(f"{name}.{node.name}: {ast.unparse(member)}")
    assert not unexplained


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_has_no_side_effects(package: str):
    """Importing trio_asyncio changes asyncio in every thread; the others take seconds, or are extras."""
    unwanted = ["trio_asyncio", "reasoning_gym", "matplotlib", "pyarrow", "pytest", "ray", "transformers"]
    unwanted += [] if package == "trio_rollout_compat" else ["asyncio"]
    program = (
        f"import sys, threading, os; before = dict(os.environ); import {package}\n"
        f"print([name for name in {unwanted} if name in sys.modules], threading.active_count(), before == dict(os.environ))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[] 1 True"


def test_the_names_of_the_package_are_those_of_the_block_for_type_checkers():
    """They are imported when the first one is used (docs/decisions/0062); the block says where each one is defined."""
    package = importlib.import_module("trio_rollout")
    (block,) = [node for node in ast.parse(inspect.getsource(package)).body if isinstance(node, ast.If) and node.body[0]
                and isinstance(node.test, ast.Name)]  # fmt: skip
    named = {
        alias.name: getattr(importlib.import_module(f"trio_rollout.{node.module}"), alias.name)
        for node in block.body
        for alias in node.names
    }
    assert sorted(named) == sorted(package.__all__)
    assert {name: getattr(package, name) for name in package.__all__} == named
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = package.nothing


@pytest.mark.parametrize("name", [name for name in PUBLIC if name.startswith("trio_rollout.") and name.count(".") == 1])
def test_a_room_can_be_imported_alone(name: str):
    """Another room's import must not be what makes it work."""
    subprocess.run([sys.executable, "-c", f"import {name}"], check=True)
