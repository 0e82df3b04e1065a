"""The effects of importing trio_asyncio, their repair, and Ctrl-C; each program in a separate process."""

import subprocess
import sys
import textwrap

import pytest
import trio

from trio_rollout_compat.bridge import BridgeError, open_bridge

PRELUDE = """
import asyncio, concurrent.futures, contextlib, functools, signal, sys, threading, time, warnings
import trio
from trio_rollout_compat.bridge import *
"""


def run(program: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a program for at most so many seconds."""
    source = PRELUDE + textwrap.dedent(program)
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=timeout, check=False)


def test_importing_and_the_other_backends_do_not_import_trio_asyncio():
    answer = run("""
        async def main():
            async with open_bridge("thread") as bridge:
                await bridge.call(asyncio.sleep, 0)
        trio.run(main)
        print("trio_asyncio" in sys.modules)
    """)
    assert (answer.stdout, answer.stderr) == ("False\n", "")


def test_stock_asyncio_after_the_in_loop_backend_was_opened():
    """In the main thread and in another one, made before and after: stock loops, and executors that work."""
    answer = run("""
        def look():
            async def inside():
                with concurrent.futures.ThreadPoolExecutor(1) as pool:
                    number = await asyncio.get_running_loop().run_in_executor(pool, lambda: 1)
                with contextlib.suppress(TimeoutError):
                    release = threading.Event()
                    try:
                        await asyncio.wait_for(asyncio.to_thread(release.wait), 0.01)
                    finally:
                        timed_out = not release.is_set()
                        release.set()
                return type(asyncio.get_running_loop()).__name__, number
            print(asyncio.run(inside()), type(asyncio.get_event_loop_policy()).__name__)

        go = threading.Event()
        early = threading.Thread(target=lambda: (go.wait(), look()))
        early.start()

        async def main():
            async with open_bridge("in-loop") as bridge:
                await bridge.call(asyncio.sleep, 0)
                await trio.to_thread.run_sync(look)
        trio.run(main)
        look()
        go.set()
        early.join()
        print(asyncio.get_running_loop.__module__)
    """)
    stock = "('_UnixSelectorEventLoop', 1) _UnixDefaultEventLoopPolicy\n"
    assert (answer.stdout, answer.stderr) == (3 * stock + "trio_asyncio._loop\n", "")


def test_ctrl_c_during_an_asyncio_step_ends_the_program():
    answer = run("""
        async def work():
            try:
                signal.raise_signal(signal.SIGINT)
                await asyncio.sleep(3600)
            finally:
                await asyncio.sleep(0)
                print("cleaned")

        async def main():
            async with open_bridge("in-loop") as bridge:
                await bridge.call(work)
        try:
            trio.run(main)
        except KeyboardInterrupt:
            print("KeyboardInterrupt")
    """)
    assert (answer.stdout, answer.stderr) == ("cleaned\nKeyboardInterrupt\n", "")


def test_ctrl_c_reaches_the_main_task_while_a_thread_runs_asyncio_code():
    answer = run("""
        async def work():
            try:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                await asyncio.sleep(3600)
            finally:
                print("cleaned")

        async def main():
            async with open_bridge("thread") as bridge:
                await bridge.call(work)
        try:
            trio.run(main)
        except KeyboardInterrupt:
            print("KeyboardInterrupt")
    """)
    assert (answer.stdout, answer.stderr) == ("cleaned\nKeyboardInterrupt\n", "")


def test_the_host_s_own_ctrl_c_goes_through_attached_code_to_the_host():
    """The host runs its loop in the main thread; the interrupt happens to arrive in a function of ours."""
    answer = run("""
        async def work():
            signal.raise_signal(signal.SIGINT)

        async def main(loop):
            async with open_bridge(loop=loop, settings=BridgeSettings(again=0.1, grace=0.2)) as bridge:
                try:
                    await bridge.call(work)
                except AsyncioExit as error:
                    seen.append(str(error))

        seen = []
        loop = asyncio.new_event_loop()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        engine = threading.Thread(target=trio.run, args=[main, loop])
        engine.start()
        try:
            loop.run_forever()
        except KeyboardInterrupt:
            seen.append("host")
        engine.join()
        print(*sorted(seen), sep=", ")
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
    """)
    assert answer.stdout == "__main__.work: raised KeyboardInterrupt(), host\n", answer.stderr


GUEST = """
    async def work():
        return await asyncio.gather(asyncio.sleep(0, 1), asyncio.sleep(0, 2))

    async def in_trio(loop):
        await trio.lowlevel.checkpoint()
        {body}

    async def host():
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        trio.lowlevel.start_guest_run(
            in_trio, loop, run_sync_soon_threadsafe=loop.call_soon_threadsafe, done_callback=done.set_result
        )
        print((await done).unwrap())

    asyncio.run(host())
"""


def test_guest_mode_works_for_pure_trio_use_and_with_the_host_s_loop_attached():
    answer = run(
        GUEST.format(
            body="""
        async with open_bridge(loop=loop) as bridge:
            return await bridge.call(work)"""
        )
    )
    assert (answer.stdout, answer.stderr) == ("[1, 2]\n", "")


def test_guest_mode_is_refused_together_with_the_in_loop_backend():
    answer = run(
        GUEST.format(
            body="""
        import trio_asyncio  # it hides the host's loop from ``asyncio.get_running_loop``
        try:
            async with open_bridge("in-loop"):
                pass
        except BridgeError as error:
            return str(error)"""
        )
    )
    assert "Trio runs as a guest of that loop" in answer.stdout, answer.stderr
    assert not answer.stderr


def test_the_main_program_may_be_trio_asyncio():
    """Side by side with its own asyncio code, which calls the engine through ``trio_as_aio``."""
    answer = run("""
        import trio_asyncio

        async def asyncio_work(bridge):
            async def in_trio():
                return await bridge.call(asyncio.sleep, 0, "through the bridge")
            return await trio_asyncio.trio_as_aio(in_trio)(), await asyncio.sleep(0, "beside it")

        async def main():
            async with open_bridge("in-loop") as bridge:
                print(await trio_asyncio.aio_as_trio(asyncio_work)(bridge))

        trio_asyncio.run(main)
    """)
    assert (answer.stdout, answer.stderr) == ("('through the bridge', 'beside it')\n", "")


def test_an_unknown_trio_asyncio_is_refused():
    from types import SimpleNamespace

    from trio_rollout_compat.bridge._inloop import mend

    with pytest.raises(BridgeError, match=r"cannot be mended.*0\.16"):
        mend(SimpleNamespace(), SimpleNamespace())


async def test_a_reentrant_call_works_in_loop():
    """Asyncio code goes back into Trio, which calls asyncio code."""
    import asyncio

    async def outer(bridge):
        import trio_asyncio

        async def in_trio():
            await trio.lowlevel.checkpoint()
            return await bridge.call(asyncio.sleep, 0, "inner")

        return await trio_asyncio.trio_as_aio(in_trio)()

    async with open_bridge("in-loop") as bridge:
        assert await bridge.call(outer, bridge) == "inner"
