"""A scripted process for tests in virtual time: a real process does not fit a clock that jumps."""

import collections
import signal

import trio

from trio_rollout.tools._commands.child import ExitStatus


class FakeOutput(trio.abc.ReceiveStream):
    """Output that a test writes."""

    def __init__(self):
        self.chunks = collections.deque()
        self.closed = False
        self._news = trio.Event()

    def put(self, chunk):
        """Write a chunk; ``b""`` is the end."""
        self.chunks.append(chunk)
        self._news.set()

    async def receive_some(self, max_bytes=None):
        await trio.lowlevel.checkpoint()
        while not self.chunks:
            self._news = trio.Event()
            await self._news.wait()
        chunk = self.chunks.popleft()
        if not chunk:
            self.chunks.append(b"")
        return chunk

    async def aclose(self):
        self.closed = True


class FakeTerminal(trio.abc.SendStream):
    """A terminal that takes input, unless it is ``full`` or ``broken``."""

    def __init__(self):
        self.written = b""
        self.broken = False
        self.full = False

    async def send_all(self, data):
        await trio.lowlevel.checkpoint()
        if self.full:
            await trio.sleep_forever()
        if self.broken:
            raise trio.BrokenResourceError
        self.written += data

    async def wait_send_all_might_not_block(self):
        await trio.lowlevel.checkpoint()

    async def aclose(self):
        await trio.lowlevel.checkpoint()


class FakeChild:
    """A child that exits when a test says so, or by SIGKILL unless it is ``stubborn``."""

    def __init__(self, command, pid):
        self.command = command
        self.pid = pid
        self.stdout = FakeOutput()
        self.stderr = None if command.merge_stderr or command.tty else FakeOutput()
        self.stdin = FakeTerminal() if command.tty else None
        self.signals = []
        self.stubborn = False
        self.released = self.closed = False
        self._status = None
        self._exit = trio.Event()

    def say(self, text):
        self.stdout.put(text)

    def exit(self, code=0, *, close=True, signal_number=None):
        if self._status is None:
            self._status = ExitStatus(code) if signal_number is None else ExitStatus(None, signal_number)
            self._exit.set()
        if close:
            self.hang_up()

    def hang_up(self):
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.put(b"")

    def exited(self):
        return self._status

    async def wait_exited(self):
        await self._exit.wait()
        return self._status

    def signal_group(self, number):
        assert not self.released, "signalled after its release: another process may have its id"
        self.signals.append(number)
        if number == signal.SIGKILL and not self.stubborn:
            self.exit(signal_number=9)
        return True

    async def release(self, *, keep_running=False):
        if not self.released:
            if not keep_running:
                self.signal_group(signal.SIGKILL)
            await self.wait_exited()
            self.released = True
        return True

    def close(self):
        self.closed = True


class FakeBackend:
    """A ``Spawn`` of fake children; ``hold`` makes a start wait, ``error`` makes it fail."""

    def __init__(self):
        self.children = []
        self.hold = None
        self.error = None
        self._news = trio.Event()

    async def spawn(self, command):
        if self.hold is not None:
            await self.hold.wait()
        if self.error is not None:
            raise self.error
        child = FakeChild(command, 100_000 + len(self.children))
        self.children.append(child)
        self._news.set()
        self._news = trio.Event()
        return child

    async def child(self, number=0):
        """Return the ``number``-th child, once it is started."""
        with trio.fail_after(1000):
            while len(self.children) <= number:
                await self._news.wait()
        return self.children[number]
