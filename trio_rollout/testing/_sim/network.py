"""A network in memory for virtual time: seeded delays, partial writes, and everything that happens to connections.

It is what real sockets are in production: give its ``connect`` to ``open_sglang_servers`` and let each URL be answered by
something that serves a Trio stream. The pool, the parser and the server stay as they are::

    async with open_sim_net({"http://a:1": fake.serve}, rng=random.Random(7)) as net:
        async with open_sglang_servers(["http://a:1"], connect=net.connect) as servers:
            net.host("http://a:1").power_off()
"""

import errno
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias, final

import attrs
import trio

from ..._http import Address, parse_url
from ..._util.condition import Condition
from ..._util.service import open_service_nursery
from .connection import End, Fate, Link, NetFaults, SimStream, Wire

Handler: TypeAlias = Callable[[trio.abc.Stream], Awaitable[None]]
"""Serves one connection until it ends."""


@final
@attrs.define(eq=False, repr=False)
class SimHost:
    """One host: what serves its connections, and the ways in which a machine fails."""

    url: str
    serve: Handler
    _events: Counter[str]
    _restarted: Callable[[], object] | None = None
    up: bool = attrs.field(default=True, init=False)
    """Somebody listens. A host that is not up refuses connections; one that is cut off does not answer."""
    cut_off: bool = attrs.field(default=False, init=False)
    """Nothing comes or goes."""
    wires: dict[Wire, trio.CancelScope] = attrs.field(factory=dict, init=False)
    """Its open connections, each with the scope of its handler."""
    _mended: Condition = attrs.field(factory=Condition, init=False)

    def __repr__(self) -> str:
        state = "cut off" if self.cut_off else "up" if self.up else "down"
        return f"<SimHost {self.url} {state}, {len(self.wires)} connections>"

    def kill(self) -> None:
        """Kill its process: connections are reset, new ones refused, until ``start``."""
        self._events["killed"] += 1
        self.up = False
        for wire, scope in list(self.wires.items()):
            wire.reset(wire.down)
            scope.cancel()

    def power_off(self) -> None:
        """Take its power: nobody is told anything; connections stay half open, until ``start``."""
        self._events["power off"] += 1
        self.cut_off = True
        self.up = False
        for wire, scope in list(self.wires.items()):
            wire.lose_server()
            scope.cancel()

    def start(self) -> None:
        """Up again, with no memory of its connections: whoever still sends on one gets a reset."""
        if self._restarted is not None:
            self._restarted()
        self.up = True
        for wire in self.wires:
            wire.server_restarted()
        self._reconnect()

    def partition(self) -> None:
        """Cut it off; everything goes on in itself, and what is sent is held up until ``mend``."""
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
        """Reset every connection, as a balancer that restarts does; the server itself runs on."""
        self._events["reset"] += len(self.wires)
        for wire in self.wires:
            wire.reset(wire.up)
            wire.reset(wire.down)

    def forget(self, wire: Wire) -> None:
        """Both ends are closed."""
        del self.wires[wire]

    async def reachable(self) -> None:
        """Wait while it is cut off."""
        await self._mended.wait_until(lambda: not self.cut_off)


@final
@attrs.define(eq=False, repr=False)
class SimNet:
    """The network; ``open_sim_net`` makes one. ``faults`` may be replaced at any time, ``events`` counts what happened."""

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
        """Connections that clients have open. A server may learn later, or never, that its client has closed."""
        return sum(wire.client_open for host in self._hosts.values() for wire in host.wires)

    @property
    def hosts(self) -> Sequence[SimHost]:
        """All hosts, in the order in which they were added."""
        return tuple(self._hosts.values())

    def add_host(self, url: str, serve: Handler, *, restarted: Callable[[], object] | None = None) -> SimHost:
        """Let ``serve`` answer the connections to this URL.

        ``restarted`` is called when its process or machine starts anew: let it forget there what memory it had.
        """
        host = SimHost(parse_url(url).url, serve, self.events, restarted)
        self._hosts[host.url] = host
        return host

    def host(self, url: str) -> SimHost:
        """The host behind a URL."""
        return self._hosts[parse_url(url).url]

    async def connect(self, address: Address) -> End:
        """Connect, as ``open_sglang_servers(connect=...)`` wants it.

        Blocks for a delay; for ever if the host is cut off. Cancelled, nothing is open.

        Raises:
          OSError: the host is unknown, down, or drawn to refuse.

        """
        await trio.sleep(self._rng.uniform(*self.link.latency) + self._rng.uniform(*self.link.latency))
        host = self._hosts.get(address.url)
        if host is None:
            raise OSError(errno.EHOSTUNREACH, f"no host {address.url} in this network")
        await host.reachable()
        fate = self._draw_fate()
        if fate == "unanswered":
            self.events["unanswered"] += 1
            await trio.sleep_forever()
        if fate == "refused" or not host.up:
            self.events["refused"] += 1
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there")
        after = self._rng.randint(1, self.faults.within)
        wire = Wire(self.link, self._rng, self.events, Fate(fate, after), host.forget)
        scope = trio.CancelScope()
        host.wires[wire] = scope
        ours, theirs = wire.ends()
        self._nursery.start_soon(_serve, host, SimStream(theirs), scope, name=f"connection to {host.url}")
        return ours

    def _draw_fate(self) -> str:
        """What will go wrong with a new connection: the name of a share of ``faults``, or nothing."""
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
    """A network of these hosts, each a function that serves one connection. Leaving cancels what they serve.

    ``events`` is where it counts what it does to connections; by default in a counter of its own.
    """

    async with open_service_nursery() as nursery:
        net = SimNet(nursery, rng, link, faults, Counter() if events is None else events)
        for url, handler in (hosts or {}).items():
            net.add_host(url, handler)
        yield net
