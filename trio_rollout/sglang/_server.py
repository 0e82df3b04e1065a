"""One server: how to reach it, what is known about it at this moment, and its control calls in order.

``Server.tell`` is the only place where a server's state changes, by the table in ``_core/server.py``; it performs the effects.
"""

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from heapq import heappop, heappush
from typing import Any, Final, Generic, TypeVar, final

import attrs
import httpx  # noqa: ASYNC127  the client users have
import trio

from .._core.server import Effect, Event, Standing, Told, step
from .._core.weights import Weights
from .._http import BODY_LIMIT, Address, Connector, Pool, PoolTransport, post_head
from .._util.condition import Condition
from ._settings import ServerSettings
from ._wire import ABORT, GENERATE

_log: Final = logging.getLogger("trio_rollout.sglang")
# Control calls are few and short: what is idle may go quickly.
_CONTROL_IDLE: Final = 4
# A router's list of a thousand workers has a MB. An answer of this size is decoded within some 50 ms.
_CONTROL_ANSWER_BYTES: Final = 4 << 20
# Connections for aborts: a server answers an abort at once, so a few carry them all.
_RESERVED: Final = 8
# SGLang notices a closed socket after 3 to 4 s; what runs after that is another orphan.
_ORPHAN_LIFE_S: Final = 3.0

T = TypeVar("T")


@final
@attrs.define(eq=False, repr=False)
class _ControlCall(Generic[T]):
    """A call in the queue. ``begun``: its turn has come. ``over``: it has ended, or never will."""

    make: Callable[[], Awaitable[T]]
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    begun: bool = attrs.field(default=False, init=False)
    over: bool = attrs.field(default=False, init=False)
    result: T | None = attrs.field(default=None, init=False)


@final
@attrs.define(eq=False, repr=False)
class ControlQueue:
    """Makes the control calls of one server, one after the other: commands (pause, resume) before questions.

    No pause overtakes a resume and no resume a pause, because each is sent when the one before it has been answered, or its
    time is over. A question never holds up a command: it is cancelled, and asked again after the command, because its answer
    would be of before. See docs/decisions/0029-no-pause-overtakes-a-resume.md and 0033-a-servers-life-is-a-table.md.

    Each call bounds itself. Its exceptions end the queue, so a call returns its failures.
    """

    _commands: deque[_ControlCall[Any]] = attrs.field(factory=deque, init=False)
    _questions: deque[_ControlCall[Any]] = attrs.field(factory=deque, init=False)
    _asking: _ControlCall[Any] | None = attrs.field(default=None, init=False)
    """The question that is under way."""
    closed: bool = attrs.field(default=False, init=False)
    """The queue has no task any more: no call will be made."""
    _changed: Condition = attrs.field(factory=Condition, init=False)

    async def command(self, make: Callable[[], Awaitable[T]], *, until: float) -> T | None:
        """Make a call that changes the server, and return its result; None if its turn did not come in time.

        Blocks until it is answered. Cancelled before its turn, it is not made; later its end is waited for and its
        result returned, because a command that is left without its answer might be carried out after the next one.
        """
        call = self._append(self._commands, make)
        if self._asking is not None:
            self._asking.scope.cancel(reason="a command comes first")
        try:
            await self._turn_of(call, until)
        finally:
            if call.begun:
                with trio.CancelScope(shield=True):  # the call bounds itself
                    await self._changed.wait_until(lambda: call.over)  # noqa: ASYNC102
            else:
                self._commands.remove(call)
        return call.result

    async def ask(self, make: Callable[[], Awaitable[T]], *, until: float) -> T | None:
        """Make a call that changes nothing, and return its result; None if its turn did not come in time.

        Blocks until it is answered. Cancelled, it is given up at once. ``make`` is called again after a command.
        """
        call = self._append(self._questions, make)
        try:
            while await self._turn_of(call, until) and not call.over:
                await self._changed.wait_until(lambda: call.over or not call.begun)
        finally:
            if call in self._questions:
                self._questions.remove(call)
            elif not call.over:
                call.over = True  # so it is not asked again
                call.scope.cancel(reason="nothing waits for its answer")
        return call.result

    async def serve(self) -> None:
        """Make the calls. Runs until cancelled; what waits then is not made."""
        try:
            while True:
                await self._changed.wait_until(lambda: self._commands or self._questions)
                await (self._run_command() if self._commands else self._run_question())
        finally:
            self.closed = True
            for call in (*self._commands, *self._questions):
                call.begun = call.over = True
            self._changed.notify()

    def _append(self, queue: deque[_ControlCall[Any]], make: Callable[[], Awaitable[T]]) -> _ControlCall[T]:
        call = _ControlCall(make)
        queue.append(call)
        call.begun = call.over = self.closed
        self._changed.notify()
        return call

    async def _turn_of(self, call: _ControlCall[T], until: float) -> bool:
        with trio.move_on_at(until):
            await self._changed.wait_until(lambda: call.begun)
        return call.begun

    async def _run_command(self) -> None:
        call = self._commands.popleft()
        call.begun = True
        self._changed.notify()
        try:
            call.result = await call.make()
        finally:
            call.over = True
            self._changed.notify()

    async def _run_question(self) -> None:
        call = self._asking = self._questions.popleft()
        call.begun = True
        self._changed.notify()
        try:
            with trio.CancelScope() as call.scope:
                call.result = await call.make()
                call.over = True
            if not call.over:
                call.begun = False
                self._questions.appendleft(call)
        finally:
            self._asking = None
            call.over = call.over or call not in self._questions
            self._changed.notify()


