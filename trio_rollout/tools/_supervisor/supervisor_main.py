"""The processes that contain a rollout's commands. Run as a script, standard library only; no part of it runs in the host.

::

    host ──▶ supervisor, one a rollout ──fork──▶ keeper, one a command ──fork──▶ the command, in a session of its own

Supervisor and keeper are child subreapers: whoever loses its parent below them becomes their child, also after ``setsid``.
So "no child is left" means that nothing is left, and killing children until then ends every tree. A keeper ends its tree
when the host says so or closes its control socket, by dying if need be; if a keeper is killed, its orphans go to the
supervisor, which kills them. A command may also stop its keeper, whose parent lets it go on then. The leader of a command
stays a zombie until it is released: its id is never reused before.

It starts with the first command of every rollout, so it imports little: typing and json would be a fifth of its start.
"""

import ctypes
import gc
import os
import select
import signal
import socket
import sys
from contextlib import suppress

TYPE_CHECKING = False  # as typing has it, without its import
if TYPE_CHECKING or __name__ != "__main__":
    from .supervisor_command import NOT_DEFAULT_HERE, Spec, start
else:  # the script is isolated: its own directory comes last, so that nothing here can stand for a module of Python
    sys.path.append(os.path.dirname(__file__))
    from supervisor_command import (
        NOT_DEFAULT_HERE,
        Spec,
        start,
    )

PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
LOOK_AGAIN_MS = 50  # only a fallback: each death that matters raises SIGCHLD here
MOST_STOPS = 100  # of one keeper; a command that stops it in a loop gets there at once
LIBC = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Adopt every descendant that loses its parent. Not inherited by forks."""
    if LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def hide() -> None:
    """Keep our memory and descriptors from commands of the same user. Inherited by forks, ended by an exec."""
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # as far as the kernel allows it: root may look anyway


def open_wake_pipe() -> int:
    """A descriptor that becomes readable with each SIGCHLD of this process."""
    wake, write = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return wake


def receive(connection: socket.socket, count: int) -> tuple[bytes, list[int]]:
    """One message with up to ``count`` descriptors; empty at the end. (``socket.recv_fds`` of 3.11 drops its flags.)"""
    message, ancillary, _, _ = connection.recvmsg(64, socket.CMSG_LEN(4 * count), socket.MSG_CMSG_CLOEXEC)
    return message, [descriptor for _, _, data in ancillary for descriptor in memoryview(data).cast("i")]


def drain(descriptor: int) -> bool:
    """Read some of what is there away; False at the end.

    Once, and only after a poll: a pipe's mode may be set back to blocking, and a command may write to it without end.
    """
    try:
        return bool(os.read(descriptor, 65536))
    except OSError as error:
        return isinstance(error, BlockingIOError)


def children() -> list[int]:
    """Our direct children."""
    with open(f"/proc/self/task/{os.getpid()}/children", "rb") as listing:  # text would import a codec in every keeper
        return [int(pid) for pid in listing.read().split()]


def kill_all(pids: list[int] | set[int]) -> None:
    """SIGKILL to each; a process of another user can't be killed by us and is only waited for."""
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def reap_all() -> tuple[dict[int, int], bool]:
    """Reap what is dead: exit codes by id, and whether any child is left."""
    reaped = {}
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            reaped[found[0]] = os.waitstatus_to_exitcode(found[1])
    except ChildProcessError:
        return reaped, False
    return reaped, True


