"""All servers as one: which of them gets the next request, and who waits until one can.

Owns: the servers' states, the affinity of session keys, the debts, the counts. Between choosing a server and counting the
request on it there is no checkpoint, so a burst spreads evenly.
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final, final

import attrs
import trio

from .._core.statistics import ServerCounts, ServerStatistics
from .._util.ports import Ports
from ._call import Decoding
from ._server import Server
from ._settings import ServerSettings
from ._wire import RequestEncoder

_log: Final = logging.getLogger("trio_rollout.sglang")


@final
@attrs.define(eq=False, repr=False)
class Fleet:
    """The servers, shared by every view of them."""

    servers: Sequence[Server]
    settings: ServerSettings
    ports: Ports
    requests: RequestEncoder
    decoding: Decoding = attrs.field(factory=Decoding)
    required: int | None = None
    """Only servers that name this version get work (those that never named one excepted)."""
    window: bool = False
    """A pause was asked for and no resume yet: nothing is sent anywhere."""
    orphans: int = 0
    late: int = 0
    debts: dict[Server, list[str]] = attrs.field(factory=dict)
    """Aborts owed to servers that were paused when they fell due."""
    _choices: int = 0
    _affinity: OrderedDict[str, Server] = attrs.field(factory=OrderedDict)
    _changed: trio.Event = attrs.field(factory=trio.Event)

    def notify(self) -> None:
        """Wake everybody who waits for a change of any server's state."""
        self._changed.set()
        self._changed = trio.Event()

    async def changed(self) -> None:
        """Wait for the next change of any server's state."""
        await self._changed.wait()

    def usable(self, server: Server) -> bool:
        """Whether a request may be sent to it now."""
        return not self.window and server.lost is None and not server.paused and self.has_weights(server)

    def has_weights(self, server: Server) -> bool:
        """Whether it has those that are required; one that never named a number is taken at the trainer's word."""
        naming = server.naming
        return self.required is None or not naming.names_numbers or naming.now.version == self.required

    async def until_usable(self, server: Server) -> None:
        """Wait until a request may be sent to this server; it may be when this returns."""
        while not self.usable(server):
            await self._changed.wait()

    async def choose(self, affinity: str | None) -> Server:
        """The server for the next request: the one of this session while it can be used, else the least loaded.

        Blocks while no server is usable. The caller counts its request on the server before its next checkpoint.
        """
        while (server := self.choose_now(affinity)) is None:
            await self._changed.wait()
        return server

    def choose_now(self, affinity: str | None) -> Server | None:
        """The same without waiting: None while no server is usable."""
        if len(self.servers) == 1:  # nothing to choose, and no session to remember a server for
            return self.servers[0] if self.usable(self.servers[0]) else None
        now = trio.current_time()
        sticky = self._affinity.get(affinity) if affinity is not None else None
        if sticky is not None and self.usable(sticky) and sticky.busy_until <= now:
            self._remember(affinity, sticky)
            return sticky
        usable = [server for server in self.servers if self.usable(server)]
        if not usable:
            return None
        # The one longest unused wins a tie: else an idle fleet would always send to its first server.
        best = usable[0]
        if len(usable) > 1:
            best = min(usable, key=lambda server: (server.busy_until > now, server.in_flight, server.chosen))
        self._choices += 1
        best.chosen = self._choices
        self._remember(affinity, best)
        return best

    def _remember(self, affinity: str | None, server: Server) -> None:
        if affinity is None:
            return
        self._affinity[affinity] = server
        self._affinity.move_to_end(affinity)
        if len(self._affinity) > self.settings.affinity_keys:
            self._affinity.popitem(last=False)

    def lose(self, server: Server, why: str) -> None:
        """Send nothing more to a server until it answers a probe."""
        if server.lost is None:
            _log.warning("server %s is lost: %s", server.url, why)
            server.lost = why
            self.notify()

    def pausing(self, servers: Sequence[Server]) -> None:
        """A window begins: nothing is sent anywhere, and these may be paused from now on, whatever becomes of the call."""
        self.window = True
        for server in servers:
            server.paused = True
            server.leaving.give_up()
        self.notify()

    def window_over(self) -> None:
        """Servers that are not paused get work again."""
        self.window = False
        self.notify()

    def resumed(self, server: Server) -> None:
        """It has said that it continues."""
        server.paused = False
        self.notify()

    def obstacle(self) -> str | None:
        """Why nothing can be sent before a weight update; None if something can, or may be able to without one."""
        behind = [server for server in self.servers if server.lost is None and not server.paused]
        if self.window or not behind or any(self.usable(server) for server in behind):
            return None
        states = [f"{server.url} names {server.naming.now.name!r}" for server in behind]
        states += [f"{url} is lost ({why})" for url, why in self.losses().items()]
        return (
            f"no server has weight version {self.required}, and none gets work until a weight update has brought it to the "
            f"current version: {'; '.join(states)}"
        )

    async def blocked_reason_after(self, known: str | None, *, patience_s: float) -> str | None:
        """Wait until the obstacle is another one than ``known``; a new one counts once it has lasted for ``patience_s``."""
        while True:
            await trio.lowlevel.checkpoint()
            while (found := self.obstacle()) == known:
                await self._changed.wait()
            if found is None:
                return None
            with trio.move_on_after(patience_s):
                while self.obstacle() == found:
                    await self._changed.wait()
                continue
            return found

    def require_version(self, version: int) -> None:
        """From now on only servers that name this version get work (those that never named one excepted).

        Those that last named another are asked again: somebody else may have given them these weights.
        """
        self.required = version
        for server in self.servers:
            server.naming.require(version)
            server.suspect = server.naming.now.version != version
        self.notify()

    def suspect(self, server: Server) -> None:
        """Have a server asked whether it samples, and with which weights: its answers, or their absence, say otherwise."""
        if not server.suspect:
            server.suspect = True
            self.notify()

    def owe_abort(self, server: Server, rid: str) -> None:
        """Leave an abort to the reaper."""
        self.debts.setdefault(server, []).append(rid)
        self.notify()

    def statistics(self) -> ServerStatistics:
        """Counts of this moment."""
        return ServerStatistics(
            servers=tuple(
                ServerCounts(
                    url=server.url,
                    usable=self.usable(server),
                    paused=server.paused,
                    version=server.naming.now.version,
                    in_flight=server.in_flight,
                    requests=server.requests,
                )
                for server in self.servers
            ),
            connections=sum(server.connections for server in self.servers),
            debts=sum(len(rids) for rids in self.debts.values()),
            orphans=self.orphans,
            late=self.late,
        )

    def losses(self) -> Mapping[str, str]:
        """Why each lost server is lost, by URL."""
        return {server.url: server.lost for server in self.servers if server.lost is not None}