@final
@attrs.define(eq=False, repr=False)
class Roster:
    """All servers in order, and those that may be sent a request now.

    ``changed`` wakes the requests that wait for a server, and the tasks that watch for what blocks all requests.
    """

    servers: list["Server"] = attrs.field(factory=list, init=False)
    usable: Sequence["Server"] = attrs.field(default=(), init=False)
    left: bool = attrs.field(default=False, init=False)
    changed: Condition = attrs.field(factory=Condition, init=False)

    def check(self) -> None:
        """Raise RuntimeError if the servers were left."""
        if self.left or any(server.calls.closed for server in self.servers):
            raise RuntimeError("the connections are closed: the servers were left")

    def leave(self) -> None:
        """Close all connections to all servers. Requests that wait for a server fail."""
        self.left = True
        for server in self.servers:
            server.close()
        self.changed.notify()

    def note(self) -> None:
        """Update ``usable``: a server has become usable, or is not any more."""
        self.usable = tuple(server for server in self.servers if server.usable)


@final
@attrs.define(eq=False, repr=False)
class Look:
    """Shares an answer among the tasks that asked before its question was sent: 8,000 closed requests need two looks, not 8,000."""

    _one: trio.StrictFIFOLock = attrs.field(factory=trio.StrictFIFOLock, init=False)
    _begun: int = attrs.field(default=0, init=False)
    _answered: int = attrs.field(default=0, init=False)
    _answer: int = attrs.field(default=0, init=False)

    async def fresh(self, ask: Callable[[], Awaitable[int]]) -> int:
        """Return an answer to a question that was sent after this call.

        Blocks until it is there. Cancelled, the next task in line asks. An exception of ``ask`` goes to the task that asked.
        """
        asked = self._begun
        async with self._one:
            if self._answered <= asked:
                self._begun += 1
                number = self._begun
                self._answer = await ask()
                self._answered = number
            return self._answer


@final
@attrs.define(eq=False, repr=False)
class OwedAbort:
    """One abort that is owed. ``waiter``: the scope of the call that waits for it, which ends when it is cancelled."""

    rid: str
    once: bool = False
    """True if it is tried once, and its waiter then let go."""
    waiter: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    is_debt: bool = attrs.field(default=False, init=False)
    """True once no call waits for it any more."""
    in_line: bool = attrs.field(default=False, init=False)
    tries: int = attrs.field(default=0, init=False)


