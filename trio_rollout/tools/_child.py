"""A started process as the rest of the room sees it: one port with three backends.

``_direct`` starts it as a child of this process, ``_supervisor`` inside a process of its own that contains everything
below it, and tests have one that runs by script. The rules that all of them keep:

1. ``pid`` is the id of a process group and of a session, and stays so until ``release``: the exit of the leader is
   observed without reaping it. So ``signal_group`` can never hit a stranger.
2. After ``release`` nothing is signalled any more.
"""

import os
import signal
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias

import attrs
import trio

from ._command import Command


@attrs.frozen
class ExitStatus:
    """How a process ended: its code, or the signal that killed it."""

    code: int | None
    signal: int | None = None

    @classmethod
    def of(cls, info: os.waitid_result) -> "ExitStatus":
        """From what ``waitid`` says."""
        return cls(info.si_status) if info.si_code == os.CLD_EXITED else cls(None, info.si_status)

    @property
    def exit_code(self) -> int:
        """As a shell says it: 128 + N after death by signal N."""
        if self.signal is not None:
            return 128 + self.signal
        return -1 if self.code is None else self.code


class Child(Protocol):
    """One started process and what runs in its group."""

    @property
    def pid(self) -> int:
        """Id of the leader, of its process group and of its session."""
        ...

    @property
    def stdout(self) -> trio.abc.ReceiveStream:
        """What it writes; with a terminal or a merged stderr, both streams in order."""
        ...

    @property
    def stderr(self) -> trio.abc.ReceiveStream | None:
        """What it complains; None where stdout has both."""
        ...

    @property
    def stdin(self) -> trio.abc.SendStream | None:
        """Its terminal; None where its stdin is the null device."""
        ...

    def exited(self) -> ExitStatus | None:
        """How the leader ended; None while it runs. Does not reap it.

        Raises:
          ToolError: whoever could tell is gone.

        """
        ...

    async def wait_exited(self) -> ExitStatus:
        """Wait for the leader's exit, without reaping it. One task at a time.

        Raises:
          ToolError: whoever could tell is gone.

        """
        ...

    def signal_group(self, number: signal.Signals) -> bool:
        """Signal the leader's group; False if there is nothing left to signal."""
        ...

    async def release(self, *, spare: bool = False) -> bool:
        """Kill what is left and reap it; True when nothing is known to be left. What was written can still be read.

        ``spare`` leaves what still runs to the scope around, with its output read and thrown away. Idempotent. The
        caller shields and bounds it; cancelled, the kill has been sent and only the proof is missing.
        """
        ...

    def close(self) -> None:
        """Close the streams. Idempotent; comes last."""
        ...


Spawn: TypeAlias = Callable[[Command], Awaitable[Child]]
"""Starts a command. Cancelled, nothing is left running.

Raises SpawnError if it can't be started."""
