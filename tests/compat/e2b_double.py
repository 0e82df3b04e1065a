"""A double of slime's E2BSandbox: asyncio, commands are shell lines, a timeout only stops waiting.

The service does not depend on its clients: a sandbox that was asked for is made, and lives until it is killed.
"""

import asyncio
import os
import signal
from contextlib import suppress


class Service:
    """The service: it goes on when its clients stop."""

    def __init__(self, root):
        self.root = root
        self.alive = set()
        self.created = 0
        self.latency = 0.0
        self.create_errors = []
        self.kill_errors = []
        self.exec_errors = []
        self.asked = []
        self._made = set()

    async def create(self, name):
        """Make a sandbox; that goes on when the client gives up."""
        if self.create_errors and isinstance(self.create_errors[0], ConnectionRefusedError):
            raise self.create_errors.pop(0)
        self.created += 1
        made = asyncio.get_running_loop().call_later(self.latency, self._appear, name)
        try:
            await asyncio.sleep(self.latency)
        except asyncio.CancelledError:
            self._made.add(made)
            raise
        if self.create_errors:
            raise self.create_errors.pop(0)

    def _appear(self, name):
        self.alive.add(name)
        (self.root / name).mkdir(parents=True)

    async def kill(self, name):
        await asyncio.sleep(0)
        if self.kill_errors:
            raise self.kill_errors.pop(0)
        self.alive.discard(name)


class Sandbox:
    """A sandbox as slime's client gives it: entered, used, left."""

    def __init__(self, service, spec):
        self.service, self.spec = service, spec
        self._processes = []
        self._asked = False

    @property
    def _home(self):
        return self.service.root / self.spec.name

    async def __aenter__(self):
        self._asked = True
        await self.service.create(self.spec.name)
        return self

    async def __aexit__(self, *_error):
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        await self.service.kill(self.spec.name)

    async def exec(self, cmd, *, user="root", env=None, timeout=120, check=False, idempotent=True):  # noqa: ASYNC109
        self.service.asked.append({"cmd": cmd, "user": user, "timeout": timeout, "idempotent": idempotent})
        if self.service.exec_errors:
            raise self.service.exec_errors.pop(0)
        process = await asyncio.create_subprocess_shell(
            cmd,
            cwd=self._home,
            env={"PATH": os.environ["PATH"], **(env or {})},
            start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        self._processes.append(process)
        async with asyncio.timeout(timeout):
            out, err = await process.communicate()
        return process.returncode, out.decode(), err.decode()

    async def write_file(self, path, content, *, user="root"):
        await asyncio.sleep(0)
        (self._home / path).write_bytes(content.encode() if isinstance(content, str) else content)

    async def read_file(self, path, *, user="root"):
        await asyncio.sleep(0)
        return (self._home / path).read_text()
