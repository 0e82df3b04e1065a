"""What the tools raise beside ``ToolError``. ToolErrors are infrastructure: the engine requeues the group for them.

What the policy itself caused is an observation, a value; it is an exception only for callers who ask (``check=True``).
"""

import errno
from typing import TYPE_CHECKING

from ..errors import RolloutError, ToolError

if TYPE_CHECKING:
    from ._commands.captured import Captured

# What a wrong argv or cwd produces, or a broken program. Everything else (EAGAIN, EMFILE, ENOMEM, …) is the host's trouble,
# and so is what went wrong before: a SpawnError about that has no errno.
_CALLERS_FAULT = frozenset({
    errno.ENOENT,
    errno.EACCES,
    errno.ENOEXEC,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.E2BIG,
    errno.EPERM,
    errno.ETXTBSY,
    errno.EINVAL,
    errno.ELIBBAD,
})


class SpawnError(ToolError):
    """A command could not be started: no such program, no such directory, or the host is out of something."""

    def __init__(self, message: str, *, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), self.args, {"errno": self.errno})

    @property
    def command_is_wrong(self) -> bool:
        """Whether argv or cwd is at fault: then whoever chose the command, often the policy, should be told."""
        return self.errno in _CALLERS_FAULT


class SupervisorLost(ToolError):
    """The process that contains a rollout's commands died, or did not answer."""


class CommandTimeout(RolloutError):
    """With ``check=True``: the command ran into its own time limit; ``result`` has its output."""

    def __init__(self, message: str, *, result: "Captured | None" = None) -> None:
        super().__init__(message)
        self.result = result


class CommandSignalled(RolloutError):
    """With ``check=True``: the command was killed by a signal; ``result`` has its output."""

    def __init__(self, message: str, *, result: "Captured | None" = None) -> None:
        super().__init__(message)
        self.result = result