@final
@attrs.define(eq=False, repr=False)
class OwedAborts:
    """The aborts owed to one server: ``rid -> (next try, who waits)``. An entry that no call waits for is a debt. No I/O.

    Each step costs the same whatever is owed, but for a heap's logarithm: 8,000 requests may be left at once.
    """

    _all: dict[str, OwedAbort] = attrs.field(factory=dict, init=False)
    _line: list[tuple[float, int, OwedAbort]] = attrs.field(factory=list, init=False)
    """A heap by the time of the next try. Entries that are not owed any more are dropped when they come first."""
    _entered: int = attrs.field(default=0, init=False)
    _untried: int = attrs.field(default=0, init=False)
    debts: int = attrs.field(default=0, init=False)
    sending: int = attrs.field(default=0, init=False)
    """Aborts under way, at most one for each reserved connection."""
    changed: Condition = attrs.field(factory=Condition, init=False)
    """Wakes the task that sends them."""

    def add(self, rid: str, *, now: float, once: bool = False) -> OwedAbort:
        """Owe an abort, due now. The caller waits in its scope."""
        owed = self._all[rid] = OwedAbort(rid, once)
        self._enter(owed, now)
        return owed

    def end(self, owed: OwedAbort) -> None:
        """Note that an abort is not owed any more."""
        del self._all[owed.rid]
        self.debts -= owed.is_debt

    def let_stand(self, owed: OwedAbort) -> None:
        """Make a debt of an abort that its caller waits for no longer."""
        owed.is_debt = True
        self.debts += 1

    def let_go(self) -> None:
        """End every wait, because the server acknowledges nothing any more."""
        for owed in self._all.values():
            if not owed.is_debt:
                owed.waiter.cancel(reason="the server is paused")

    def all_debts(self) -> Sequence[OwedAbort]:
        """Return the aborts that no call waits for."""
        return [owed for owed in self._all.values() if owed.is_debt]

    def call_in(self, debts: Sequence[OwedAbort], *, now: float) -> None:
        """Have each of these debts tried once, from now on."""
        self._untried = len(debts)
        for owed in debts:
            self._enter(owed, now)

    def has_tried_debts(self) -> bool:
        """Return True once every debt that was called in has been tried, or is held back again."""
        return self._untried <= 0

    def next_time(self) -> float:
        """Return when the next try is due; infinite while there is none, or no connection for it."""
        while self._line and self._line[0][2].rid not in self._all:
            heappop(self._line)
        return self._line[0][0] if self._line and self.sending < _RESERVED else math.inf

    def is_due_before(self, time: float) -> bool:
        """Return True if a try is due before that time."""
        return self.next_time() < time

    def take(self, *, debts: bool) -> OwedAbort | None:
        """Take the first out of the line, for a try; ``note_try`` puts it back. None for a debt, if they are held back."""
        _, _, owed = heappop(self._line)
        owed.in_line = False
        if owed.is_debt and not debts:
            self._note_debt()
            return None
        self.sending += 1
        return owed

    def note_try(self, owed: OwedAbort, *, next_time: float) -> None:
        """Note a try. An abort that a call still waits for is tried again at that time; a debt waits to be called in again."""
        self.sending -= 1
        owed.tries += 1
        if owed.rid not in self._all:
            pass  # its request has ended meanwhile
        elif owed.is_debt:
            self._note_debt()
        elif owed.once:
            owed.waiter.cancel(reason="its abort was tried")
        else:
            self._enter(owed, next_time)
        self.changed.notify()

    def _note_debt(self) -> None:
        self._untried -= 1
        self.changed.notify()

    def _enter(self, owed: OwedAbort, next_time: float) -> None:
        if not owed.in_line:
            owed.in_line = True
            self._entered += 1
            heappush(self._line, (next_time, self._entered, owed))
            self.changed.notify()


