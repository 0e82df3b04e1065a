"""The real disk, which the simulated one stands for."""

import random
from pathlib import Path

import pytest

from trio_rollout.errors import LedgerError
from trio_rollout.ledger._disk import RealDisk


@pytest.fixture
def disk(tmp_path: Path):
    disk = RealDisk(tmp_path / "new" / "ledger")
    disk.lock()
    yield disk
    disk.unlock()


def test_parts_are_written_one_after_the_other(disk):
    """There are more parts than the system takes in one call, and one so large that it may be taken in pieces."""
    rng = random.Random(0)
    parts = [rng.randbytes(rng.randrange(9)) for _ in range(3000)] + [bytes(5_000_000), b"end"]
    disk.write("a", 0, [b"head"])
    disk.write("a", 4, parts)
    disk.sync("a")
    whole = b"head" + b"".join(parts)
    assert disk.size("a") == len(whole)
    assert disk.read("a", 0, len(whole) + 10) == whole
    assert disk.read("a", len(whole) - 3, 3) == b"end"


def test_files_come_and_go_by_name(disk):
    disk.write("a", 0, [b"1"])
    disk.write("b", 0, [b"22"])
    disk.sync_names()
    disk.rename("a", "c")
    disk.write("a", 0, [b"333"])  # a new file: the old one's descriptor is not taken for it
    disk.truncate("b", 1)
    disk.delete("c")
    assert disk.names() == ["a", "b", "lock"]
    assert (disk.read("a", 0, 9), disk.read("b", 0, 9)) == (b"333", b"2")
    with pytest.raises(FileNotFoundError):
        disk.read("c", 0, 1)


def test_a_directory_is_locked_once(disk):
    second = RealDisk(disk.path)
    with pytest.raises(LedgerError, match="is in use by process"):
        second.lock()
    disk.unlock()
    second.lock()
    second.unlock()
