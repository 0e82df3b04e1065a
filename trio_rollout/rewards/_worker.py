"""The program of a scorer process: run as a script by its path; imports only the standard library until a scorer comes.

Two processes run it::

    host ──▶ keeper ──fork──▶ scorer, in a new session

The keeper is a child subreaper: whatever the scorer starts stays below the keeper, also a process that called ``setsid`` and
lost its parent. The keeper ends the whole tree when the scorer ends, or when the lifeline closes: that is the order of the
host, and what the host's death does. Then the keeper ends as the scorer did. Nothing else is asked of it, so no scorer can keep
it from that by holding the interpreter's lock. If the keeper is killed, the scorer dies with it; what the scorer moved into other
sessions then survives, as in every program.

Messages are 8 bytes of length and a body. In: one setup, then one value a call, both pickles. Out: JSON, because the scorer is
trusted less than the host: ``[0, "ready", pid]``, then ``[n, "value", value]``, ``[n, "array", [number, ...]]`` or ``[n, "error",
[class, ...], message, traceback]`` for call n, with the exception's classes as "module.Class". End of input is the end.
"""

import ctypes
import json
import os
import pickle
import resource
import runpy
import select
import signal
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, BinaryIO, NoReturn

LENGTH = struct.Struct("<Q")
REPLY_LIMIT = 2**24  # bytes of a reply
MAIN_ALIAS = "__mp_main__"  # multiprocessing's name for it: a script guarded for that is guarded for this
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_LOOK_AGAIN_MS = 50  # only a fallback: each death that matters raises SIGCHLD here
_LONGEST_TEXT = 2**16  # characters of a message or a traceback


def _open_wake_pipe() -> int:
    """Return a descriptor that becomes readable with each SIGCHLD of this process."""
    wake, write = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return wake


def _reap(scorer: int) -> tuple[int | None, bool]:
    """Reap the dead children; return the scorer's wait status if it was among them, and True if any child is left."""
    status = None
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == scorer:
                status = found[1]
    except ChildProcessError:
        return status, False
    return status, True


def _kill_children() -> None:
    with open(f"/proc/self/task/{os.getpid()}/children", "rb") as listing:  # ruff: ignore[builtin-open, read-whole-file]  pathlib takes 10 ms
        children = listing.read().split()
    for pid in children:
        with suppress(OSError):
            os.kill(int(pid), signal.SIGKILL)


def _keep(scorer: int, lifeline: int, wake: int) -> NoReturn:
    """Wait for the end of the scorer or of the lifeline; kill everything below until nothing is left; end as the scorer did.

    Each kill moves grandchildren up to this process, and a process that forks meanwhile makes one more round.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for channel in (0, 1):  # the pipes are the scorer's alone: their end is seen when the scorer ends
        os.dup2(nothing, channel)
    waiting = select.poll()
    waiting.register(lifeline, 0)  # hang-up only
    waiting.register(wake, select.POLLIN)
    status, some_left, ending = None, True, False
    while some_left:
        ready = {descriptor for descriptor, _ in waiting.poll(_LOOK_AGAIN_MS if ending else None)}
        if wake in ready:
            os.read(wake, 65536)
        ended, some_left = _reap(scorer)
        status = status if ended is None else ended
        ending = ending or lifeline in ready or status is not None
        if ending:
            _kill_children()
    code = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the scorer had its chance to leave one
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(abs(code))


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


def _write_message(send: BinaryIO, number: int, kind: str, *content: object) -> None:
    body = json.dumps([number, kind, *content]).encode()
    if len(body) > REPLY_LIMIT:
        raise ValueError(f"the scorer's result takes {len(body)} bytes, at most {REPLY_LIMIT} can be sent back")
    send.write(LENGTH.pack(len(body)) + body)
    send.flush()


def _classes_of(error: BaseException) -> list[str]:
    """Return the exception's classes; of a group also those that all its leaves share: they say what has failed."""
    classes = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__]
    if isinstance(error, BaseExceptionGroup):
        first, *others = map(_classes_of, error.exceptions)
        classes += [name for name in first if name not in classes and all(name in other for other in others)]
    return classes


def _described(error: BaseException) -> tuple[list[str], str, str]:
    import traceback  # ruff: ignore[import-outside-top-level]  takes 20 ms, and only errors need it

    classes = _classes_of(error)
    try:
        message, trace = str(error), "".join(traceback.format_exception(error))
    except BaseException as another:  # ruff: ignore[blind-except]  # noqa: ASYNC103  no Trio here; the user's __str__
        message = f"(its __str__ raised {type(another).__name__})"
        trace = "".join(traceback.format_tb(error.__traceback__))
    return classes, _shortened(message), _shortened(trace)


def _shortened(text: str) -> str:
    half = _LONGEST_TEXT // 2
    return text if len(text) <= _LONGEST_TEXT else f"{text[:half]} ... {text[-half:]}"


def _plain(value: Any) -> object:
    """Return a result as JSON has it: numbers, texts, None, and lists and mappings of them.

    What a reward may be is a number here as well: numpy's scalars, arrays and tensors of one element, Decimal, Fraction.

    Raises:
      TypeError: the result holds something else.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        named = {str(name): _plain(inner) for name, inner in value.items()}
        if len(named) < len(value):
            raise ValueError(f"names must differ as text, got {list(value)!r:.80}")
        return named
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if callable(getattr(value, "item", None)):
        try:
            return value.item()
        except (ValueError, RuntimeError):  # numpy's and torch's way to say that there is more than one element
            return value.tolist()
    if not isinstance(value, type) and (hasattr(value, "__float__") or hasattr(value, "__index__")):
        return float(value)
    raise TypeError(
        f"a scorer's process sends back numbers, texts, None, and lists and mappings of them, not {type(value).__name__}"
    )


def _write_value(send: BinaryIO, number: int, value: Any) -> None:
    if getattr(value, "ndim", None) == 1 and callable(getattr(value, "tolist", None)):
        _write_message(send, number, "array", value.tolist())  # the rewards of a group, or one reward: the host decides
    else:
        _write_message(send, number, "value", _plain(value))


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


def _answer(send: BinaryIO, number: int, fn: Callable[[Any], object], request: bytes) -> None:
    try:
        _write_value(send, number, fn(pickle.loads(request)))
    except BaseException as error:  # ruff: ignore[blind-except]  # noqa: ASYNC103  no Trio here; the scorer is user code
        _write_message(send, number, "error", *_described(error))


def _serve() -> None:
    """Serve until the parent closes the pipe."""
    receive, send = _take_channels()
    setup = _read_message(receive)
    if setup is None:
        return
    try:
        fn = _load(setup)
    except BaseException as error:  # ruff: ignore[blind-except]  # noqa: ASYNC103  no Trio here; importing runs user code
        _write_message(send, 0, "error", *_described(error))
        return  # noqa: ASYNC104  no Trio here
    _write_message(send, 0, "ready", os.getpid())
    number = 0
    while (request := _read_message(receive)) is not None:
        number += 1
        _answer(send, number, fn, request)


def main() -> None:
    """Become the keeper, and fork the scorer. The one argument is the reading end of the lifeline."""
    lifeline, libc, keeper = int(sys.argv[1]), ctypes.CDLL(None, use_errno=True), os.getpid()
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    wake = _open_wake_pipe()
    scorer = os.fork()
    if scorer:
        _keep(scorer, lifeline, wake)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != keeper:
        os._exit(1)  # the keeper died before
    os.setsid()
    os.close(lifeline)
    _serve()


if __name__ == "__main__":
    main()
