"""A network in memory for virtual time: seeded delays, partial writes, and everything that happens to connections.

It replaces real sockets: give its ``connect`` to ``open_sglang_servers``, and let each URL be answered by a function that
serves a Trio stream. Pool, parser and server are those of production::

    async with open_sim_net({"http://a:1": fake.serve}, rng=random.Random(7)) as net:
        async with open_sglang_servers(["http://a:1"], connect=net.connect) as servers:
            net.host("http://a:1").power_off()
"""

import enum
import errno
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Never, TypeAlias, final

import attrs
import trio

from ..._http import Address, parse_url
from ..._util.condition import Condition
from ..._util.service import open_service_nursery
from .connection import End, Link, NetFaults, PlannedFault, SimStream, Wire

Handler: TypeAlias = Callable[[trio.abc.Stream], Awaitable[None]]
"""Serves one connection until it ends."""


@final
@attrs.define(eq=False, repr=False)
class SimHost:
    """One host: the handler of its connections, and the ways in which a machine fails."""

    url: str
    serve: Handler
    _events: Counter[str]
    _restarted: Callable[[], object] | None = None
    up: bool = attrs.field(default=True, init=False)
    """The host listens. A host that is not up refuses connections; one that is cut off does not answer."""
    cut_off: bool = attrs.field(default=False, init=False)
    """Nothing arrives or leaves."""
    wires: dict[Wire, trio.CancelScope] = attrs.field(factory=dict, init=False)
    """The open connections, each with the scope of its handler."""
    _mended: Condition = attrs.field(factory=Condition, init=False)

    def __repr__(self) -> str:
        state = "cut off" if self.cut_off else "up" if self.up else "down"
        return f"<SimHost {self.url} {state}, {len(self.wires)} connections>"

    def kill(self) -> None:
        """Kill the process: connections are reset, and new ones refused until ``start``."""
        self._events["killed"] += 1
        self.up = False
        for wire, scope in list(self.wires.items()):
            wire.reset(wire.down)
            scope.cancel()

    def power_off(self) -> None:
        """Take the machine off power until ``start``: no client is told, and connections stay half open."""
        self._events["power off"] += 1
        self.cut_off = True
        self.up = False
        for wire, scope in list(self.wires.items()):
            wire.lose_server()
            scope.cancel()

    def start(self) -> None:
        """Start again without memory of any connection: a client that still sends on one gets a reset."""
        if self._restarted is not None:
            self._restarted()
        self.up = True
        for wire in self.wires:
            wire.server_restarted()
        self._reconnect()

    def partition(self) -> None:
        """Cut the host off: its process runs on, and everything sent is held up until ``mend``."""
        self._events["partition"] += 1
        self.cut_off = True
        for wire in self.wires:
            wire.cut()

    def mend(self) -> None:
        """End a partition."""
        for wire in self.wires:
            if not wire.server_lost:
                wire.mend()
        self._reconnect()

    def _reconnect(self) -> None:
        self.cut_off = False
        self._mended.notify()

    def reset_connections(self) -> None:
        """Reset every connection, as a restarting load balancer does; the server runs on."""
        self._events["reset"] += len(self.wires)
        for wire in self.wires:
            wire.reset_both()

    async def reachable(self) -> None:
        """Wait while the host is cut off."""
        await self._mended.wait_until(lambda: not self.cut_off)


