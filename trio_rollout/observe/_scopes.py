"""The cancel scopes around a task, outermost first: the one file of this room that reads Trio's private names.

Trio shows nurseries and their scopes, but neither the scopes in between nor why one was cancelled. Both are read
defensively: where a name is missing, the answer is "unknown", never an exception.
"""

from typing import Any

import trio


def scopes_of(task: trio.lowlevel.Task) -> list[trio.CancelScope]:
    """The scopes that the task has entered itself, outermost first; the scope of the nursery it lives in is not one."""
    scopes: list[trio.CancelScope] = []
    parent = task.parent_nursery
    outside: Any = None if parent is None else getattr(parent, "_cancel_status", None)
    status: Any = getattr(task, "_cancel_status", None)
    while status is not None and status is not outside:
        scopes.append(status._scope)
        status = status._parent
    scopes.reverse()
    return scopes


def is_cancelled(task: trio.lowlevel.Task) -> bool:
    """Whether the task's next checkpoint raises Cancelled."""
    status: Any = getattr(task, "_cancel_status", None)
    return bool(getattr(status, "effectively_cancelled", False))


def cancel_reason(scope: trio.CancelScope) -> str:
    """Why the scope was cancelled, in Trio's words: what did it, the reason given, by which task."""
    reason: Any = getattr(scope, "_cancel_reason", None)
    if reason is None:
        return ""
    parts = [str(reason.source)]
    if reason.reason:
        parts.append(repr(reason.reason))
    return " ".join(parts)
