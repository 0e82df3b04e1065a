"""Fixtures: a module with scorers that a scorer process can import, and trajectories to score."""

import importlib
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import pytest
import trio

from trio_rollout._core.values import Prompt, Segment, Trajectory
from trio_rollout.rewards import in_process, open_scorer_processes

Opened: TypeAlias = Callable[..., AbstractAsyncContextManager[Callable[[Any], Awaitable[Any]]]]


@asynccontextmanager
async def a_process_a_call(fn: Callable[[Any], Any], *, workers: int = 2) -> AsyncGenerator[Any]:
    """Open ``in_process`` like ``open_scorer_processes``."""
    yield in_process(fn, workers=workers)


@pytest.fixture(params=[a_process_a_call, open_scorer_processes], ids=["in_process", "open_scorer_processes"])
def opened(request: pytest.FixtureRequest) -> Opened:
    """Both forms, which behave alike."""
    return request.param


def runs(pid: int) -> bool:
    """Return True if a process is alive; a zombie is not. A container without an init never reaps orphans."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


async def appeared(path: Path) -> str:
    """Return the content of a file that a scorer writes, once the file exists."""
    file = trio.Path(path)
    with trio.fail_after(60):
        while not await file.exists():
            await trio.sleep(0.005)
    return await file.read_text(encoding="utf-8")


async def until_gone(pid: int) -> None:
    """Wait until a process that was killed is dead."""
    with trio.fail_after(60):
        while runs(pid):
            await trio.sleep(0.005)


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

def daemon(path):
    # A child in another session, whose parent has gone: no group, no parent leads to it any more.
    if os.fork() == 0:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)  # else a daemon that is left would keep the tests' own output open
        if os.fork() == 0:
            with open(path, "w") as file:
                file.write(str(os.getpid()))
            os.rename(path, path + ".done")
            time.sleep(1000)
        os._exit(0)
    while not os.path.exists(path + ".done"):
        time.sleep(0.001)
    return 1.0

def daemon_and_spin(path):
    daemon(path)
    while True:
        pass

def daemon_and_die(path):
    daemon(path)
    os.kill(os.getpid(), signal.SIGSEGV)

def daemon_and_stop_the_keeper(path):
    daemon(path)
    os.kill(os.getppid(), signal.SIGSTOP)
    return 1.0

def kill_the_keeper(path):
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    os.rename(path, path + ".done")
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)

def channel():
    frame = sys._getframe(1)
    while "send" not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals["send"]

def forge(data):
    send = channel()
    send.write(data)
    send.flush()
    time.sleep(1000)

def forge_and_exit(data):
    send = channel()
    send.write(data)
    send.flush()
    os._exit(0)

def reply_twice(data):
    send = channel()
    send.write(data)
    send.flush()
    return 0.0

class Evil:
    def __reduce__(self):
        return open, (EVIDENCE, "w")

EVIDENCE = __file__ + ".evidence"

def evil_result(value):
    return Evil()

def identity(value):
    return eval(value)

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
