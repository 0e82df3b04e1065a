"""Becoming a command: what a keeper does between a fork and an exec. Standard library only; no part of it runs in the host."""

import fcntl
import os
import resource
import select
import signal
import socket
import termios

# Python ignores the first two, a supervisor the next three, and it handles the last. All others were reset at its start.
NOT_DEFAULT_HERE = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)


class Spec:
    """A command as the host wrote it: fields between null characters, which no argument can hold."""

    def __init__(self, descriptor: int) -> None:
        with open(descriptor, "rb") as file:
            file.seek(0)
            fields = iter(file.read().split(b"\0"))
        self.umask = int(next(fields))
        self.tty = next(fields) == b"tty"
        self.cwd = next(fields)
        self.rlimits = [(int(next(fields)), int(next(fields)), int(next(fields))) for _ in range(int(next(fields)))]
        self.argv = [next(fields) for _ in range(int(next(fields)))]
        self.env = dict(variable.split(b"=", 1) for variable in fields)


def become(spec: Spec, stdio: list[int]) -> None:
    """Turn this fork into the command."""
    os.setsid()
    if spec.tty:
        fcntl.ioctl(stdio[0], termios.TIOCSCTTY, 0)
    for target, source in enumerate(stdio):
        os.dup2(source, target)
    signal.set_wakeup_fd(-1)
    for number in NOT_DEFAULT_HERE:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for limit, soft, hard in spec.rlimits:
        resource.setrlimit(limit, (soft, hard))
    os.umask(spec.umask)


def run(spec: Spec) -> None:
    """Go where it is to run, and execute it. Only what fails here can be the command's own fault."""
    try:
        os.chdir(spec.cwd)
        execute(spec)
    except OSError as error:
        raise Refused(f"{error.errno or 0} {error.strerror}") from error


def execute(spec: Spec) -> None:
    """Execute the program, looked for on the command's own PATH. (``os.execvpe`` imports warnings, in every fork.)"""
    missing = OSError(2, "No such file or directory")
    path = b"" if b"/" in spec.argv[0] else spec.env.get(b"PATH", os.defpath.encode())
    for directory in path.split(b":"):
        try:
            os.execve(directory + b"/" * bool(directory) + spec.argv[0], spec.argv, spec.env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError as error:
            missing = error  # said only where nothing else is found, as a shell does
    raise missing


class Refused(Exception):
    """The program or its directory was refused by the system: the errno, and its words."""


def start(spec: Spec, stdio: list[int], control: socket.socket) -> int | bytes:
    """Fork and execute the command: its process id, or what went wrong."""
    report, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            become(spec, stdio)
            run(spec)
        except Refused as error:
            os.write(write, str(error).encode())
        except BaseException as error:  # ruff: ignore[blind-except]  # noqa: ASYNC103  no Trio here; a fork must never return
            os.write(write, f"0 {error!r}".encode())
        finally:
            os._exit(127)
    os.close(write)
    waiting = select.poll()
    waiting.register(report, select.POLLIN)
    waiting.register(control, 0)  # hang-up only: the host is gone or has changed its mind, and the file system hangs
    waiting.poll()
    os.set_blocking(report, False)
    try:
        said = os.read(report, 65536)
    except BlockingIOError:
        said = b"0 given up while it was started"
    os.close(report)
    if not said:
        return pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return b"failed " + said