@final
@attrs.define(eq=False)
class Server:
    """One server, as the client knows it."""

    address: Address
    work: Pool = attrs.field(repr=False)
    aborts: Pool = attrs.field(repr=False)
    control: Pool = attrs.field(repr=False)
    client: httpx.AsyncClient = attrs.field(repr=False)
    generate_head: bytes = attrs.field(repr=False)
    abort_head: bytes = attrs.field(repr=False)
    roster: Roster = attrs.field(factory=Roster, repr=False)
    standing: Standing = attrs.field(factory=Standing, init=False)
    """Changed by ``tell``."""
    usable: bool = attrs.field(default=False, init=False)
    """A request may be sent to it now: ``standing.usable``, kept here because each request asks."""
    calls: ControlQueue = attrs.field(factory=ControlQueue, init=False, repr=False)
    changed: Condition = attrs.field(factory=Condition, init=False, repr=False)
    """Wakes the server's tasks: its probe, and the one that pays what is owed."""
    in_flight: int = attrs.field(default=0, init=False)
    """This client's requests that have chosen the server and have not ended."""
    sent: int = attrs.field(default=0, init=False)
    """The requests in flight that have gone out whole."""
    closed: int = attrs.field(default=0, init=False)
    """The sent requests whose connection was closed without an answer, while a look tells if they still run."""
    requests: int = attrs.field(default=0, init=False)
    """Requests that have gone out to the server since the client was opened."""
    chosen: int = attrs.field(default=0, init=False)
    """The number of the choice at which the server was last chosen."""
    busy_until: float = attrs.field(default=0.0, init=False)
    orphans: deque[float] = attrs.field(factory=deque, init=False, repr=False)
    """The times at which orphans were counted that may still run."""
    owed: OwedAborts = attrs.field(factory=OwedAborts, init=False, repr=False)
    """Aborts of this client's requests that were cancelled and may not have ended."""
    look: Look = attrs.field(factory=Look, init=False, repr=False)
    """Looks at the server's load."""

    @property
    def url(self) -> str:
        """The server's URL, as in messages and mappings."""
        return self.address.url

    @property
    def weights(self) -> Weights:
        """The names that the server has given its weights, as versions."""
        return self.standing.weights

    @property
    def connections(self) -> int:
        """Open connections to the server, idle ones included."""
        return sum(pool.connections for pool in self.pools)

    @property
    def pools(self) -> Sequence[Pool]:
        """The connections to the server: those of generation, of aborts and of control calls."""
        return (self.work, self.aborts, self.control)

    def tell(self, told: Told) -> None:
        """Change what is known about the server by the table, and perform the effects.

        Raises:
          IllegalTransition: the table has no such entry; nothing has changed.
        """
        before = self.standing
        self.standing, effects = step(before, told)
        if self.usable != self.standing.usable:
            self.usable = self.standing.usable
            self.roster.note()
        for effect in effects:
            self._perform(effect, before)

    def opens(self, question: Event) -> int:
        """Note that a call is sent, and return the number that its answer has to carry."""
        self.tell(Told(question))
        if self.standing.open is None:
            raise AssertionError(f"{question} does not open a question")
        return self.standing.open

    def _perform(self, effect: Effect, before: Standing) -> None:
        match effect:
            case Effect.WAKE:
                self.roster.changed.notify()
            case Effect.LET_GO:
                self.owed.let_go()
            case Effect.RESUME | Effect.LOOK | Effect.PAY:
                self.changed.notify()
            case Effect.REPORT_LOST:
                _log.warning("server %s is lost: %s", self.url, self.standing.why)
            case Effect.REPORT_BACK:
                _log.warning("server %s is back (it was lost: %s)", self.url, before.why)
            case Effect.REPORT_OUTDATED:
                _log.warning("server %s %s: it gets no requests until a weight update", self.url, self.unfitness)

    @property
    def unfitness(self) -> str:
        """Why its weights get no requests, as the end of a sentence about the server."""
        weights = self.weights
        if weights.barred:
            return f"could not be paused under version {weights.refused_under}, and has got no other"
        return f"names {weights.now.name!r}, not version {weights.required}"

    def known_orphans(self, now: float, *, running: int) -> int:
        """Return how many of the ``running`` requests that no call waits for were counted as orphans already."""
        self._forget_orphans(now)
        while len(self.orphans) > running:
            self.orphans.popleft()
        return len(self.orphans)

    def note_orphans(self, now: float, count: int) -> None:
        """Note that so many orphans were counted, and forget the old ones: a server that never says what it runs has no end of them."""
        self._forget_orphans(now)
        self.orphans.extend([now] * count)

    def _forget_orphans(self, now: float) -> None:
        while self.orphans and self.orphans[0] + _ORPHAN_LIFE_S <= now:
            self.orphans.popleft()

    def close(self) -> None:
        """Leave the server: close all idle connections, and those in use when they are given back."""
        self.tell(Told(Event.LEFT))
        self.owed.changed.notify()
        for pool in self.pools:
            pool.close()


def new_server(address: Address, settings: ServerSettings, connect: Connector, roster: Roster | None = None) -> Server:
    """Return a server that has not been asked anything yet. It adds itself to the roster while it is usable."""

    def pool(max_idle: int, answer_limit: int = _CONTROL_ANSWER_BYTES) -> Pool:
        idle_s, connect_s = settings.idle, settings.connect
        return Pool(address, connect, max_idle=max_idle, idle_s=idle_s, connect_s=connect_s, answer_limit=answer_limit)

    headers = () if settings.api_key is None else (("authorization", f"Bearer {settings.api_key}"),)
    control = pool(_CONTROL_IDLE)
    server = Server(
        address=address,
        work=pool(settings.max_idle, BODY_LIMIT),
        aborts=pool(_RESERVED),
        control=control,
        client=httpx.AsyncClient(
            transport=PoolTransport(control),
            base_url=f"{'https' if address.tls else 'http'}://{address.host_header}{address.prefix}",
            headers=dict(headers),
            timeout=None,  # noqa: S113  the caller's scope bounds every call
            trust_env=False,
        ),
        generate_head=post_head(address, GENERATE, headers=headers),
        abort_head=post_head(address, ABORT, headers=headers),
        roster=roster or Roster(),
    )
    server.roster.servers.append(server)
    return server
