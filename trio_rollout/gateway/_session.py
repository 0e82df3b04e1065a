"""One agent's session: its turns, each a child of the session's nursery, and the trajectory at its end.

Closing goes in this order: new requests are refused; running turns may finish and be delivered within the drain time; the
rest is cancelled, which aborts its requests on the servers; undelivered answers are dropped; then there is a trajectory.

An agent sends its whole conversation with every turn, so anything that keeps requests or prompts grows with the square of
the turns. A session keeps each token once, in the token tree; the messages of a turn go with the turn's end. A request
that is sent again is recognised by its digest. Only answers of the Responses API, which a later request may continue by
id, keep their messages: docs/decisions/0023-what-a-session-keeps.md.

``SessionDirectory`` finds the sessions of one gateway. A closed session leaves a tombstone, its id and its key, so that the
agent's late requests are told "session closed" and not "no such session".
"""

from collections import OrderedDict
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Final, TypeVar, final

import attrs
import trio

from .._core.enums import Status, Stop
from .._core.segments import status_of
from .._core.token_tree import Drift
from .._core.values import Prompt, Trajectory
from .._util.condition import Condition
from .._util.user_code import ends_the_process
from ..abc import Rollout
from ..errors import GenerateError, RequestRejected, ServerError, SessionClosed
from ._protocol import RETRY, Refusal
from ._sampling import Sampler, message_of
from ._settings import GatewaySettings
from ._turn import AgentTurn, TurnIds
from ._values import ChatRequest, Message

K = TypeVar("K")
V = TypeVar("V")

# A client sends a request again within seconds; this many answers can be given a second time.
_MOST_RESENDABLE: Final = 64
# This many answers can be continued by id; each keeps its whole conversation.
_MOST_RESPONSES: Final = 256


@attrs.frozen(kw_only=True)
class SessionStatistics:
    """Counts of one session."""

    turns: int
    """Turns that were started."""
    running: int
    """Turns that wait for their place, are sampled or are delivered."""
    waiting: int
    """Turns that wait because ``max_concurrent_turns`` are sampled."""
    resends: int
    """Requests that were answered with a turn that had been started before."""
    undelivered: int
    """Answers that no client got; they are not recorded."""
    drift: dict[Drift, int]
    """Turns by how their prompt follows from what was recorded."""
    branches: int
    """Branches of the conversation: the training rows."""


