"""The end of programs with an EngineThread, each in a separate process."""

import contextlib
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

PRELUDE = """
import asyncio, os, signal, sys, threading, time
from contextlib import asynccontextmanager
import trio
from trio_rollout_compat import EngineThread, aopen_engine_thread, exit_on_sigterm, open_engine_thread
from trio_rollout_compat.thread import EngineForked

def say(*words):
    print(*words, flush=True)

class Engine:
    async def hang(self):
        try:
            say("hanging")
            await trio.sleep_forever()
        finally:
            say("call cleaned")

    async def add(self, one, two):
        return one + two

    async def wedge(self):
        say("hanging")
        threading.Event().wait()

@asynccontextmanager
async def lifespan():
    try:
        yield Engine()
    finally:
        with trio.CancelScope(shield=True):
            await trio.lowlevel.checkpoint()
        say("engine cleaned")

@asynccontextmanager
async def slow():
    try:
        say("hanging")
        await trio.sleep_forever()
        yield
    finally:
        say("start cleaned")
"""


@contextlib.contextmanager
def killed_after(process, seconds):
    """Run a program; one that hangs fails, and does not hang the tests."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def run(program, *, send=None):
    """Run a program, send it this signal once it says that it hangs; return its exit status and its output."""
    source = PRELUDE + textwrap.dedent(program)
    with (
        subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as process,
        killed_after(process, 60),
    ):
        lines = []
        for line in process.stdout:
            lines.append(line.strip())
            if line == "hanging\n" and send is not None:
                process.send_signal(send)
        process.wait()
    return process.returncode, lines


def test_falling_off_the_end_cleans_up():
    assert run("thread = EngineThread(lifespan).start()") == (0, ["engine cleaned"])


def test_sys_exit_cleans_up_and_keeps_its_status():
    program = """
        thread = EngineThread(lifespan).start()
        future = thread.submit(thread.value.hang)
        thread.call(thread.value.add, 1, 2)
        sys.exit(7)
    """
    assert run(program) == (7, ["hanging", "call cleaned", "engine cleaned"])


def test_ctrl_c_in_a_blocked_call_cancels_it_and_comes_out():
    program = """
        try:
            with open_engine_thread(lifespan) as thread:
                thread.call(thread.value.hang)
        except KeyboardInterrupt:
            say("KeyboardInterrupt")
    """
    expected = ["hanging", "call cleaned", "engine cleaned", "KeyboardInterrupt"]
    assert run(program, send=signal.SIGINT) == (0, expected)


def test_ctrl_c_in_an_asyncio_host_cancels_the_call():
    program = """
        async def main():
            await thread.acall(thread.value.hang)

        with open_engine_thread(lifespan) as thread:
            try:
                asyncio.run(main())
            except KeyboardInterrupt:
                say("KeyboardInterrupt")
    """
    expected = ["hanging", "call cleaned", "KeyboardInterrupt", "engine cleaned"]
    assert run(program, send=signal.SIGINT) == (0, expected)


def test_sigterm_with_the_helper_cleans_up():
    program = """
        with exit_on_sigterm(), open_engine_thread(lifespan) as thread:
            thread.call(thread.value.hang)
    """
    assert run(program, send=signal.SIGTERM) == (143, ["hanging", "call cleaned", "engine cleaned"])


def test_sigterm_without_it_does_not():
    program = """
        with open_engine_thread(lifespan) as thread:
            thread.call(thread.value.hang)
    """
    assert run(program, send=signal.SIGTERM) == (-signal.SIGTERM, ["hanging"])


def test_a_wedged_engine_does_not_keep_the_process():
    program = """
        thread = EngineThread(lifespan, grace=0.1).start()
        thread.submit(thread.value.wedge)
        time.sleep(0.1)
    """
    assert run(program) == (0, ["hanging"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_is_told_and_can_have_its_own():
    program = """
        with open_engine_thread(lifespan) as thread:
            say(thread.call(thread.value.add, 1, 2))
            child = os.fork()
            if not child:
                for what in (lambda: thread.call(trio.sleep, 0), lambda: thread.value, thread.start):
                    try:
                        what()
                    except EngineForked as error:
                        say("forked")
                thread.close()
                with open_engine_thread(lifespan) as own:
                    say(own.call(own.value.add, 2, 2))
                os._exit(0)
            os.waitpid(child, 0)
            say(thread.call(thread.value.add, 3, 2))
    """
    expected = ["3", "forked", "forked", "forked", "4", "engine cleaned", "5", "engine cleaned"]
    assert run(program) == (0, expected)


def test_sigterm_while_it_starts():
    program = """
        with exit_on_sigterm(), open_engine_thread(slow):
            say("never")
    """
    assert run(program, send=signal.SIGTERM) == (143, ["hanging", "start cleaned"])


@pytest.mark.parametrize(("send", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_signals_while_it_starts_in_an_asyncio_host(send, status):
    """With the start in ``asyncio.to_thread``, ``asyncio.run`` would wait for that thread before it let the exit out."""
    program = """
        async def main():
            async with aopen_engine_thread(slow):
                say("never")

        with exit_on_sigterm():
            asyncio.run(main())
    """
    assert run(program, send=send) == (status, ["hanging", "start cleaned"])


def test_a_thread_that_waits_for_the_engine_does_not_keep_the_process():
    """The interpreter joins the thread before it runs ``atexit``: the engine must be closed before that."""
    program = """
        thread = EngineThread(lifespan).start()

        def wait():
            try:
                thread.call(thread.value.hang)
            except Exception as error:
                say(type(error).__name__)

        threading.Thread(target=wait).start()
        thread.call(trio.lowlevel.checkpoint)
    """
    assert run(program) == (0, ["hanging", "call cleaned", "engine cleaned", "EngineClosed"])


def test_a_thread_that_waits_for_a_wedged_engine_does_not_keep_the_process():
    program = """
        thread, reached = EngineThread(lifespan, grace=0.2).start(), threading.Event()

        async def wedge():
            reached.set()
            threading.Event().wait()

        def wait():
            try:
                thread.call(wedge)
            except Exception as error:
                say(type(error).__name__, "wait" in str(error))

        threading.Thread(target=wait).start()
        reached.wait()
    """
    assert run(program) == (0, ["EngineStuck True"])


def test_one_that_is_opened_by_the_last_thread_is_closed_too():
    program = """
        def late():
            main = threading.main_thread()
            main.join()
            try:
                with open_engine_thread(lifespan) as thread:
                    say(thread.call(thread.value.add, 1, 2))
            except RuntimeError as error:  # from Python 3.12 on
                say("3" if "interpreter shutdown" in str(error) else error)
                say("engine cleaned")

        threading.Thread(target=late).start()
    """
    assert run(program) == (0, ["3", "engine cleaned"])


def test_a_handler_that_c_code_had_installed_is_no_obstacle():
    program = """
        import ctypes
        libc = ctypes.CDLL(None)
        handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: None)
        libc.signal(signal.SIGTERM, handler)
        signal.signal = lambda number, new, real=signal.signal: (real(number, new), None)[1]  # what Python says of it
        with exit_on_sigterm():
            say("inside")
        say(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
    """
    assert run(program) == (0, ["inside", "True"])