@final
@attrs.define(eq=False, repr=False)
class SimNet:
    """The network, made by ``open_sim_net``. ``faults`` may be replaced at any time; ``events`` counts what happened."""

    _nursery: trio.Nursery
    _rng: random.Random
    link: Link
    faults: NetFaults
    events: Counter[str]
    _hosts: dict[str, SimHost] = attrs.field(factory=dict, init=False)

    def __repr__(self) -> str:
        return f"<SimNet {list(self._hosts.values())}>"

    @property
    def connections(self) -> int:
        """The number of connections that clients have open. A server may learn of a close later, or never."""
        return sum(wire.client_open for host in self._hosts.values() for wire in host.wires)

    @property
    def hosts(self) -> Sequence[SimHost]:
        """All hosts, in the order in which they were added."""
        return tuple(self._hosts.values())

    def add_host(self, url: str, serve: Handler, *, restarted: Callable[[], object] | None = None) -> SimHost:
        """Let ``serve`` answer the connections to this URL.

        ``restarted`` is called when the process or machine starts anew: clear the server's memory there.
        """
        host = SimHost(parse_url(url).url, serve, self.events, restarted)
        self._hosts[host.url] = host
        return host

    def host(self, url: str) -> SimHost:
        """Return the host behind a URL."""
        return self._hosts[parse_url(url).url]

    async def connect(self, address: Address) -> End:
        """Connect; pass this method as ``open_sglang_servers(connect=...)``.

        Blocks for a drawn delay, and while the host is cut off. Cancelled, nothing is open.

        Raises:
          OSError: the host is unknown, down, or drawn to refuse.
        """
        await trio.sleep(self._rng.uniform(*self.link.latency) + self._rng.uniform(*self.link.latency))
        host = self._hosts.get(address.url)
        if host is None:
            raise OSError(errno.EHOSTUNREACH, f"no host {address.url} in this network")
        await host.reachable()
        fault = self._draw_fault()
        if fault == "unanswered":
            self.events["unanswered"] += 1
            await trio.sleep_forever()
        if fault == "refused" or not host.up:
            self.events["refused"] += 1
            raise ConnectionRefusedError(errno.ECONNREFUSED, "no server listens there")
        after = self._rng.randint(1, self.faults.within)
        wire = Wire(self.link, self._rng, self.events, PlannedFault(fault, after), host.wires.pop)
        scope = trio.CancelScope()
        host.wires[wire] = scope
        ours, theirs = wire.ends()
        self._nursery.start_soon(_serve, host, SimStream(theirs), scope, name=f"connection to {host.url}")
        return ours

    def _draw_fault(self) -> str:
        """Draw the fault of a new connection: the name of a share of ``faults``, or empty."""
        draw = self._rng.random()
        for kind in ("refused", "unanswered", "reset", "silent"):
            share: float = getattr(self.faults, kind)
            if draw < share:
                return kind
            draw -= share
        return ""


async def _serve(host: SimHost, stream: SimStream, scope: trio.CancelScope) -> None:
    with scope:
        try:
            await host.serve(stream)
        finally:
            stream.close_now()


@asynccontextmanager
async def open_sim_net(
    hosts: Mapping[str, Handler] | None = None,
    *,
    rng: random.Random,
    link: Link = Link(),  # noqa: B008  frozen
    faults: NetFaults = NetFaults(),  # noqa: B008  frozen
    events: Counter[str] | None = None,
) -> AsyncGenerator[SimNet]:
    """Open a network of these hosts, each a function that serves one connection. Leaving cancels all they serve.

    ``events``: the counter of everything that happens to connections; a new one by default.
    """

    async with open_service_nursery() as nursery:
        net = SimNet(nursery, rng, link, faults, Counter() if events is None else events)
        for url, handler in (hosts or {}).items():
            net.add_host(url, handler)
        yield net


class Trouble(enum.Enum):
    """An event that disturbs a host."""

    KILL = "kill"
    """The process dies and is started again."""
    POWER_OFF = "power off"
    """The machine loses its power and starts again; its clients learn of that late."""
    PARTITION = "partition"
    """The host is cut off, and comes back as it was."""
    RESET = "reset"
    """All connections of the host are reset."""


_TROUBLES: Mapping[Trouble, tuple[Callable[[SimHost], None], Callable[[SimHost], None] | None]] = {
    Trouble.KILL: (SimHost.kill, SimHost.start),
    Trouble.POWER_OFF: (SimHost.power_off, SimHost.start),
    Trouble.PARTITION: (SimHost.partition, SimHost.mend),
    Trouble.RESET: (SimHost.reset_connections, None),
}
"""The beginning and the end of each."""


async def disturb(
    net: SimNet,
    *,
    rng: random.Random,
    every: tuple[float, float] = (20.0, 200.0),
    outage: tuple[float, float] = (1.0, 60.0),
    kinds: Sequence[Trouble] = tuple(Trouble),
) -> Never:
    """Disturb the hosts, one at a time, until cancelled; a host that is then disturbed stays so.

    ``every``: least and longest seconds between two disturbances; ``outage``: least and longest seconds of an outage.
    """
    while True:
        await trio.sleep(rng.uniform(*every))
        host = rng.choice(net.hosts)
        begin, end = _TROUBLES[rng.choice(kinds)]
        seconds = rng.uniform(*outage)
        begin(host)
        await trio.sleep(seconds)
        if end is not None:
            end(host)
