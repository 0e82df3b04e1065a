"""The task tree as text: every task with its await stack, its scopes, their deadlines and the reasons of cancellations.

It shows of a run that hangs which task waits for what, until when, and which cancellation is on its way.

This is the one module of the room that reads Trio's private names. Trio shows nurseries and their scopes, but neither the
scopes in between nor the reason of a cancellation. Both are read defensively: where a name is missing, the tree says less,
and there is no exception.
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias, final

import attrs
import trio

from .._util.user_code import ends_the_process
from ._frames import await_stack

Describe: TypeAlias = Callable[[trio.CancelScope], str | None]
"""Says more about a scope (its owner's name and cause), or None."""


def task_tree(
    root: trio.lowlevel.Task | None = None, *, describe: Describe | None = None, most_tasks: int = 2000
) -> str:
    """Return the tree below ``root`` (by default of the whole run), a task a line and its scopes below it.

    To be called in the thread of the Trio run. Never raises: a task that cannot be shown is named as such in its place.
    """
    try:
        return _Renderer(describe, most_tasks).render(root)
    except BaseException as error:  # noqa: ASYNC103  a look at a run that is in trouble must not add to it
        if ends_the_process(error):
            raise
        return f"(the task tree could not be shown: {type(error).__name__}: {error})"


def _outermost() -> list[tuple[int, trio.lowlevel.Task | str]]:
    """Return the main task and the tasks beside it, without the two that Trio itself needs."""
    root = trio.lowlevel.current_root_task()
    nurseries = [] if root is None else root.child_nurseries
    tasks = [task for nursery in nurseries for task in nursery.child_tasks]
    return [(0, task) for task in tasks if not task.name.startswith("<TrioToken")]


@final
@attrs.define(eq=False, repr=False)
class _Renderer:
    """One rendering: the lines so far, how many tasks may still be shown, and the tasks to come."""

    _describe: Describe | None
    _left: int
    _lines: list[str] = attrs.field(factory=list)
    _todo: list[tuple[int, trio.lowlevel.Task | str]] = attrs.field(factory=list)
    _now: float = 0.0

    def render(self, root: trio.lowlevel.Task | None) -> str:
        if not trio.lowlevel.in_trio_run():
            return "(no Trio run in this thread)"
        self._now = trio.current_time()
        self._todo.extend(reversed([(0, root)] if root is not None else _outermost()))
        while self._todo:
            depth, item = self._todo.pop()
            if isinstance(item, str):
                self._lines.append("  " * depth + item)
            elif self._left <= 0:
                self._lines.append("  " * depth + f"... more tasks are not shown, {item.name} the first of them")
                break
            else:
                self._left -= 1
                self._task(depth, item)
        return "\n".join(self._lines)

    def _task(self, depth: int, task: trio.lowlevel.Task) -> None:
        try:
            state = " [cancelled]" if is_cancelled(task) else ""
            self._lines.append("  " * depth + f"* {task.name}{state}: {' > '.join(await_stack(task)) or 'at its end'}")
            below = self._inside(depth + 1, task)
        except BaseException as error:  # noqa: ASYNC103  one odd task must not hide the others
            if ends_the_process(error):
                raise
            below = [(depth, f"* (a task could not be shown: {type(error).__name__}: {error})")]
        self._todo.extend(reversed(below))

    def _inside(self, depth: int, task: trio.lowlevel.Task) -> list[tuple[int, trio.lowlevel.Task | str]]:
        """Return the task's scopes in their order, the children of each nursery below it."""
        nurseries = {id(nursery.cancel_scope): nursery for nursery in task.child_nurseries}
        lines: list[tuple[int, trio.lowlevel.Task | str]] = []
        for scope in scopes_of(task):
            nursery = nurseries.pop(id(scope), None)
            facts = self._facts(scope)
            if nursery is None:
                lines += [(depth, f"scope: {facts}")] if facts else []
            else:
                lines += self._nursery(depth, nursery, facts)
        for nursery in nurseries.values():  # of a task whose scopes could not be read
            lines += self._nursery(depth, nursery, self._facts(nursery.cancel_scope))
        return lines

    def _nursery(self, depth: int, nursery: trio.Nursery, facts: str) -> list[tuple[int, trio.lowlevel.Task | str]]:
        children = sorted(nursery.child_tasks, key=lambda child: (getattr(child, "_counter", 0), child.name))
        head = f"nursery of {len(children)}" + (f": {facts}" if facts else "")
        return [(depth, head), *((depth + 1, child) for child in children)]

    def _facts(self, scope: trio.CancelScope) -> str:
        facts = []
        if self._describe is not None and (said := self._describe(scope)):
            facts.append(said)
        if math.isfinite(scope.deadline):
            facts.append(f"deadline in {scope.deadline - self._now:.3f} s")
        if scope.shield:
            facts.append("shielded")
        if scope.cancel_called:
            facts.append(f"cancelled ({cancel_reason(scope)})")
        return ", ".join(facts)


def scopes_of(task: trio.lowlevel.Task) -> list[trio.CancelScope]:
    """Return the scopes that the task has entered, outermost first, without the scope of the nursery it lives in."""
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
    """Return True if the task's next checkpoint raises Cancelled."""
    status: Any = getattr(task, "_cancel_status", None)
    return bool(getattr(status, "effectively_cancelled", False))


def cancel_reason(scope: trio.CancelScope) -> str:
    """Return the reason of the scope's cancellation, in Trio's words."""
    reason: Any = getattr(scope, "_cancel_reason", None)
    if reason is None:
        return ""
    parts = [str(reason.source)]
    if reason.reason:
        parts.append(repr(reason.reason))
    return " ".join(parts)
