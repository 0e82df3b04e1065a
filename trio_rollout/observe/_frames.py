"""Await stacks of tasks as short text, with Trio's frames left out."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import trio

_TRIO = str(Path(trio.__file__).parent / "_")[:-1]
_MOST_FRAMES = 60


def _frames(task: trio.lowlevel.Task) -> Iterator[tuple[FrameType, int]]:
    # Bounded: a coroutine that awaits itself by mistake has an await stack without an end.
    return itertools.islice(task.iter_await_frames(), _MOST_FRAMES)


def frame_label(frame: FrameType, line: int) -> str:
    """Return ``function:line`` of one frame, with its class if it has one."""
    return f"{frame.f_code.co_qualname.replace('.<locals>', '')}:{line}"


def await_stack(task: trio.lowlevel.Task) -> list[str]:
    """Return the frames that the task awaits, outermost first; of Trio's only the one called last from outside Trio."""
    own: list[str] = []
    called: list[str] = []
    for frame, line in _frames(task):
        if not frame.f_code.co_filename.startswith(_TRIO):
            own.append(frame_label(frame, line))
            called.clear()
        elif not called:
            called.append(frame.f_code.co_qualname)
    return own + called


def where(task: trio.lowlevel.Task) -> str:
    """Return ``task @ function:line``: the innermost await of the task that is not inside Trio."""
    inside_trio = ""
    own = ""
    for frame, line in _frames(task):
        if frame.f_code.co_filename.startswith(_TRIO):
            inside_trio = inside_trio or frame.f_code.co_qualname
        else:
            own = frame_label(frame, line)
    return f"{task_label(task)} @ {own or inside_trio or 'its end'}"


def task_label(task: trio.lowlevel.Task) -> str:
    """Return the task's name without its modules and enclosing functions."""
    name = task.name
    return name.rpartition(".")[2] if name.replace(".", "").replace("_", "").replace("<locals>", "").isalnum() else name
