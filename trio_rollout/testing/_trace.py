"""The digest of a run: a hash over which task was stepped when, in order."""

import hashlib
import struct
from typing import final

import trio

from ._scheduler import age

_RECORD = struct.Struct("<qd")


@final
class StepTrace(trio.abc.Instrument):
    """Counts and hashes every task step; equal digests mean the same interleaving at the same times."""

    def __init__(self) -> None:
        self.steps = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._oldest: int | None = None
        self._named: set[int] = set()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Take the step into the digest: the task's number within the run, its function at first sight, the time."""
        if self._oldest is None:
            self._oldest = age(task)
        number = age(task) - self._oldest
        self.steps += 1
        self._hash.update(_RECORD.pack(number, trio.current_time()))
        if number not in self._named:  # its name is left out: repr()s in it may hold addresses
            self._named.add(number)
            self._hash.update(getattr(task.coro, "__qualname__", "").encode())

    @property
    def digest(self) -> str:
        """The digest so far, as hex digits."""
        return self._hash.hexdigest()
