"""How programs with an EngineThread end: each in a process of its own."""

import signal
import subprocess
import sys
import textwrap

import pytest

PRELUDE = """
import asyncio, os, signal, sys, threading, time
from contextlib import asynccontextmanager
import trio
from trio_rollout_compat import EngineThread, exit_on_sigterm, open_engine_thread
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
"""


def run(program, *, send=None):
    """Run it, send it this signal once it says that it hangs; its exit status and what it said."""
    source = PRELUDE + textwrap.dedent(program)
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as process:
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
