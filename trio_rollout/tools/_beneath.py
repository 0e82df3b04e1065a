"""Files below a directory that somebody else writes in: no link and no ``..`` leads out of it. Blocking; run in a thread."""

import errno
import os
import secrets
import stat
from contextlib import ExitStack, suppress
from pathlib import PurePosixPath

_LONGEST_PATH = 4096  # as Linux has it: each name costs a system call or two
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def _parts(path: str) -> tuple[str, ...]:
    """The path's names; an absolute one counts from the directory.

    Raises:
      PermissionError: it leads out of it, or names nothing.
      OSError: it is too long.

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


def read_beneath(root: str, path: str, most: int) -> bytes:
    """The content of a regular file.

    Raises:
      OSError: it is missing, no regular file, outside, or longer than ``most``.

    """
    *above, name = _parts(path)
    with ExitStack() as stack:
        directory = _descend(stack, root, tuple(above), create=False)
        # Not blocking: opening a pipe that somebody put there would wait for a writer.
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
        stack.callback(os.close, descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise PermissionError(f"{path!r} is not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(most + 1)
    if len(content) > most:
        raise OSError(f"{path!r} is longer than the {most} bytes that may be read")
    return content


def write_beneath(root: str, path: str, content: bytes) -> None:
    """Write a file at once: whoever reads it meanwhile sees the old one or the new one, never a half.

    Raises:
      OSError: it can't be written, or lies outside.

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
