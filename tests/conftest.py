"""Fixtures of all tests: each fails when it leaves something behind; on request there is a real SGLang."""

import os
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, and no verdict about speed: a busy machine must not fail a test.
settings.register_profile("project", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")

pytest_plugins = ["trio_rollout.testing.pytest_leaks", "pytester"]

ROOT = Path(__file__).resolve().parents[1]
SGLANG = ROOT / ".venv-sglang"
START_S = 600

StartServer = Callable[..., AbstractContextManager[str]]


@pytest.fixture
def given_time() -> Callable[..., Awaitable[Any]]:
    """``await given_time(run)``: what ``run(limit)`` returns once a command came to say something before its time limit.

    How far a command comes that is killed at its limit depends on how soon it gets a turn.
    """

    async def given_time(
        run: Callable[[float], Awaitable[Any]], came: Callable[[Any], Any] = attrgetter("stdout")
    ) -> Any:
        for limit in (0.2, 2, 20):
            if came(result := await run(limit)):
                return result
        pytest.fail(f"20 s were not enough: {result}")

    return given_time


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up and process.poll() is None:
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass  # it is not listening yet
        time.sleep(0.5)
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:])
    pytest.fail(f"SGLang was not ready after {START_S} s (exit code {process.poll()}):\n{tail}", pytrace=False)


def _kill(family: list[psutil.Process]) -> None:
    """The scheduler and the detokenizer are processes of their own, and do not always die with their parent."""
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=30)


@contextmanager
def run_sglang(log: Path, *flags: str) -> Generator[str]:
    """A real SGLang with these additional flags, ready to serve; yields its URL."""
    port = _free_port()
    command = [ROOT / "tests" / "real_sglang" / "run.sh", SGLANG, str(port), *flags]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        family = [psutil.Process(process.pid)]
        try:
            _wait_until_ready(url := f"http://127.0.0.1:{port}", process, log)
            family += family[0].children(recursive=True)  # now: without their parent they can't be found
            yield url
        finally:
            _kill(family)


@pytest.fixture(scope="session")
def start_sglang(tmp_path_factory: pytest.TempPathFactory) -> StartServer:
    """``with start_sglang(*flags) as url``: for a test that needs its own server. It takes a minute or two."""
    return lambda *flags: run_sglang(tmp_path_factory.mktemp("sglang") / "log", *flags)


@pytest.fixture(scope="session")
def sglang_url(start_sglang: StartServer) -> Generator[str]:
    """The one real SGLang of this test run: eight requests are decoded at once, four may wait.

    With ``SGLANG_URL`` set it is that one, started by ``tests/real_sglang/run.sh`` with the same flags.
    """
    if url := os.environ.get("SGLANG_URL"):
        yield url
        return
    with start_sglang("--max-queued-requests", "4") as url:
        yield url


@pytest.fixture(scope="session")
def sglang_weights() -> tuple[Path, Path]:
    """The weights that it serves at first, and others of the same shape."""
    return SGLANG / "models" / "seed-0", SGLANG / "models" / "seed-1"
