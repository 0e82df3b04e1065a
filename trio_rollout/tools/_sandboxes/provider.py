"""The seam for sandbox providers: machines and services of any kind.

The rules for using a sandbox are in ``sandbox.py``. A provider executes requests, and must be honest about one thing: could a
request that failed have had an effect? ``NeverRan`` says that it could not.
"""

from collections.abc import Callable, Mapping
from typing import Protocol, final, runtime_checkable

import attrs

from ..._core.checks import at_least, names_suggested, seconds, whole
from ...errors import ToolError
from .._commands.capture import Captured
from .._commands.child import Child
from .._commands.command import Argv, Command


class NeverRan(ToolError):
    """The request certainly had no effect: no connection was made, or the request was refused before any work."""


@attrs.frozen(kw_only=True)
class SandboxSpec:
    """A request for a sandbox. ``label`` is the run's; after ``lifetime`` seconds the provider may destroy the sandbox.

    A provider that sees a command's output before its end calls ``on_output`` at each piece.
    """

    name: str
    label: str
    lifetime: float
    env: Mapping[str, str] = attrs.field(factory=dict)
    on_output: Callable[[], None] = attrs.field(default=lambda: None, eq=False, repr=False)


class SandboxBackend(Protocol):
    """One sandbox, as its provider makes it."""

    async def exec(
        self,
        argv: Argv,
        *,
        cwd: str | None,
        env: Mapping[str, str] | None,
        timeout: float | None,  # noqa: ASYNC109  part of the request
    ) -> Captured:
        """Run a command to its end. A command over its limit is killed, which is a result.

        Raises:
          NeverRan: the command certainly has not run.
          Exception: any other failure; the command may have run.
        """
        ...

    async def read_file(self, path: str) -> bytes:
        """Return a file's content. OSError if there is no such file: then the policy is at fault."""
        ...

    async def write_file(self, path: str, content: bytes) -> None:
        """Write a file, with the directories above it, in one step."""
        ...


@runtime_checkable
class SessionBackend(Protocol):
    """A sandbox that can start processes that outlive a call, and so has exec sessions."""

    async def spawn(self, command: Command) -> Child:
        """Start a process. Cancelled, no process is left. Raises SpawnError if the command can't be started."""
        ...

    def command(
        self, argv: Argv, *, cwd: str | None, env: Mapping[str, str] | None, tty: tuple[int, int] | None = None
    ) -> Command:
        """Return the command for ``spawn``."""
        ...


class SandboxProvider(Protocol):
    """Makes sandboxes. All rollouts that use the provider share its ``counts``."""

    @property
    def counts(self) -> "SandboxCounts":
        """The counts of its sandboxes."""
        ...

    async def create(self, spec: SandboxSpec) -> SandboxBackend:
        """Create the sandbox ``spec.name``.

        Raises:
          NeverRan: no sandbox was created.
          Exception: any other failure; the sandbox may exist.
        """
        ...

    async def destroy(self, name: str) -> None:
        """Destroy the sandbox of this name, and return normally if there is none."""
        ...

    async def sweep(self, label: str) -> int:
        """Destroy the sandboxes that dead runs of this label have left; return their number."""
        ...


@final
@attrs.define
class SandboxCounts:
    """Sandboxes of one provider. ``leaked``: sandboxes whose destruction was not confirmed."""

    created: int = 0
    destroyed: int = 0
    leaked: int = 0


@names_suggested
@attrs.frozen(kw_only=True)
class SandboxSettings:
    """Limits of sandboxes, in seconds. ``attempts`` counts tries of a request that certainly had no effect."""

    create: float = attrs.field(default=120.0, validator=seconds)
    destroy: float = attrs.field(default=10.0, validator=seconds)
    longest_life: float = attrs.field(default=3600.0, validator=seconds)
    attempts: int = attrs.field(default=3, validator=whole(1))
    backoff: float = attrs.field(default=0.2, validator=at_least(0.0))
