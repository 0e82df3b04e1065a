"""The sweep's seeds in parts, so that several processes share them; what they saw, counted together and printed."""

import logging
import os
from collections import Counter

import pytest

from .coverage import POINTS, REQUIRED, SEEN

PARTS = 20


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each part of the seeds."""
    if "seeds" in metafunc.fixturenames:
        count = int(os.environ.get("SEEDS", "300"))
        parts = [range(start, count, PARTS) for start in range(min(PARTS, count))]
        metafunc.parametrize("seeds", parts, ids=[f"{len(part)} seeds from {part.start}" for part in parts])


@pytest.fixture
def quiet():
    """Silence the engine, whose words about drawn troubles fill gigabytes."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Together:
    """Adds up what the parts saw, in whichever process they ran."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.points: Counter[str] = Counter()
        self.parts = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A part has ended."""
        for name, value in report.user_properties:
            if report.when == "call" and name in {SEEN, POINTS}:
                self.parts += name == SEEN
                (self.seen if name == SEEN else self.points).update(value)

    @property
    def unseen(self) -> list[str]:
        """Return the required states that no run met; empty unless the sweep was whole."""
        return [name for name in REQUIRED if not self.seen[name]] if self.parts == PARTS else []

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A sweep that missed something has failed."""
        if self.unseen and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the counts."""
        if self.parts:
            terminalreporter.section("what the sweep of seeds saw")
            for name, count in sorted(self.seen.items()):
                terminalreporter.write_line(f"{count:8} {name}")
        if self.points:
            terminalreporter.section(f"{self.points.total()} cancel points")
            for name, count in sorted(self.points.items()):
                terminalreporter.write_line(f"{count:8} {name}")
        for name in self.unseen:
            terminalreporter.write_line(f"NEVER SEEN: {name}", red=True)


def pytest_configure(config: pytest.Config) -> None:
    """Add up in the process that the user sees only."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Together(), "seeds-together")
