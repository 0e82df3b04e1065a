"""Errors about starting and containing commands. Both are infrastructure failures: the engine runs the sample again.

A failure that the policy caused is an observation, and so a value. For exec sessions see ``ExecError``.
"""

import errno

from ..errors import ToolError

# Errors of a wrong argv or cwd, or of a broken program. Every other errno (EAGAIN, EMFILE, ENOMEM, …) is the host's failure,
# and so is a failure before the exec: a SpawnError about that has no errno.
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
    """A command could not be started: no such program, no such directory, or the host lacks a resource."""

    def __init__(self, message: str, *, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), self.args, {"errno": self.errno})

    @property
    def command_is_wrong(self) -> bool:
        """True if argv or cwd is at fault: then the author of the command, often the policy, should be told."""
        return self.errno in _CALLERS_FAULT


class SupervisorLost(ToolError):
    """The process that contains a rollout's commands died, or did not answer."""
