"""The processes that contain a rollout's commands: run as a script, standard library only; no part runs in the host.

::

    host ──▶ supervisor, one a rollout ──fork──▶ keeper, one a command ──fork──▶ the command, in a new session

**The problem.** A rollout must end everything that it started. A process group is not enough: a descendant that calls
``setsid`` leaves it. Following parents is not enough either: when a parent dies, its children become children of init, and the
thread that leads back to the command is cut.

**The mechanism.** Linux gives an orphan to the nearest ancestor that called ``prctl(PR_SET_CHILD_SUBREAPER)``. A keeper is
such an ancestor and has one command below it. So every descendant of the command is below the keeper at all times, however
often it forks, exits or calls ``setsid``. Two facts follow. "The keeper has no child left" means that nothing of the command
is left. And to kill all children, reap, and repeat until ``waitpid`` reports no child ends every tree: each kill moves
grandchildren up, and a process that forks while it is killed only makes one more round.

**Who ends what.** A keeper ends its tree when the host orders it, or when the control socket closes: the host's death closes
the socket, so a host that is killed with SIGKILL leaves nothing. If a keeper is killed, its orphans go to the supervisor,
which kills every child that is not a keeper. The leader of a command stays a zombie until the release: its process id, and
so its group id, can't pass to a stranger while the host may still signal it.

**A command may turn on its keeper**, because both run as the same user. A keeper that was stopped is continued by the
supervisor, which sees each stop (``WSTOPPED``); one that is stopped again and again is killed. A supervisor that was stopped is
continued by the host when an answer is late, and at the end the host itself kills what is below (see ``supervisor.py``).

Decided in docs/decisions/0009-each-command-has-a-keeper.md and docs/decisions/0020-a-command-may-turn-on-its-keeper.md,
with the alternatives (cgroups, namespaces, PDEATHSIG, one subreaper a rollout) and the costs.

The script starts with the first command of every rollout, so it imports little: typing and json would take a fifth of its start.
"""

import ctypes
import fcntl
import gc
import os
import resource
import select
import signal
import socket
import sys
import termios
from contextlib import suppress

PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
LOOK_AGAIN_MS = 50  # only a fallback: each death that matters raises SIGCHLD here
MOST_STOPS = 100  # of one keeper; a command that stops its keeper in a loop reaches this at once
LIBC = ctypes.CDLL(None, use_errno=True)
# Python ignores the first two, a supervisor the next three, and it handles the last. All others were reset at its start.
NOT_DEFAULT_HERE = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)


def become_subreaper() -> None:
    """Adopt every descendant that loses its parent. Forks do not inherit this."""
    if LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def hide_memory() -> None:
    """Keep this process's memory and descriptors from commands of the same user. Forks inherit this, an exec ends it."""
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # as far as the kernel allows: root may look anyway


def open_wake_pipe() -> int:
    """Return a descriptor that becomes readable with each SIGCHLD of this process."""
    wake, write = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return wake


def receive(connection: socket.socket, count: int) -> tuple[bytes, list[int]]:
    """Receive one message with up to ``count`` descriptors; empty at the end. (``socket.recv_fds`` of 3.11 drops its flags.)"""
    message, ancillary, _, _ = connection.recvmsg(64, socket.CMSG_LEN(4 * count), socket.MSG_CMSG_CLOEXEC)
    return message, [descriptor for _, _, data in ancillary for descriptor in memoryview(data).cast("i")]


def discard_input(descriptor: int) -> bool:
    """Read and discard some input; return False at the end.

    One read, and only after a poll: a pipe's mode may be set back to blocking, and a command may write without end.
    """
    try:
        return bool(os.read(descriptor, 65536))
    except OSError as error:
        return isinstance(error, BlockingIOError)


def children() -> list[int]:
    """Return the ids of this process's direct children."""
    with open(f"/proc/self/task/{os.getpid()}/children", "rb") as listing:  # text would import a codec in every keeper
        return [int(pid) for pid in listing.read().split()]