@final
@attrs.define(eq=False, repr=False, kw_only=True)
class GatewaySession:
    """A session as ``rollout.session()`` gives it. Made by the gateway."""

    id: str
    base_url: str
    api_key: str = attrs.field(repr=False)
    _rollout: Rollout = attrs.field(alias="rollout")
    _prompt: Prompt = attrs.field(alias="prompt")
    _sampler: Sampler = attrs.field(alias="sampler")
    _settings: GatewaySettings = attrs.field(alias="settings")
    _nursery: trio.Nursery = attrs.field(alias="nursery")
    _ids: TurnIds = attrs.field(alias="ids")
    is_closing: bool = attrs.field(default=False, init=False)
    """True if the session takes no more turns."""
    _closed: trio.Event = attrs.field(factory=trio.Event, init=False)
    _started: int = attrs.field(default=0, init=False)
    _abandoned: int = attrs.field(default=0, init=False)
    _resends: int = attrs.field(default=0, init=False)
    _undelivered: int = attrs.field(default=0, init=False)
    _failure: BaseException | None = attrs.field(default=None, init=False)
    _last_stop: Stop | None = attrs.field(default=None, init=False)
    _running: dict[AgentTurn, None] = attrs.field(factory=dict, init=False)
    _recorded: dict[str, AgentTurn] = attrs.field(factory=dict, init=False)
    _turns_by_digest: OrderedDict[tuple[str, str], AgentTurn] = attrs.field(factory=OrderedDict, init=False)
    _responses_by_id: OrderedDict[str, tuple[Message, ...]] = attrs.field(factory=OrderedDict, init=False)
    _changed: Condition = attrs.field(factory=Condition, init=False)
    _places: trio.CapacityLimiter = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._places = trio.CapacityLimiter(self._settings.max_concurrent_turns)

    def __repr__(self) -> str:
        state = "closed" if self._closed.is_set() else "closing" if self.is_closing else "open"
        return f"<Session {self.id[:8]}… {state}, {self._started} turns, {len(self._running)} running>"

    def statistics(self) -> SessionStatistics:
        """Return the current counts."""
        return SessionStatistics(
            turns=self._started,
            running=len(self._running),
            waiting=self._places.statistics().tasks_waiting,
            resends=self._resends,
            undelivered=self._undelivered,
            drift=dict(self._sampler.drift),
            branches=len(self._sampler.conversation.tree.leaves()),
        )

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens in the prompt of this request.

        Raises:
          RequestRejected: the chat template refuses these messages.
        """
        return len((await self._sampler.place(request)).prompt_ids)

    @contextmanager
    def turn_for(self, request: ChatRequest) -> Generator[AgentTurn]:
        """Start the turn that this request asks for, or join it if the request was sent before; wait for it inside.

        Raises:
          SessionClosed: the session takes no more turns.
          Refusal: a limit of the session is reached.
        """
        turn = self._resent(request) or self._start(self._with_history(request))
        with turn.joined():
            yield turn

    def _resent(self, request: ChatRequest) -> AgentTurn | None:
        """Return the turn that this request asks for a second time.

        Either both have the same idempotency key, or the answer was lost on its way and no living request waits for it.
        Any other identical request is another sample: an agent may ask for several, and a try of one request after a
        refusal must not get the answer of another.
        """
        if self.is_closing:
            raise SessionClosed("session closed")
        turn = self._turns_by_digest.get((request.digest, request.key))
        if turn is None or turn.error is not None or turn.scope.cancel_called:
            return None
        if not (request.key or turn.is_undelivered):
            return None
        self._resends += 1
        return turn

    def _with_history(self, request: ChatRequest) -> ChatRequest:
        """Return the request with the messages of the response that it continues by id."""
        if not request.previous:
            return request
        before, place = self._responses_by_id.get(request.previous), request.instructions
        if before is None:
            known = f"this session has no such response among its last {_MOST_RESPONSES}"
            raise Refusal(400, f"previous_response_id: {known}")
        self._responses_by_id.move_to_end(request.previous)
        return attrs.evolve(request, messages=(*request.messages[:place], *before, *request.messages[place:]))

    @property
    def image(self) -> str | None:
        """The chat template's text in the place of an image; None if the policy sees none."""
        return self._sampler.image

    def answer_of(self, turn: str) -> Message | None:
        """Return the answer of a turn that later requests may continue by its id; None if there is none among the last."""
        found = self._responses_by_id.get(turn)
        return None if found is None else found[-1]

    def _start(self, request: ChatRequest) -> AgentTurn:
        settings = self._settings
        most, at_once, waiting = settings.max_turns, settings.max_concurrent_turns, settings.max_waiting_turns
        if most is not None and self._started - self._abandoned >= most:
            raise Refusal(429, f"turns of this session: the limit is {most}")
        if len(self._running) >= at_once + waiting:
            limits = f"the limit is {at_once}, and {waiting} more may wait"
            raise Refusal(429, f"turns of this session at once: {limits}", RETRY)
        turn = AgentTurn(id=self._ids.next(request), request=request, streaming=self._sampler.streaming_text(request))
        self._started += 1
        self._running[turn] = None
        _keep(self._turns_by_digest, (request.digest, request.key), turn, most=_MOST_RESENDABLE)
        if request.stream and turn.streaming.finds_thoughts:
            self._nursery.start_soon(self._sampler.classify_stream, turn)
        self._nursery.start_soon(self._run, turn, name=f"session {self.id[:8]} turn {self._started}")
        return turn

    async def _run(self, turn: AgentTurn) -> None:
        try:
            with turn.scope:
                await self._answer(turn)
                await turn.wait_left()
        finally:
            self._abandoned += not turn.is_over
            turn.end(None, SessionClosed("session closed"))
            del self._running[turn]
            self._changed.notify()

    async def _answer(self, turn: AgentTurn) -> None:
        request = turn.request
        try:
            async with self._place():
                answer, stop = await self._sampler.sample(turn, self._rollout)
        except (Refusal, RequestRejected) as error:
            turn.end(None, error)
        except BaseException as error:  # noqa: ASYNC103  the boundary: the agent is told now, the rollout at its end
            if ends_the_process(error):
                raise
            self._failure = error
            turn.end(None, error)
        else:
            self._failure, self._last_stop = None, stop
            if turn.node is not None:
                self._recorded[turn.id] = turn
            if request.store:
                messages = (*request.messages[request.instructions :], message_of(answer))
                _keep(self._responses_by_id, turn.id, messages, most=_MOST_RESPONSES)
            turn.end(answer, None)

    @asynccontextmanager
    async def _place(self) -> AsyncGenerator[None]:
        """Hold one of the session's places for turns that are sampled; wait for one in the order of the requests.

        Raises:
          Refusal: no place became free within ``wait_seconds``.
        """
        seconds, at_once = self._settings.wait_seconds, self._settings.max_concurrent_turns
        with trio.move_on_after(seconds) as limit:
            await self._places.acquire()
        if limit.cancelled_caught:
            raise Refusal(429, f"turns of this session at once: {at_once} were sampled for {seconds} s", RETRY)
        try:
            yield
        finally:
            self._places.release()

    async def close(self) -> None:
        """Refuse new requests, let running turns finish within ``GatewaySettings.drain``, and cancel the rest.

        Blocks until every turn has ended and its abort was sent. A second call waits for the end of the first. Cancelled,
        the drain ends at once; the rest still happens, within the abort budget.
        """
        await self._close(self._settings.drain)

    async def close_now(self) -> None:
        """Close without a drain, as ``close`` does when it is cancelled."""
        await self._close(0.0)

    async def _close(self, grace: float) -> None:
        if self.is_closing:
            await self._closed.wait()
            return
        self.is_closing = True
        try:
            with trio.move_on_after(grace):
                await self._changed.wait_until(lambda: not self._running)
        finally:
            for turn in self._running:
                turn.scope.cancel(reason="the session was closed")
            # Bounded: each turn ends within the abort budget of its request. ruff and flake8-async can't know.
            with trio.CancelScope(shield=True):
                await self._changed.wait_until(lambda: not self._running)
            self._drop_undelivered()
            self._closed.set()

    def _drop_undelivered(self) -> None:
        """Remove undelivered answers from the record, unless a later turn continues them."""
        tree = self._sampler.conversation.tree
        for turn in reversed(self._recorded.values()):
            if not turn.delivered and turn.node is not None and not tree.is_continued(turn.node):
                self._sampler.conversation.forget(turn.node)
                self._undelivered += 1

    def trajectory(self, *, status: Status | None = None) -> Trajectory:
        """Return the session as training rows: one for each branch of its conversation, each answer trained once.

        ``status`` None follows from the last answer's stop reason.

        Raises:
          RuntimeError: the session is still open.
          ServerError: the servers failed the last turn, so the attempt has to be tried again.
          GenerateError: the agent got no answer with a token in it.
        """
        if not self._closed.is_set():
            raise RuntimeError("session.trajectory(): leave the session's block first")
        if self._failure is not None:
            raise ServerError(f"the agent's last turn failed: {self._failure}") from self._failure
        tree = self._sampler.conversation.tree
        if not len(tree):
            raise GenerateError(f"session {self.id[:8]}…: the agent got no answer with a token in it")
        stop = self._last_stop or Stop.STOP
        return Trajectory(
            prompt=self._prompt,
            index=self._rollout.index,
            segments=tree.segments(),
            status=status or status_of(stop),
            stop=stop,
            turns=len(tree),
            metadata=self._prompt.metadata,
        )


