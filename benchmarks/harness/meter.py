"""A client process's measurements of itself: CPU seconds, answers, excess latency, memory."""

import resource
import time
from collections.abc import Sequence
from pathlib import Path

import attrs

from .fake import FakeServer
from .spec import Spec

_LEAST = 50
_LONGEST_S = 20.0


def cpu_seconds() -> float:
    """User and system time of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share lies; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


@attrs.define
class Meter:
    """A window over a job that is in its stride: it begins after some answers and lasts some seconds."""

    spec: Spec
    answers: int = 0
    over: bool = False
    result: dict[str, float] = attrs.field(factory=dict)
    _excess: list[float] = attrs.field(factory=list)
    _first: float | None = None
    _begun: float | None = None
    _cpu: float = 0.0
    _before: int = 0
    _empty: int = attrs.field(factory=resident_bytes)

    @property
    def _server(self) -> FakeServer:
        return FakeServer(self.spec.port)

    def answered(self, sent_at: float, took_there: float | None) -> None:
        """An answer has come: when its call began, and how long the server says that it took."""
        now = time.monotonic()
        self.answers += 1
        if self._first is None:
            self._first = now
        if self._begun is None:
            if self.answers >= self.spec.warm_answers:
                self._begin()
            return
        # Calls that began before the first answer came are the burst of the start: all of them connect at once.
        if took_there is not None and not self.over and sent_at > self._first:
            self._excess.append(now - sent_at - took_there)
        if not self.over and self._is_enough(now - self._begun, self.answers - self._before):
            self._end(now)

    def _is_enough(self, seconds: float, count: int) -> bool:
        """Seconds alone are not: on a busy machine a window may hold a handful of answers, and they of one burst."""
        wanted = self.spec.answers or max(_LEAST, self.spec.slots)
        return seconds >= self.spec.window and (count >= wanted or (seconds >= _LONGEST_S and count >= _LEAST))

    def _begin(self) -> None:
        self._server.mark()
        self._before = self.answers
        self._cpu = cpu_seconds()
        self._begun = time.monotonic()

    def _end(self, now: float) -> None:
        if self._begun is None:
            raise AssertionError("a window ends after its beginning")
        used, count = cpu_seconds() - self._cpu, self.answers - self._before
        self.over = True
        self.result = {
            "cpu_us": used / count * 1e6,
            "rps": count / (now - self._begun),
            "rollouts": float(count),
            "cpu_share": used / (now - self._begun),
            **self._excess_figures(),
            "mb": resident_bytes() / 1e6,
            "kb_per_rollout": (resident_bytes() - self._empty) / self.spec.slots / 1e3,
            **{f"server_{name}": value for name, value in self._server.stats().items()},
        }

    def _excess_figures(self) -> dict[str, float]:
        if not self._excess:  # the transport alone does not know what the server took
            return {}
        return {f"excess_p{share:.0f}_ms": quantile(self._excess, share / 100) * 1e3 for share in (50, 99)}
