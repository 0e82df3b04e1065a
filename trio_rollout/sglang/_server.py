"""Looking at a server's load, once for everybody who wants to know at the same time.

One server: how to reach it, and what is known about it at this moment.
"""

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, final

import attrs
import httpx  # noqa: ASYNC127  the client users have
import trio

from .._http import Address, Connector, Pool, PoolTransport, post_head
from ._naming import Naming
from ._owed_aborts import RESERVED, AbortLane, LeavingRequests
from ._settings import ServerSettings
from ._wire import ABORT, GENERATE


@final
@attrs.define(eq=False, repr=False)
class Look:
    """Shares an answer among those who asked before its question was sent; 8,000 closed requests need two looks, not 8,000."""

    _one: trio.StrictFIFOLock = attrs.field(factory=trio.StrictFIFOLock, init=False)
    _begun: int = attrs.field(default=0, init=False)
    _answered: int = attrs.field(default=0, init=False)
    _answer: int = attrs.field(default=0, init=False)

    async def fresh(self, ask: Callable[[], Awaitable[int]]) -> int:
        """An answer to a question that was sent after this call.

        Blocks until it is there. Cancelled, the next one in line asks. Raises what ``ask`` raises, to the one who asked.
        """
        asked = self._begun
        async with self._one:
            if self._answered <= asked:
                self._begun += 1
                number = self._begun
                self._answer = await ask()
                self._answered = number
            return self._answer


# Control calls are few and short: what is idle may go quickly.
_CONTROL_IDLE: Final = 4
# SGLang notices a closed socket after 3 to 4 s; what runs after that is another orphan.
_ORPHAN_LIFE_S: Final = 3.0


@final
@attrs.define(eq=False)
class Server:
    """State of one server. Changed only by its fleet, which tells those who wait."""

    address: Address
    work: Pool = attrs.field(repr=False)
    aborts: AbortLane = attrs.field(repr=False)
    control: Pool = attrs.field(repr=False)
    client: httpx.AsyncClient = attrs.field(repr=False)
    generate_head: bytes = attrs.field(repr=False)
    naming: Naming = attrs.field(factory=Naming)
    in_flight: int = 0
    """Requests of ours that have chosen it and have not ended."""
    sent: int = 0
    """Those of them that have gone out whole."""
    requests: int = 0
    """Requests that have gone out to it, ever."""
    chosen: int = 0
    """When it was last chosen, in choices."""
    lost: str | None = None
    """Why it gets no work until it answers a probe."""
    down: bool = False
    """Lost, and nothing listened there when it was last asked: it runs nothing."""
    suspect: bool = False
    """It named a version that is not the one it should have, or did not let a request go; the probe will ask."""
    paused: bool = False
    """It may be paused: a pause was sent, and no resume has been acknowledged."""
    pause_unanswered: bool = False
    """A pause was sent that it has not answered: it may still be carried out, after a resume."""
    resumes: int = 0
    """Those on their way, unanswered: no pause is sent before they are, for it might overtake them."""
    busy_until: float = 0.0
    orphans: deque[float] = attrs.field(factory=deque, repr=False)
    """When orphans were counted here that may still run."""
    leaving: LeavingRequests = attrs.field(factory=LeavingRequests, repr=False)
    """Requests of ours that were cancelled and have not ended."""
    look: Look = attrs.field(factory=Look, repr=False)
    """At its load."""

    @property
    def url(self) -> str:
        """Its URL, as in messages and mappings."""
        return self.address.url

    @property
    def connections(self) -> int:
        """Open connections to it, idle ones included."""
        return self.work.connections + self.aborts.pool.connections + self.control.connections

    def known_orphans(self, now: float, *, running: int) -> int:
        """How many of the ``running`` requests that are not ours any more have been counted as orphans already."""
        self._forget_orphans(now)
        while len(self.orphans) > running:
            self.orphans.popleft()
        return len(self.orphans)

    def note_orphans(self, now: float, count: int) -> None:
        """So many more were counted. A server that never says what it runs is told of without end, so the old ones go here too."""
        self._forget_orphans(now)
        self.orphans.extend([now] * count)

    def _forget_orphans(self, now: float) -> None:
        while self.orphans and self.orphans[0] + _ORPHAN_LIFE_S <= now:
            self.orphans.popleft()

    def close(self) -> None:
        """Close all idle connections, and those in use when they are given back."""
        for pool in (self.work, self.aborts.pool, self.control):
            pool.close()


def new_server(address: Address, settings: ServerSettings, connect: Connector) -> Server:
    """A server that nobody has talked to yet."""

    def pool(max_idle: int) -> Pool:
        return Pool(address, connect, max_idle=max_idle, idle_s=settings.idle, connect_s=settings.connect)

    headers = () if settings.api_key is None else (("authorization", f"Bearer {settings.api_key}"),)
    control = pool(_CONTROL_IDLE)
    return Server(
        address=address,
        work=pool(settings.max_idle),
        aborts=AbortLane(pool(RESERVED), post_head(address, ABORT, headers=headers)),
        control=control,
        client=httpx.AsyncClient(
            transport=PoolTransport(control),
            base_url=f"{'https' if address.tls else 'http'}://{address.host_header}{address.prefix}",
            headers=dict(headers),
            timeout=None,  # noqa: S113  the caller's scope bounds every call
            trust_env=False,
        ),
        generate_head=post_head(address, GENERATE, headers=headers),
    )
