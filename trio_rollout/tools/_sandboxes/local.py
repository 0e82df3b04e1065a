"""Sandboxes on this machine: each has a directory, a minimal environment, resource limits and a supervisor.

A local sandbox keeps honest programs apart and ends everything they start. It is **no security boundary**: commands run as the
engine's user and can read every file that this user can. Use a provider with containers for a policy that may be hostile.

A directory belongs to the process that holds the lock on its owner file, so a sweep removes exactly the directories of dead hosts.
"""

import fcntl
import logging
import os
import resource
import stat
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import final

import attrs
import trio

from ...errors import ToolError
from .._commands.capture import Captured, CapturePlan, Expiration, capture
from .._commands.command import Argv, Command, minimal_environment
from .._limits import ExecLimits
from .._supervisor.child import SupervisedChild
from .._supervisor.supervisor import Supervisor
from .provider import SandboxBackend, SandboxCounts, SandboxSpec
from .safe_files import read_inside, remove_tree, write_inside

_log = logging.getLogger("trio_rollout.tools")

_OWNER = "owner.lock"
_FILES = "files"

# A runaway program fails instead of filling the disk or the descriptor table. Memory and processes are left alone:
# the address space says little about memory, and RLIMIT_NPROC counts everything that the user runs.
DEFAULT_RLIMITS: Mapping[int, int] = {
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_FSIZE: 1 << 30,
    resource.RLIMIT_NOFILE: 1024,
}


def _private_directory(path: Path) -> Path:
    """Make the directory, or raise ToolError if it is not private: in a shared place another user could have made it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ToolError(
            f"{path} must be a directory of this user with mode 700, which no other user can enter; it is not"
        )
    return path


def default_root() -> Path:
    """Return the default directory of local sandboxes."""
    return Path(tempfile.gettempdir()) / f"trio-rollout-{os.getuid()}"


def _make(root: Path, name: str) -> int:
    """Make the sandbox's directories and take its lock; return the descriptor that holds the lock."""
    _private_directory(root)
    home = root / name
    home.mkdir(mode=0o700)
    owner = os.open(home / _OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX)
        for directory in (_FILES, "tmp"):
            (home / directory).mkdir(mode=0o700)
    except OSError:
        os.close(owner)
        raise
    return owner


def _remove(home: Path) -> None:
    """Remove a sandbox's directory, until the call is cancelled; the owner file goes last."""
    remove_tree(str(home), last=_OWNER, check=trio.from_thread.check_cancelled)


def _remove_abandoned(home: Path) -> bool:
    """Remove a sandbox under its lock, if no process holds that; return True if the sandbox was removed.

    A sandbox without an owner file is being made, or its host died while making it.
    """
    try:
        owner = os.open(home / _OWNER, os.O_RDWR | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(home)
    except BlockingIOError:
        return False
    except OSError as error:
        _log.warning("sandbox %s can't be swept: %s", home.name, error)
        return False
    else:
        return True
    finally:
        os.close(owner)


def _sweep(root: Path, label: str) -> int:
    if not root.is_dir():
        return 0
    homes = [home for home in root.iterdir() if home.name.startswith(f"{label}-")]
    return sum(_remove_abandoned(home) for home in homes)


@final
@attrs.define(eq=False, repr=False)
class LocalSandbox:
    """One directory with its own supervisor: a ``SandboxBackend`` and, with exec sessions, a ``SessionBackend``."""

    home: Path
    _provider: "LocalSandboxes"
    _supervisor: Supervisor
    _owner: int
    _env: Mapping[str, str]
    _on_output: Callable[[], None]

    @property
    def files(self) -> Path:
        """The directory of its files, in which its commands start."""
        return self.home / _FILES

    async def spawn(self, command: Command) -> SupervisedChild:
        return await self._supervisor.spawn(command)

    def command(
        self, argv: Argv, *, cwd: str | None, env: Mapping[str, str] | None, tty: tuple[int, int] | None = None
    ) -> Command:
        """Return the command as it runs here: ``cwd`` counts from the sandbox's directory, ``env`` is added to the sandbox's.

        Raises:
          ValueError: ``cwd`` leads out of the sandbox. (The command itself can change to any directory of this user.)
        """
        if ".." in Path(cwd or "").parts:
            raise ValueError(f"cwd: {cwd!r} leads out of the sandbox")
        directory = self.files / (cwd or "").lstrip("/")
        limits = tuple((number, most, most) for number, most in self._provider.rlimits.items())
        return Command(argv=argv, cwd=directory, env={**self._env, **(env or {})}, tty=tty, rlimits=limits)

    async def exec(
        self,
        argv: Argv,
        *,
        cwd: str | None,
        env: Mapping[str, str] | None,
        timeout: float | None,  # noqa: ASYNC109  expiry is a result here, unlike a cancelled scope
    ) -> Captured:
        plan = CapturePlan(
            expiration=Expiration(timeout=timeout),
            limits=self._provider.limits,
            on_output=self._on_output,
        )
        return await capture(self.spawn, self.command(argv, cwd=cwd, env=env), plan)

    async def read_file(self, path: str) -> bytes:
        return await trio.to_thread.run_sync(read_inside, str(self.files), path, self._provider.limits.capture_bytes)

    async def write_file(self, path: str, content: bytes) -> None:
        await trio.to_thread.run_sync(write_inside, str(self.files), path, content)

    async def close(self) -> None:
        """End the running processes, remove the directory, release the lock: each step, also after a failure of the one before.

        Cancelled, the rest of the directory has no owner, and the next sweep removes it.
        """
        try:
            await self._supervisor.close()
        finally:
            try:
                await trio.to_thread.run_sync(_remove, self.home)  # noqa: ASYNC102  ends where it is cancelled
            finally:
                if self._owner >= 0:
                    os.close(self._owner)
                    self._owner = -1


@final
@attrs.define(eq=False, repr=False)
class LocalSandboxes:
    """The provider of sandboxes on this machine. ``root`` must be private; ``env`` is added to the minimal environment."""

    root: Path = attrs.field(factory=default_root, converter=Path)
    rlimits: Mapping[int, int] = attrs.field(factory=lambda: dict(DEFAULT_RLIMITS), kw_only=True)
    env: Mapping[str, str] = attrs.field(factory=dict, kw_only=True)
    limits: ExecLimits = attrs.field(factory=ExecLimits, kw_only=True)
    counts: SandboxCounts = attrs.field(factory=SandboxCounts, init=False)
    _open: dict[str, LocalSandbox] = attrs.field(factory=dict, init=False)

    async def create(self, spec: SandboxSpec) -> SandboxBackend:
        """Make the sandbox's directory. The supervisor starts with the first command."""
        owner = await trio.to_thread.run_sync(_make, self.root, spec.name)
        home = self.root / spec.name
        env = {**minimal_environment(), "HOME": str(home / _FILES), "TMPDIR": str(home / "tmp"), **self.env, **spec.env}
        supervisor = Supervisor(self.limits, self.limits.teardown)
        self._open[spec.name] = LocalSandbox(home, self, supervisor, owner, env, spec.on_output)
        return self._open[spec.name]

    async def destroy(self, name: str) -> None:
        """End the sandbox's processes and remove its directory."""
        sandbox = self._open.pop(name, None)
        if sandbox is not None:
            await sandbox.close()
        else:  # only partly made, or partly destroyed
            await trio.to_thread.run_sync(_remove, self.root / name)

    async def sweep(self, label: str) -> int:
        """Remove the directories of this label whose hosts have died. The processes died with their hosts."""
        return await trio.to_thread.run_sync(partial(_sweep, self.root, label))
