"""What makes sandboxes: the seam for machines and services of any kind.

The rules of using one are in ``_sandbox``. A provider only has to do what it is told and to be honest about one thing:
whether a request that failed can have had an effect (``NeverRan`` says that it can't).
"""

from collections.abc import Callable, Mapping
from typing import Protocol, final

import attrs

from ..._core.checks import at_least, seconds, whole
from ...errors import ToolError
from .._commands.captured import Captured
from .._commands.child import Spawn
from .._commands.command import Argv, Command


class NeverRan(ToolError):
    """The request certainly had no effect: no connection was made, or it was refused before anything was done."""


@attrs.frozen(kw_only=True)
class SandboxSpec:
    """What a provider is asked for. ``label`` is the run's; ``lifetime`` in seconds, after which it may go by itself.

    ``on_output`` is to be called with each piece of a command's output, by providers that see it before the end.
    """

    name: str
    label: str
    lifetime: float
    env: Mapping[str, str] = attrs.field(factory=dict)
    on_output: Callable[[], None] = attrs.field(default=lambda: None, eq=False, repr=False)


class SandboxBackend(Protocol):
    """One sandbox as its provider sees it."""

    @property
    def spawn(self) -> Spawn | None:
        """Starts processes in it that outlive a call; None if it can't."""
        ...

    def command(
        self, argv: Argv, *, cwd: str | None, env: Mapping[str, str] | None, tty: tuple[int, int] | None = None
    ) -> Command:
        """What ``spawn`` needs to start this in the sandbox. Only called where there is a ``spawn``."""
        ...

    async def exec(
        self,
        argv: Argv,
        *,
        cwd: str | None,
        env: Mapping[str, str] | None,
        timeout: float | None,  # noqa: ASYNC109  part of the request
    ) -> Captured:
        """Run a command to its end; over its limit it is killed, which is a result.

        Raises:
          NeverRan: it certainly has not run.
          Exception: anything else went wrong; it may have run.

        """
        ...

    async def read_file(self, path: str) -> bytes:
        """A file's content. OSError if there is no such file: that is the policy's doing."""
        ...

    async def write_file(self, path: str, content: bytes) -> None:
        """Write a file, with the directories above it, at once."""
        ...


class SandboxProvider(Protocol):
    """Makes sandboxes. ``counts`` are shared by all rollouts that use it."""

    @property
    def counts(self) -> "SandboxCounts":
        """What became of its sandboxes."""
        ...

    async def create(self, spec: SandboxSpec) -> SandboxBackend:
        """Make the sandbox ``spec.name``.

        Raises:
          NeverRan: nothing was made.
          Exception: anything else; it may exist.

        """
        ...

    async def destroy(self, name: str) -> None:
        """Destroy the sandbox of this name, and return normally if there is none."""
        ...

    async def sweep(self, label: str) -> int:
        """Destroy what runs of this label that died have left; how many."""
        ...


@final
@attrs.define
class SandboxCounts:
    """Sandboxes of one provider. ``leaked``: those whose destruction was not confirmed."""

    created: int = 0
    destroyed: int = 0
    leaked: int = 0


@attrs.frozen(kw_only=True)
class SandboxSettings:
    """Limits of sandboxes, in seconds. ``attempts`` counts tries of what certainly did not run."""

    create: float = attrs.field(default=120.0, validator=seconds)
    destroy: float = attrs.field(default=10.0, validator=seconds)
    longest_life: float = attrs.field(default=3600.0, validator=seconds)
    attempts: int = attrs.field(default=3, validator=whole(1))
    backoff: float = attrs.field(default=0.2, validator=at_least(0.0))
