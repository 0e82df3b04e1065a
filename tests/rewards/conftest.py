"""Fixtures: a module with scorers that a scorer process can import, and trajectories to score."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from trio_rollout._core.values import Prompt, Segment, Trajectory

SCORERS = """
import os, re, signal, subprocess, sys, time

def half(value):
    return value / 2

def length(trajectory):
    return {"length": float(len(trajectory.text)), "pid": float(os.getpid())}

def spin_if_negative(value):
    while value < 0:
        pass
    return float(value)

def never_releases_the_gil(path):
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    os.rename(path, path + ".done")
    re.match(r"(a+)+$", "a" * 60 + "b")

def die(value):
    os.kill(os.getpid(), signal.SIGSEGV)

def leave(value):
    os._exit(3)

def give_up(value):
    sys.exit(3)

def complain(value):
    raise ValueError(f"{value} is no good")

def talk(value):
    print("x" * 100_000)
    os.write(1, b"y")
    assert sys.stdin.read() == ""
    return 1.0

def unpicklable(value):
    return lambda: value

class Outside(BaseException):
    pass

def raise_class(name):
    import asyncio
    if name:
        raise eval(name)("away")
    return 1.0

class NoJudge(ConnectionError):
    pass

def lose_the_judge(kind):
    if kind == "group":
        raise ExceptionGroup("two", [NoJudge("a"), ExceptionGroup("inner", [ConnectionResetError("b")])])
    if kind == "mixed":
        raise ExceptionGroup("two", [NoJudge("a"), KeyError("b")])
    raise NoJudge(kind)

class Unspeakable(Exception):
    def __str__(self):
        sys.exit(0)

def raise_unspeakable(value):
    raise Unspeakable

class ExitsWhenRead:
    def __reduce__(self):
        return sys.exit, (0,)

def result_that_exits(value):
    return ExitsWhenRead()

def with_alarm(value):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(100)
    return 1.0

def start_a_sleeper(value):
    return subprocess.Popen(["sleep", "1000"]).pid

def start_a_sleeper_and_spin(path):
    sleeper = subprocess.Popen(["sleep", "1000"])
    with open(path, "w") as file:
        file.write(str(sleeper.pid))
    os.rename(path, path + ".done")
    while True:
        pass

class Scale:
    def __init__(self, factor):
        self.factor = factor
    def __call__(self, value):
        return self.factor * value
"""


@pytest.fixture
def scorers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, importable here and in scorer processes."""
    (tmp_path / "scorers_of_a_user.py").write_text(SCORERS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("scorers_of_a_user")
    sys.modules.pop("scorers_of_a_user")


@pytest.fixture
def respond() -> Callable[..., Trajectory]:
    """A function that makes a trajectory with a response and its prompt's label."""

    def made(text: str, *, label: object = None) -> Trajectory:
        row = Segment(tokens=[1], response_length=0, loss_mask=[], log_probs=[], versions=(), text=text)
        return Trajectory(prompt=Prompt(id="7", text="?", label=label), index=0, segments=[row])

    return made
