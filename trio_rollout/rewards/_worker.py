"""The program of a scorer process: run as a script by its path; imports only the standard library until a scorer comes.

Messages are 8 bytes of length and a pickle. In: one setup, then one pickled value a call. Out: one ``("ready", None)``, then
``("value", result)`` or ``("error", (classes, message, traceback))`` a call, with the exception's classes as "module.Class".
End of input is the end of the process. The one argument is the reading end of a pipe without a writer: when its other end
closes, the parent has gone.
"""

import fcntl
import os
import pickle
import runpy
import select
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

LENGTH = struct.Struct("<Q")
MAIN_ALIAS = "__mp_main__"  # multiprocessing's name for it: a script guarded for that is guarded for this


def _die_with_parent(lifeline: int) -> None:
    """Let the kernel end this process when the parent dies, also in the middle of native code.

    SIGIO's default action is to end the process. A thread that waits for the end of input would not do: a regular
    expression that backtracks holds the GIL for ever. PR_SET_PDEATHSIG would not either: it is about the parent's *thread*.
    """
    os.set_inheritable(lifeline, False)  # ruff: ignore[boolean-positional-value-in-call]  takes no keywords
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0.0)[0]:
        sys.exit(1)  # the parent died before


def _take_channels() -> tuple[BinaryIO, BinaryIO]:
    """Return the pipes to the parent, moved out of reach of a scorer that prints or reads."""
    receive, send = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return receive, send


def _read_message(receive: BinaryIO) -> bytes | None:
    head = receive.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = receive.read(length)
    return body if len(body) == length else None


def _write_message(send: BinaryIO, kind: str, content: object) -> None:
    body = pickle.dumps((kind, content))
    send.write(LENGTH.pack(len(body)) + body)
    send.flush()


def _classes_of(error: BaseException) -> list[str]:
    """Return the exception's classes; of a group also those that all its leaves share: they say what has failed."""
    classes = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__]
    if isinstance(error, BaseExceptionGroup):
        first, *others = map(_classes_of, error.exceptions)
        classes += [name for name in first if name not in classes and all(name in other for other in others)]
    return classes


def _described(error: BaseException) -> tuple[tuple[str, ...], str, str]:
    classes = tuple(_classes_of(error))
    try:
        return classes, str(error), "".join(traceback.format_exception(error))
    except BaseException as another:  # ruff: ignore[blind-except]  # noqa: ASYNC103  no Trio here; the user's __str__
        return (
            classes,
            f"(its __str__ raised {type(another).__name__})",
            "".join(traceback.format_tb(error.__traceback__)),
        )


def _load(setup: bytes) -> Callable[[Any], object]:
    """Return the scorer. A scorer defined in the parent's main script needs that script under another name."""
    prepared = pickle.loads(setup)
    sys.path[:] = prepared["sys_path"]
    if prepared["main_path"] is not None:
        names = runpy.run_path(prepared["main_path"], run_name=MAIN_ALIAS)
        main = type(sys)(MAIN_ALIAS)
        main.__dict__.update(names)
        sys.modules["__main__"] = sys.modules[MAIN_ALIAS] = main
    fn: Callable[[Any], object] = pickle.loads(prepared["fn"])
    return fn


def _answer(send: BinaryIO, fn: Callable[[Any], object], request: bytes) -> None:
    try:
        value = fn(pickle.loads(request))
        _write_message(send, "value", value)
    except BaseException as error:  # ruff: ignore[blind-except]  # noqa: ASYNC103  no Trio here; the scorer is user code
        _write_message(send, "error", _described(error))


def main() -> None:
    """Serve until the parent closes the pipe."""
    _die_with_parent(int(sys.argv[1]))
    receive, send = _take_channels()
    setup = _read_message(receive)
    if setup is None:
        return
    try:
        fn = _load(setup)
    except BaseException as error:  # ruff: ignore[blind-except]  # noqa: ASYNC103  no Trio here; importing runs user code
        _write_message(send, "error", _described(error))
        return
    _write_message(send, "ready", None)
    while (request := _read_message(receive)) is not None:
        _answer(send, fn, request)


if __name__ == "__main__":
    main()
