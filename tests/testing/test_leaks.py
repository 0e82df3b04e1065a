"""The leak fixture with each kind of leak, planted in a separate test suite that runs in a child process."""

import os
import socket

import pytest

from trio_rollout.testing import LeakError, no_leaks

SUITE = """
import asyncio, os, socket, subprocess, sys, threading, time
import pytest, trio

KEPT = []


def test_clean_sync():
    pass


async def test_clean_with_a_worker_thread_and_a_process(tmp_path):
    await trio.to_thread.run_sync(time.sleep, 0)
    await trio.run_process([sys.executable, "-c", ""])
    (tmp_path / "file").write_text("text")


async def numbers():
    yield 1
    yield 2


async def test_clean_generator_that_was_closed():
    KEPT.append(numbers())
    async for _ in KEPT[-1]:
        break
    await KEPT[-1].aclose()


@pytest.fixture(scope="module")
def shared_process():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process


def test_clean_with_a_process_of_the_module(shared_process):
    pass


def test_clean_thread_that_is_about_to_end():
    threading.Thread(target=time.sleep, args=[0.05]).start()


def test_leak_file(tmp_path):
    KEPT.append((tmp_path / "file").open("w"))


def test_leak_dropped_file(tmp_path):
    (tmp_path / "file").open("w")


def test_leak_descriptor():
    KEPT.append(os.pipe())


async def test_leak_socket():
    KEPT.append(trio.socket.socket())


def test_leak_socket_in_a_cycle():
    cycle = [socket.socket()]
    cycle.append(cycle)


def test_leak_child():
    KEPT.append(subprocess.Popen(["sleep", "60"]))


def test_leak_zombie():
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    KEPT.append(child)


def test_leak_thread():
    threading.Thread(target=KEPT.append(threading.Event()) or KEPT[-1].wait, daemon=True, name="planted").start()


async def test_leak_worker_thread():
    KEPT.append(threading.Event())
    with trio.move_on_after(0.01):
        await trio.to_thread.run_sync(KEPT[-1].wait, abandon_on_cancel=True)


async def test_leak_coroutine():
    trio.sleep(0)


async def test_leak_async_generator():
    KEPT.append(numbers())
    async for _ in KEPT[-1]:
        break


async def test_leak_dropped_async_generator():
    async for _ in numbers():
        break


async def test_leak_system_task():
    trio.lowlevel.spawn_system_task(trio.sleep_forever)


def test_leak_exception_in_a_finalizer():
    class Broken:
        def __del__(self):
            raise ValueError("planted")
    Broken()


def test_leak_event_loop():
    asyncio.new_event_loop()


def test_failure_comes_before_its_leaks(tmp_path):
    KEPT.append((tmp_path / "file").open("w"))
    assert False, "its own"


@pytest.fixture(scope="module", autouse=True)
def clean_up():
    yield
    for thing in KEPT:
        if isinstance(thing, subprocess.Popen):
            thing.kill(), thing.wait()
        if isinstance(thing, threading.Event):
            thing.set()
"""
NAMED = {
    "file": "file",
    "dropped_file": "unclosed file",
    "descriptor": "file",
    "socket": "socket:[",
    "socket_in_a_cycle": "unclosed <socket",
    "child": "child process",
    "zombie": "(zombie)",
    "thread": "thread: planted",
    "worker_thread": "thread: ",
    "coroutine": "was never awaited",
    "async_generator": "async generator: numbers",
    "dropped_async_generator": "Async generator",
    "system_task": "system task: trio.sleep_forever",
    "exception_in_a_finalizer": "planted",
    "event_loop": "unclosed event loop",
}


def test_each_planted_leak_fails_its_test_and_nothing_else_does(pytester: pytest.Pytester):
    """Leaks are found with lax warning filters too: the plugin does not depend on the user's settings."""
    pytester.makepyfile(SUITE)
    pytester.makeini("[pytest]\ntrio_mode = true\nfilterwarnings = ignore\n")
    result = pytester.runpytest_subprocess("-p", "trio_rollout.testing.pytest_leaks", "-p", "no:xdist", "-vv", "-rA")
    result.assert_outcomes(passed=5 + len(NAMED), failed=1, errors=len(NAMED))
    caught = "".join(result.outlines).split("ERROR at teardown of test_leak_")[1:]
    assert {report.split(" ")[0]: NAMED[report.split(" ")[0]] in report for report in caught} == dict.fromkeys(
        NAMED, True
    )


def test_no_leaks_names_what_is_left_and_lets_the_bodys_own_error_pass():
    with pytest.raises(LeakError, match=r"left behind:\n  file \d+: socket"), no_leaks():
        left = socket.socket()
    left.close()
    with pytest.raises(ZeroDivisionError), no_leaks():
        1 / 0  # ruff: ignore[useless-expression]


def test_a_descriptor_number_that_was_used_again_is_a_new_file():
    first = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(LeakError, match=f"file {first}: /dev/zero"), no_leaks():
        os.dup2(second := os.open("/dev/zero", os.O_RDONLY), first)
        os.close(second)
    os.close(first)
