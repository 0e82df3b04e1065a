"""All servers as one: the choice of the server that gets the next request, and the requests that wait for one.

Owns: the weight-update window, the affinity of session keys, the counts. Between choosing a server and counting the
request on it there is no checkpoint, so a burst spreads evenly.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import final

import attrs
import trio

from .._core.server import Event, Told
from .._core.statistics import ServerCounts, ServerStatistics
from .._core.weights import Past
from .._util.ports import Ports
from .._util.threads import RunSync
from ._server import Roster, Server
from ._settings import ServerSettings
from ._wire import RequestEncoder


@final
@attrs.define(eq=False, repr=False)
class Fleet:
    """The servers, shared by every view of them."""

    roster: Roster
    settings: ServerSettings
    ports: Ports
    requests: RequestEncoder
    run_sync: RunSync
    """Decodes large answers in threads."""
    decoding: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(1), init=False)
    """One large answer at a time: threads that want the same interpreter only get into each other's way."""
    window: object = attrs.field(default=None, init=False)
    """The view of the servers that asked for a pause, and for no resume yet: nothing is sent anywhere. None if there is none.
    Changed by ``begin_window`` and ``end_window``."""
    required: int | None = attrs.field(default=None, init=False)
    """The weight version that requests are sent to."""
    orphans: int = attrs.field(default=0, init=False)
    late: int = attrs.field(default=0, init=False)
    _choices: int = attrs.field(default=0, init=False)
    _affinity: OrderedDict[str, Server] = attrs.field(factory=OrderedDict, init=False)

    @property
    def servers(self) -> Sequence[Server]:
        """All servers, in the order of their URLs."""
        return self.roster.servers

    async def until_usable(self, server: Server) -> None:
        """Wait until a request may be sent to this server; it may be when this returns.

        Raises:
          RuntimeError: the servers were left.
        """
        await self.roster.changed.wait_until(lambda: server.usable or self.roster.left)
        self.roster.check()

    async def choose(self, affinity: str | None) -> Server:
        """Return the server for the next request: the one of this session while it can be used, else the least loaded.

        Blocks while no server is usable. The caller counts its request on the server before its next checkpoint.

        Raises:
          RuntimeError: the servers were left.
        """
        while (server := self.choose_now(affinity)) is None:
            self.roster.check()
            await self.roster.changed.wait_until(lambda: self.roster.usable or self.roster.left)
        return server

    def choose_now(self, affinity: str | None) -> Server | None:
        """Return the server for the next request as ``choose`` does, without waiting; None while no server is usable."""
        usable = self.roster.usable
        if len(self.roster.servers) == 1:  # nothing to choose, and no session to remember a server for
            return usable[0] if usable else None
        now = trio.current_time()
        sticky = self._affinity.get(affinity) if affinity is not None else None
        if sticky is not None and sticky.usable and sticky.busy_until <= now:
            self._remember(affinity, sticky)
            return sticky
        if not usable:
            return None
        # A tie goes to the server that was unused the longest: else an idle fleet would always send to its first server.
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

    def answering(self) -> list[Server]:
        """Return the servers that are not lost."""
        return [server for server in self.servers if not server.standing.lost]

    def in_windows(self) -> list[Server]:
        """Return the servers that a window pauses and asks for their versions."""
        return [server for server in self.servers if server.standing.joins_windows]

    def require_window_of(self, view: object, what: str) -> None:
        """Raise BusyResourceError if another view of these servers has a window open."""
        if self.window is not None and self.window is not view:
            raise trio.BusyResourceError(f"{what}: another user of these servers has a weight update under way")

    def begin_window(self, view: object) -> None:
        """Send no request anywhere until ``end_window``."""
        self.window = view
        self._tell_all(Told(Event.WINDOW_BEGINS))

    def end_window(self) -> None:
        """Give servers that are not paused requests again; those that still are, are the probe's to resume."""
        self.window = None
        self._tell_all(Told(Event.WINDOW_ENDS))

    def require_version(self, version: int, named_by: Collection[str]) -> None:
        """From now on send requests only to servers that name this version (those that never named one excepted).

        Servers that last named another are asked again: another client may have given them these weights.
        """
        self.required = version
        for server in self.servers:
            past = Past.NUMBERS if server.url in named_by else Past.OTHERS if named_by else Past.NONE
            server.tell(Told(Event.VERSION_REQUIRED, version=version, past=past))

    def _tell_all(self, told: Told) -> None:
        for server in self.servers:
            server.tell(told)

    def blocked_reason(self) -> str | None:
        """Return why nothing can be sent before a weight update; None if something can, or may be able to without one.

        A server that was paused when the client was opened counts: a run that was killed in a window has left it so.
        """
        behind = [server for server in self.servers if server.standing.samples]
        paused = any(server.standing.found_paused for server in self.servers)
        if self.window is not None or self.roster.usable or not (behind or paused):
            return None
        states = [f"{server.url} {server.unfitness}" for server in behind]
        states += [f"{url} is lost ({why})" for url, why in self.losses().items()]
        lack = f"has weight version {self.required}" if behind else "takes requests"
        return (
            f"no server {lack}, and none gets requests until a weight update has brought it to the current version, or has taken "
            f"over one that was paused: {'; '.join(states)}"
        )

    async def blocked_reason_after(self, known: str | None, *, patience_s: float) -> str | None:
        """Wait until the reason is another than ``known``; a new one counts once it has lasted for ``patience_s``.

        See docs/decisions/0026-only-a-weight-update-helps-is-told.md.
        """
        changed = self.roster.changed
        while True:
            await changed.wait_until(partial(self._is_blocked_otherwise, known))
            if (found := self.blocked_reason()) is None:
                return None
            with trio.move_on_after(patience_s):
                await changed.wait_until(partial(self._is_blocked_otherwise, found))
                continue
            return found

    def _is_blocked_otherwise(self, reason: str | None) -> bool:
        return self.blocked_reason() != reason

    def statistics(self) -> ServerStatistics:
        """Return the counts of this moment."""
        return ServerStatistics(
            servers=tuple(
                ServerCounts(
                    url=server.url,
                    usable=server.usable,
                    paused=server.standing.may_be_paused,
                    version=server.weights.now.version,
                    in_flight=server.in_flight,
                    requests=server.requests,
                )
                for server in self.servers
            ),
            connections=sum(server.connections for server in self.servers),
            owed_aborts=sum(server.owed.debts for server in self.servers),
            orphans=self.orphans,
            late=self.late,
        )

    def losses(self) -> Mapping[str, str]:
        """Return why each lost server is lost, by URL."""
        return {server.url: str(server.standing.why) for server in self.servers if server.standing.lost}
