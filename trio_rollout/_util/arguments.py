"""The door: checks of what a public function is called with, so that a mistake is named there and not in a rollout."""

import inspect
from collections.abc import Callable
from typing import Any

import trio

from .._core.scores import shown
from ..errors import SettingsTypeError


def refuse(what: str, value: object, allowed: str) -> SettingsTypeError:
    """Return the error for an argument of another type."""
    return SettingsTypeError(f"{what}: got {shown(value)}, allowed: {allowed}")


def require(what: str, value: object, kind: type | tuple[type, ...], allowed: str) -> None:
    """Refuse an argument that is none of these types.

    Raises:
      SettingsTypeError: names the argument, its value and what is allowed.
    """
    if not isinstance(value, kind):
        raise refuse(what, value, allowed)


def require_methods(what: str, value: object, names: tuple[str, ...], allowed: str) -> None:
    """Refuse an object without these methods, and a class in place of an object.

    Raises:
      SettingsTypeError: as ``require``.
    """
    if isinstance(value, type) or not all(callable(getattr(value, name, None)) for name in names):
        raise refuse(what, value, allowed)


def require_callable(what: str, value: object, allowed: str = "a function") -> None:
    """Refuse what can't be called.

    Raises:
      SettingsTypeError: as ``require``.
    """
    if not callable(value):
        raise refuse(what, value, allowed)


def require_async(what: str, value: Any, advice: str) -> None:
    """Refuse what is no async function as far as it shows; ``advice`` says what to do with a synchronous one.

    A lambda, and a function whose annotation says that it returns an awaitable, may hand on another's coroutine.

    Raises:
      SettingsTypeError: it can't be called, is a class or a coroutine, or is a synchronous function.
    """
    if inspect.iscoroutine(value):
        value.close()  # else Python warns that it was never awaited
        raise refuse(what, value, "the async function itself, without a call")
    if isinstance(value, type) or not callable(value):
        raise refuse(what, value, "an async function")
    if is_synchronous(value):
        raise refuse(what, value, f"an async function; this one is synchronous: {advice}")


def require_trio(what: str) -> None:
    """Refuse to run without Trio, as in a notebook, whose cells are asyncio's.

    Raises:
      RuntimeError: Trio does not run here; says what to do.
    """
    if not trio.lowlevel.in_trio_run():
        raise RuntimeError(
            f"{what} needs Trio, which does not run here (the cells of a notebook are asyncio's): start an EngineThread of "
            "trio_rollout_compat, or call trio.run(main) in a script; see docs/embedding.md, Notebooks"
        )


def is_synchronous(function: Callable[..., object]) -> bool:
    """Return True if a call certainly gives no awaitable: a ``def`` that does not say so, or an object with one to call."""
    inner = inspect.unwrap(function)
    if not (inspect.isfunction(inner) or inspect.ismethod(inner)):
        inner = getattr(type(inner), "__call__", None)  # ruff: ignore[unreliable-callable-check]  the method itself is wanted
    if not inspect.isfunction(inner := getattr(inner, "__func__", inner)):
        return False  # written in C, or a partial: nothing shows
    returns = str(inner.__annotations__.get("return", ""))
    hands_on = inner.__name__ == "<lambda>" or any(word in returns for word in ("Awaitable", "Coroutine", "Any"))
    return not (hands_on or inspect.iscoroutinefunction(inner))
