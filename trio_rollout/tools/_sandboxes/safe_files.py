"""Safe file access below a directory that hostile commands write in: read a file, write a file, remove the directory.

No link and no ``..`` leads out of the directory, at any time: each name is opened below an open descriptor and never through a
link, so that a directory that is swapped for a link in the middle is an error. A removal takes directories of any depth and
size. All functions block; run them in a thread.
"""

import errno
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path, PurePosixPath

import attrs

_LONGEST_PATH = 4096  # Linux's limit: each name costs a system call or two
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def _parts(path: str) -> tuple[str, ...]:
    """Return the path's names; an absolute path counts from the directory.

    Raises:
      PermissionError: the path leads out of the directory, or names nothing.
      OSError: the path is too long.
    """
    if len(path) > _LONGEST_PATH:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), f"{path[:40]}…")
    parts = tuple(part for part in PurePosixPath("/", path).parts if part != "/")
    if not parts or ".." in parts or "\0" in path:
        raise PermissionError(f"{path!r} is not a file inside the sandbox")
    return parts


def _descend(stack: ExitStack, root: str, names: tuple[str, ...], *, create: bool) -> int:
    """Open the directory ``names`` below ``root``, name by name, so that none of them can be a link."""
    current = os.open(root, _DIRECTORY)
    try:
        for name in names:
            if create:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=current)
            above, current = current, os.open(name, _DIRECTORY, dir_fd=current)
            os.close(above)
    finally:
        stack.callback(os.close, current)
    return current


def read_inside(root: str, path: str, most: int) -> bytes:
    """Return the content of a regular file.

    Raises:
      OSError: the file is missing, not regular, outside the directory, or longer than ``most`` bytes.
    """
    *above, name = _parts(path)
    with ExitStack() as stack:
        directory = _descend(stack, root, tuple(above), create=False)
        # Not blocking: a pipe under this name would wait for a writer.
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
        stack.callback(os.close, descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise PermissionError(f"{path!r} is not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(most + 1)
    if len(content) > most:
        raise OSError(f"{path!r} is longer than the {most} bytes that may be read")
    return content


def write_inside(root: str, path: str, content: bytes) -> None:
    """Write a file in one step: a reader sees the old file or the new one, never a part.

    Raises:
      OSError: the file can't be written, or lies outside the directory.
    """
    *above, name = _parts(path)
    fresh = f".{secrets.token_hex(8)}"
    with ExitStack() as stack:
        directory = _descend(stack, root, tuple(above), create=True)
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=directory)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            os.rename(fresh, name, src_dir_fd=directory, dst_dir_fd=directory)
        except OSError:
            os.unlink(fresh, dir_fd=directory)
            raise


def remove_tree(root: str, *, last: str = "", check: Callable[[], object] = lambda: None) -> None:
    """Remove a directory, if it exists, with everything in it, also where permissions were removed.

    No path, stack or number of descriptors grows with the depth: before a directory is removed, its subdirectories move up to
    ``root``. The file ``last`` is removed after everything else. ``check`` is called for each file; an exception that it raises
    ends the removal, and a later removal can go on.

    Raises:
      OSError: a file can't be removed; the others are removed. Or ``root`` is no directory.
    """
    with ExitStack() as stack:
        try:
            top = _opened(root, None)
        except FileNotFoundError:
            return
        stack.callback(os.close, top)
        removal = _Removal(top, last, check)
        while removal.go_through():
            pass
        if removal.error is not None:
            raise removal.error
        if last:
            with suppress(FileNotFoundError):
                os.unlink(last, dir_fd=top)
        with suppress(FileNotFoundError):
            Path(root).rmdir()


def _opened(name: str, directory: int | None) -> int:
    """Open a directory, also one without permissions. Never through a link: a process may still change the tree."""
    with suppress(PermissionError):
        return os.open(name, _DIRECTORY, dir_fd=directory)
    _permit(name, directory)
    return os.open(name, _DIRECTORY, dir_fd=directory)


def _permit(name: str, directory: int | None) -> None:
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
    try:
        Path(f"/proc/self/fd/{handle}").chmod(0o700)  # fchmod takes no O_PATH
    finally:
        os.close(handle)


@attrs.define(eq=False)
class _Removal:
    """One removal in progress."""

    top: int
    last: str
    check: Callable[[], object]
    error: OSError | None = None
    _progress: bool = attrs.field(default=False, init=False)
    _prefix: str = attrs.field(factory=lambda: f".{secrets.token_hex(8)}-", init=False)
    _moved: int = attrs.field(default=0, init=False)

    def go_through(self) -> bool:
        """Remove the entries at the top now; return True if any could be removed."""
        self.error, self._progress = None, False  # forget earlier errors: a process may have changed the tree
        self._for_each_entry(self.top, self._remove)
        return self._progress

    def _for_each_entry(self, directory: int, take: "Callable[[os.DirEntry[str]], object]") -> None:
        with os.scandir(directory) as entries:
            for entry in entries:
                self.check()
                if directory == self.top and entry.name == self.last:
                    continue
                try:
                    take(entry)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    self.error = self.error or error
                else:
                    self._progress = True

    def _remove(self, entry: "os.DirEntry[str]") -> None:
        """Remove an entry at the top: a file, or a directory after its files; its directories move up."""
        if not entry.is_dir(follow_symlinks=False):
            os.unlink(entry.name, dir_fd=self.top)
            return
        inner = _opened(entry.name, self.top)
        try:
            _permit(entry.name, self.top)
            self._for_each_entry(inner, partial(self._take_out, inner))
        finally:
            os.close(inner)
        os.rmdir(entry.name, dir_fd=self.top)

    def _take_out(self, inner: int, entry: "os.DirEntry[str]") -> None:
        if not entry.is_dir(follow_symlinks=False):
            os.unlink(entry.name, dir_fd=inner)
            return
        move = partial(os.rename, entry.name, f"{self._prefix}{self._moved}", src_dir_fd=inner, dst_dir_fd=self.top)
        self._moved += 1
        try:
            move()
        except PermissionError:
            _permit(entry.name, inner)  # moving a directory writes in it: its entry for the parent changes
            move()