class Keeper:
    """Keeps one command and everything that comes from it, until it is told to end it."""

    def __init__(self, control: socket.socket, wake: int) -> None:
        self.control, self.wake, self.leader = control, wake, 0

    def tell(self, message: bytes) -> None:
        """Say it to the host, if there still is one."""
        with suppress(OSError):
            self.control.send(message)

    def run(self, spec: Spec, stdio: list[int]) -> None:
        """Start the command and keep it."""
        started = start(spec, stdio, self.control)
        for descriptor in stdio:
            os.close(descriptor)
        if isinstance(started, bytes):
            self.tell(started)
            return
        self.leader = started
        self.tell(b"spawned %d %d" % (started, os.getpid()))
        wish, sinks = self.watch()
        if wish == b"keep":
            self.keep(sinks)
        self.end()

    def watch(self) -> tuple[bytes, list[int]]:
        """Report the leader's exit without reaping it; returns what the host wants then (nothing: it is gone)."""
        exited = False
        waiting = select.poll()
        waiting.register(self.control, select.POLLIN)
        waiting.register(self.wake, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in waiting.poll()}
            drain(self.wake)
            exited = exited or self.reap_orphans()
            if self.control.fileno() in ready:
                return receive(self.control, 2)

    def reap_orphans(self) -> bool:
        """Reap the dead, up to the leader; True once that has exited."""
        while (info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if info.si_pid == self.leader:
                self.tell(b"exited %d" % (info.si_status if info.si_code == os.CLD_EXITED else -info.si_status))
                return True
            os.waitpid(info.si_pid, 0)
        return False

    def keep(self, sinks: list[int]) -> None:
        """Keep what the leader left running, with somebody to read its output, until it ends or the host does."""
        self.leader = 0  # it is reaped here: its id may belong to others soon
        waiting = select.poll()
        for descriptor in (self.control.fileno(), self.wake, *sinks):
            waiting.register(descriptor, select.POLLIN)
        while reap_all()[1]:
            for descriptor, _ in waiting.poll():
                if not drain(descriptor):
                    waiting.unregister(descriptor)
                    if descriptor == self.control.fileno():
                        return

    def end(self) -> None:
        """Kill everything below us until nothing is left, and say so."""
        waiting = select.poll()
        waiting.register(self.wake, select.POLLIN)
        if self.leader:
            with suppress(OSError):
                os.killpg(self.leader, signal.SIGKILL)  # one stroke for those who stayed in the group
        kill_all(children())
        some_left = True
        while some_left:
            reaped, some_left = reap_all()
            if self.leader in reaped:
                self.tell(b"exited %d" % reaped[self.leader])
            kill_all(children())
            if some_left:
                waiting.poll(LOOK_AGAIN_MS)
            drain(self.wake)
        self.tell(b"released")


def fork_keeper(requests: socket.socket, descriptors: list[int]) -> int:
    """Start the keeper of one command: its id, 0 if there is none.

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
        keeper.tell(f"failed 0 {error!r}".encode())
        os._exit(1)
    os._exit(0)


def let_go_on(keepers: dict[int, int]) -> None:
    """Continue keepers that were stopped, as only commands do it; kill one that is stopped again and again."""
    for keeper, stops in keepers.items():
        with suppress(ChildProcessError):  # it is dead, and not reaped yet
            if os.waitid(os.P_PID, keeper, os.WSTOPPED | os.WNOHANG) is not None:
                keepers[keeper] = stops + 1
                os.kill(keeper, signal.SIGCONT if stops < MOST_STOPS else signal.SIGKILL)


def supervise(requests: socket.socket) -> None:
    """Serve the host until it closes; then wait until every keeper has ended its tree."""
    wake = open_wake_pipe()
    keepers: dict[int, int] = {}  # and how often each was stopped
    waiting = select.poll()
    waiting.register(requests, select.POLLIN)
    waiting.register(wake, select.POLLIN)
    while True:
        reaped, some_left = reap_all()
        if not some_left and requests.fileno() < 0:
            return
        for pid in keepers.keys() & reaped.keys():
            del keepers[pid]
        let_go_on(keepers)
        kill_all(set(children()) - keepers.keys())  # of a keeper that was killed
        ready = {descriptor for descriptor, _ in waiting.poll()}
        drain(wake)
        if requests.fileno() in ready:
            message, descriptors = receive(requests, 5)
            if message:
                keepers[fork_keeper(requests, descriptors)] = 0
                keepers.pop(0, None)
            else:
                waiting.unregister(requests)
                requests.close()


if __name__ == "__main__":
    gc.disable()  # what is forked should stay shared, not be written to by a collection
    gc.freeze()
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, *NOT_DEFAULT_HERE}:
        signal.signal(number, signal.SIG_DFL)  # what the host ignores must not be ignored by its commands
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # only the host's end ends this process
    hide()
    become_subreaper()
    supervise(socket.socket(fileno=int(sys.argv[1])))
