"""The fake server's process: compiled on first use, configured over HTTP, and asked afterwards whether it was the bottleneck."""

import hashlib
import http.client
import json
import math
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import attrs

from .bodies import LENGTHS, write_bodies

HERE = Path(__file__).parent
BUILD = HERE.parent / ".build"
# Above these its own delays show in a client's figures.
BUSY_SHARE = 0.8
LATE_MS = 25.0


def build_server() -> Path:
    """The server's program, compiled unless this very source was compiled before."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise SystemExit("the benchmarks' fake server is written in C: install a C compiler (cc, gcc or clang)")
    source = HERE / "server.c"
    program = BUILD / f"server-{hashlib.sha256(source.read_bytes()).hexdigest()[:12]}"
    if not program.exists():
        BUILD.mkdir(exist_ok=True)
        fresh = program.with_suffix(".new")
        subprocess.run([compiler, "-O2", "-o", str(fresh), str(source), "-lm"], check=True)
        fresh.rename(program)
    return program


@attrs.frozen(kw_only=True)
class Latency:
    """The server's latency in milliseconds: lognormal around a median, cut at ``cap``; sigma 0: always the median."""

    median: float = 0.0
    sigma: float = 0.0
    cap: float = 0.0
    seed: int = 1

    def draw(self, number: int, times: int) -> float:
        """Seconds of the answer to the ``times``-th request for this prompt; the same formula as in ``server.c``."""
        if not self.sigma:
            return self.median / 1000
        key = _mix((_mix(self.seed * 1_000_003 + number % 65_536) + times) & _MASK)
        first = ((key >> 11) + 1) / 9007199254740993.0
        second = (_mix(key) >> 11) / 9007199254740992.0
        drawn = self.median * math.exp(self.sigma * math.sqrt(-2 * math.log(first)) * math.cos(2 * math.pi * second))
        return min(drawn, self.cap or math.inf) / 1000


_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@attrs.define
class FakeServer:
    """A running fake server. Calls are synchronous: they are made before and after what is measured, or by it rarely."""

    port: int
    process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        """The URL that it listens on."""
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str) -> Any:
        """Make one control call."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, path)
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def configure(self, latency: Latency | None = None, **settings: float) -> None:
        """Forget all counts and set this; what is not named gets its default. See ``server.c`` for the names."""
        values = {**attrs.asdict(latency or Latency()), **settings}
        self.ask("POST", "/configure?" + "&".join(f"{name}={value}" for name, value in values.items()))

    def mark(self, target: int = 0) -> None:
        """Begin a window; ``target``: note when so many requests run."""
        self.ask("POST", f"/mark?target={target}")

    def stats(self) -> dict[str, float]:
        """Counts since ``configure``, and figures of the window since ``mark``. Times of day are ``time.monotonic()``'s."""
        found: dict[str, float] = self.ask("GET", "/stats")
        return found

    def kill(self) -> None:
        """Kill -9."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            if self.process.stdout is not None:
                self.process.stdout.close()
            self.process = None

    def start(self) -> None:
        """Start it, on the port it had before if it had one."""
        program, bodies = build_server(), BUILD / "bodies"
        write_bodies(bodies)
        self.process = subprocess.Popen([str(program), str(bodies), str(self.port)], stdout=subprocess.PIPE, text=True)
        self.port = int(_first_line(self.process.stdout))


def _first_line(stream: TextIO | None) -> str:
    line = stream.readline() if stream is not None else ""
    if not line:
        raise SystemExit("the fake server did not start")
    return line


@contextmanager
def fake_server() -> Generator[FakeServer]:
    """A fake server for as long as the block lasts."""
    server = FakeServer(port=0)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def bottleneck(stats: dict[str, float]) -> str | None:
    """The reason to distrust a client's figures, because the server was the bottleneck in this window; None without one."""
    if stats["wall"] > 0 and stats["cpu"] / stats["wall"] > BUSY_SHARE:
        return f"the server was busy {stats['cpu'] / stats['wall']:.0%} of the time"
    if stats["late_p50_ms"] > LATE_MS:
        return f"half of the server's answers were more than {stats['late_p50_ms']:.0f} ms late"
    return None


__all__ = ["LENGTHS", "FakeServer", "Latency", "bottleneck", "fake_server"]