@final
@attrs.define(eq=False)
class SessionDirectory:
    """Finds sessions and their keys by id."""

    tombstones: "Tombstones"
    opened: int = attrs.field(default=0, init=False)
    """Sessions that were opened so far."""
    _open: dict[str, GatewaySession] = attrs.field(factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._open)

    def find(self, session: str) -> GatewaySession | None:
        """Return the open session with this id."""
        return self._open.get(session)

    def key_of(self, session: str) -> str | None:
        """Return the key of a session that is open or was closed lately."""
        found = self._open.get(session)
        return self.tombstones.key_of(session, trio.current_time()) if found is None else found.api_key

    @contextmanager
    def listed(self, session: GatewaySession) -> Generator[None]:
        """List a session for the length of the block, and leave a tombstone."""
        self._open[session.id] = session
        self.opened += 1
        try:
            yield
        finally:
            del self._open[session.id]
            self.tombstones.add(session.id, session.api_key, trio.current_time())


@final
@attrs.define(eq=False)
class Tombstones:
    """Ids and keys of closed sessions, oldest first: at most ``most``, each for ``seconds``. Times are passed in."""

    most: int
    seconds: float
    _keys: OrderedDict[str, tuple[str, float]] = attrs.field(factory=OrderedDict, init=False)

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, session: str, key: str, now: float) -> None:
        """Remember a closed session; drop the oldest one if there are too many."""
        self._drop_expired(now)
        _keep(self._keys, session, (key, now + self.seconds), most=self.most)

    def key_of(self, session: str, now: float) -> str | None:
        """Return the key of a closed session that is still remembered."""
        self._drop_expired(now)
        found = self._keys.get(session)
        return None if found is None else found[0]

    def _drop_expired(self, now: float) -> None:
        while self._keys and next(iter(self._keys.values()))[1] <= now:
            self._keys.popitem(last=False)


def _keep(found: OrderedDict[K, V], key: K, value: V, *, most: int) -> None:
    """Add a value as the newest, and drop the oldest of more than ``most``."""
    found[key] = value
    found.move_to_end(key)
    while len(found) > most:
        found.popitem(last=False)