def kill_all(pids: list[int] | set[int]) -> None:
    """Send SIGKILL to each process. A process of another user can't be killed here and is only waited for."""
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def reap_all() -> tuple[dict[int, int], bool]:
    """Reap the dead children; return their exit codes by id, and True if any child is left."""
    reaped = {}
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            reaped[found[0]] = os.waitstatus_to_exitcode(found[1])
    except ChildProcessError:
        return reaped, False
    return reaped, True


class Spec:
    """A command as the host wrote it: fields separated by null characters, which no argument can contain."""

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


class Refused(Exception):
    """The system refused the program or its directory: the errno, and the system's message."""


def prepare(spec: Spec, stdio: list[int]) -> None:
    """Make this fork ready for the command: session, terminal, standard streams, signals, limits, umask."""
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


def enter_and_execute(spec: Spec) -> None:
    """Change to the command's directory and execute the program. Only a failure here can be the command's own fault."""
    try:
        os.chdir(spec.cwd)
        execute(spec)
    except OSError as error:
        raise Refused(f"{error.errno or 0} {error.strerror}") from error


def execute(spec: Spec) -> None:
    """Execute the program, searched on the command's own PATH. (``os.execvpe`` imports warnings, in every fork.)"""
    missing = OSError(2, "No such file or directory")
    path = b"" if b"/" in spec.argv[0] else spec.env.get(b"PATH", os.defpath.encode())
    for directory in path.split(b":"):
        try:
            os.execve(directory + b"/" * bool(directory) + spec.argv[0], spec.argv, spec.env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError as error:
            missing = error  # reported only if no other directory has the program, as a shell does
    raise missing


def start(spec: Spec, stdio: list[int], control: socket.socket) -> int | bytes:
    """Fork and execute the command; return its process id, or a message about the failure."""
    report, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            prepare(spec, stdio)
            enter_and_execute(spec)
        except Refused as error:
            os.write(write, str(error).encode())
        except BaseException as error:  # ruff: ignore[blind-except]  # noqa: ASYNC103  no Trio here; a fork must never return
            os.write(write, f"0 {error!r}".encode())
        finally:
            os._exit(127)
    os.close(write)
    waiting = select.poll()
    waiting.register(report, select.POLLIN)
    waiting.register(control, 0)  # hang-up only: the host has gone or cancelled the start, and the file system hangs
    waiting.poll()
    os.set_blocking(report, False)
    try:
        failure = os.read(report, 65536)
    except BlockingIOError:
        failure = b"0 cancelled while it was started"
    os.close(report)
    if not failure:
        return pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return b"failed " + failure


class Keeper:
    """Keeps one command and everything that comes from it, until the host orders the end."""

    def __init__(self, control: socket.socket, wake: int) -> None:
        self.control, self.wake, self.leader = control, wake, 0

    def send(self, message: bytes) -> None:
        """Send a message to the host, if the host still exists."""
        with suppress(OSError):
            self.control.send(message)

    def run(self, spec: Spec, stdio: list[int]) -> None:
        """Start the command and keep it until the end."""
        started = start(spec, stdio, self.control)
        for descriptor in stdio:
            os.close(descriptor)
        if isinstance(started, bytes):
            self.send(started)
            return
        self.leader = started
        self.send(b"spawned %d %d" % (started, os.getpid()))
        order, sinks = self.wait_for_order()
        if order == b"keep":
            self.keep_running(sinks)
        self.end_tree()

    def wait_for_order(self) -> tuple[bytes, list[int]]:
        """Report the leader's exit without reaping it; return the host's order (empty: the host has gone)."""
        exited = False
        waiting = select.poll()
        waiting.register(self.control, select.POLLIN)
        waiting.register(self.wake, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in waiting.poll()}
            discard_input(self.wake)
            exited = exited or self.reap_orphans()
            if self.control.fileno() in ready:
                return receive(self.control, 2)

    def reap_orphans(self) -> bool:
        """Reap the dead, up to the leader; return True once the leader has exited."""
        while (info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if info.si_pid == self.leader:
                self.send(b"exited %d" % (info.si_status if info.si_code == os.CLD_EXITED else -info.si_status))
                return True
            os.waitpid(info.si_pid, 0)
        return False

    def keep_running(self, sinks: list[int]) -> None:
        """Keep the leader's leftovers running and discard their output, until they end or the host ends them."""
        self.leader = 0  # it is reaped here: another process may get its id soon
        waiting = select.poll()
        for descriptor in (self.control.fileno(), self.wake, *sinks):
            waiting.register(descriptor, select.POLLIN)
        while reap_all()[1]:
            for descriptor, _ in waiting.poll():
                if not discard_input(descriptor):
                    waiting.unregister(descriptor)
                    if descriptor == self.control.fileno():
                        return

    def end_tree(self) -> None:
        """Kill everything below this process until nothing is left, and report the release."""
        waiting = select.poll()
        waiting.register(self.wake, select.POLLIN)
        if self.leader:
            with suppress(OSError):
                os.killpg(self.leader, signal.SIGKILL)  # one stroke for those that stayed in the group
        kill_all(children())
        some_left = True
        while some_left:
            reaped, some_left = reap_all()
            if self.leader in reaped:
                self.send(b"exited %d" % reaped[self.leader])
            kill_all(children())
            if some_left:
                waiting.poll(LOOK_AGAIN_MS)
            discard_input(self.wake)
        self.send(b"released")


def fork_keeper(requests: socket.socket, descriptors: list[int]) -> int:
    """Start the keeper of one command; return its id, 0 if the fork failed.

    Descriptors: the command as a file, a control socket, stdin, stdout, stderr.
    """
    try:
        pid = os.fork()
    except OSError as error:
        with socket.socket(fileno=os.dup(descriptors[1])) as control, suppress(OSError):
            control.send(f"failed 0 a keeper could not be forked: {error.strerror}".encode())
        pid = -1
    if pid:
        for descriptor in descriptors:
            os.close(descriptor)
        return max(pid, 0)
    requests.close()
    keeper = Keeper(socket.socket(fileno=descriptors[1]), open_wake_pipe())
    try:
        become_subreaper()
        keeper.run(Spec(descriptors[0]), descriptors[2:])
    except BaseException as error:  # ruff: ignore[blind-except]  # noqa: ASYNC103  no Trio here; a fork must never return
        keeper.send(f"failed 0 {error!r}".encode())
        os._exit(1)
    os._exit(0)


def continue_stopped(keepers: dict[int, int]) -> None:
    """Continue the keepers that were stopped, which only commands do; kill a keeper that is stopped again and again."""
    for keeper, stops in keepers.items():
        with suppress(ChildProcessError):  # the keeper is dead, and not reaped yet
            if os.waitid(os.P_PID, keeper, os.WSTOPPED | os.WNOHANG) is not None:
                keepers[keeper] = stops + 1
                os.kill(keeper, signal.SIGCONT if stops < MOST_STOPS else signal.SIGKILL)


def supervise(requests: socket.socket) -> None:
    """Serve the host until it closes the socket; then wait until every keeper has ended its tree."""
    wake = open_wake_pipe()
    keepers: dict[int, int] = {}  # keeper's id → number of its stops
    waiting = select.poll()
    waiting.register(requests, select.POLLIN)
    waiting.register(wake, select.POLLIN)
    while True:
        reaped, some_left = reap_all()
        if not some_left and requests.fileno() < 0:
            return
        for pid in keepers.keys() & reaped.keys():
            del keepers[pid]
        continue_stopped(keepers)
        kill_all(set(children()) - keepers.keys())  # orphans of a keeper that was killed
        ready = {descriptor for descriptor, _ in waiting.poll()}
        discard_input(wake)
        if requests.fileno() in ready:
            message, descriptors = receive(requests, 5)
            if message:
                keepers[fork_keeper(requests, descriptors)] = 0
                keepers.pop(0, None)
            else:
                waiting.unregister(requests)
                requests.close()


if __name__ == "__main__":
    gc.disable()  # forks share memory with this process until a collection would write to it
    gc.freeze()
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, *NOT_DEFAULT_HERE}:
        signal.signal(number, signal.SIG_DFL)  # a signal that the host ignores must not be ignored by its commands
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # only the host's end ends this process
    hide_memory()
    become_subreaper()
    supervise(socket.socket(fileno=int(sys.argv[1])))
