"""The two servers that one suite runs against: our tiny one, always, and a real SGLang, the oracle."""

import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import pytest
import trio

from trio_rollout.tiny import TinyModel, TinyTokenizer

from ._server import Server, Target

# What the real one takes. So there is time to interrupt it, also where a busy machine keeps the test waiting for a second.
STEP_S = 0.01


PROGRAM = """
import sys
from trio_rollout.tiny import TinySettings, run_tiny
settings = TinySettings(max_running=8, max_queued=4, step_delay=float(sys.argv[1]), incremental=len(sys.argv) > 2)
run_tiny(settings, "127.0.0.1", 0, lambda url: print(url, flush=True))
"""


@contextmanager
def run_tiny(folder: Path, *flags: str) -> Generator[Target]:
    """The tiny server in a separate process, with the real one's limits."""
    vocabulary = TinyTokenizer.load().vocab
    first, second = (TinyModel.random(vocab=vocabulary, seed=seed).save(folder / str(seed)) for seed in range(2))
    command = [sys.executable, "-c", PROGRAM, str(STEP_S), *flags]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url.startswith("http"), f"the tiny server did not start: {url!r}"
            yield Target(url=url, weights=(first, second), vocabulary=vocabulary)
        finally:
            process.kill()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Generator[Target]:
    """The tiny server."""
    with run_tiny(tmp_path_factory.mktemp("tiny")) as target:
        yield target


@pytest.fixture(scope="session")
def real(sglang_url: str, sglang_weights: tuple[Path, Path]) -> Target:
    """The real SGLang."""
    return Target(url=sglang_url, weights=sglang_weights, vocabulary=2048)


@pytest.fixture(scope="session", params=["tiny", pytest.param("real", marks=pytest.mark.real_sglang)])
def target(request: pytest.FixtureRequest) -> Target:
    """One server after the other."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module", params=["tiny", pytest.param("real", marks=pytest.mark.real_sglang)])
def doomed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Target]:
    """One server after the other that streams deltas, and that the last test of a module may kill."""
    if request.param == "tiny":
        with run_tiny(tmp_path_factory.mktemp("doomed"), "--incremental") as target:
            yield target
    else:
        weights = request.getfixturevalue("sglang_weights")
        with request.getfixturevalue("start_sglang")("--incremental-streaming-output") as url:
            yield Target(url=url, weights=weights, vocabulary=2048)


def open_http(target: Target) -> httpx.AsyncClient:
    """A client with a timeout and no limit of connections."""
    return httpx.AsyncClient(base_url=target.url, timeout=60, limits=httpx.Limits(max_connections=None))


@asynccontextmanager
async def open_server(target: Target) -> AsyncGenerator[Server]:
    """The server as a test sees it. What a test sent and did not wait for ends with the test, before the client closes."""
    async with open_http(target) as http, trio.open_nursery() as nursery:
        try:
            yield Server(http=http, nursery=nursery, target=target)
        finally:
            nursery.cancel_scope.cancel()


@pytest.fixture
async def doomed_server(doomed: Target) -> AsyncIterator[Server]:
    """The server that may die; nothing is put in order afterwards."""
    async with open_server(doomed) as server:
        yield server


@pytest.fixture
async def server(target: Target) -> AsyncIterator[Server]:
    """The server, with a client; afterwards it runs nothing and is not paused, whatever the test did."""
    async with open_server(target) as server:
        yield server
        with trio.CancelScope(shield=True), trio.fail_after(30):
            await server.post("/continue_generation")
            await server.post("/abort_request", abort_all=True)
            await server.until_idle()
