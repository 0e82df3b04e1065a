"""One session: an agent's turns, each a child of the session's nursery, and what is left of them at the end.

Closing, in this order: newcomers are refused; running turns may finish and be delivered within the drain time; the rest is
cancelled, which aborts their requests; what nobody got is dropped; only then is there a trajectory.
"""

from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final, final

import attrs
import trio

from .._core.enums import Status, Stop
from .._core.segments import status_of
from .._core.token_tree import Drift
from .._core.values import Prompt, Trajectory
from .._util.condition import Condition
from ..abc import Rollout
from ..errors import GenerateError, RequestRejected, ServerError, SessionClosed
from ._conversation import Conversation
from ._protocol import Limit, Refusal
from ._sampling import Sampler, SessionTurn, message_of
from ._settings import GatewaySettings
from ._values import ChatRequest, Message

# A resend comes within seconds; this is how many answers can be given a second time.
_RESENDABLE: Final = 64
# How many answers can be named by a request that continues them; each keeps its whole conversation.
_NAMEABLE: Final = 256


@attrs.frozen(kw_only=True)
class SessionStatistics:
    """Counts of one session."""

    turns: int
    running: int
    resends: int
    """Requests that were answered with a turn that was there already."""
    undelivered: int
    """Answers that nobody got; they are not recorded."""
    drift: dict[Drift, int]
    branches: int


@final
@attrs.define(eq=False, repr=False, kw_only=True)
class GatewaySession:
    """What ``rollout.session()`` gives. Made by the gateway."""

    id: str
    base_url: str
    api_key: str = attrs.field(repr=False)
    _rollout: Rollout = attrs.field(alias="rollout")
    _prompt: Prompt = attrs.field(alias="prompt")
    _sampler: Sampler = attrs.field(alias="sampler")
    _settings: GatewaySettings = attrs.field(alias="settings")
    _nursery: trio.Nursery = attrs.field(alias="nursery")
    _new_id: Callable[[], str] = attrs.field(alias="new_id")
    _closing: bool = attrs.field(default=False, init=False)
    _closed: trio.Event = attrs.field(factory=trio.Event, init=False)
    _started: int = attrs.field(default=0, init=False)
    _left: int = attrs.field(default=0, init=False)
    _resends: int = attrs.field(default=0, init=False)
    _lost: int = attrs.field(default=0, init=False)
    _failure: Exception | None = attrs.field(default=None, init=False)
    _last_stop: Stop | None = attrs.field(default=None, init=False)
    _running: dict[SessionTurn, None] = attrs.field(factory=dict, init=False)
    _recorded: dict[str, SessionTurn] = attrs.field(factory=dict, init=False)
    _resendable: OrderedDict[str, SessionTurn] = attrs.field(factory=OrderedDict, init=False)
    _nameable: OrderedDict[str, tuple[Message, ...]] = attrs.field(factory=OrderedDict, init=False)
    _changed: Condition = attrs.field(factory=Condition, init=False)

    def __repr__(self) -> str:
        state = "closed" if self._closed.is_set() else "closing" if self._closing else "open"
        return f"<Session {self.id[:8]}… {state}, {self._started} turns, {len(self._running)} running>"

    @property
    def is_closing(self) -> bool:
        """Whether it takes no more turns."""
        return self._closing

    def statistics(self) -> SessionStatistics:
        """Counts of this moment."""
        return SessionStatistics(
            turns=self._started,
            running=len(self._running),
            resends=self._resends,
            undelivered=self._lost,
            drift=dict(self._sampler.drift),
            branches=len(self._conversation.tree.leaves()),
        )

    @property
    def _conversation(self) -> Conversation:
        return self._sampler.conversation

    async def count_tokens(self, request: ChatRequest) -> int:
        """How many tokens the prompt of this request would have.

        Raises:
          RequestRejected: the chat template refuses these messages.

        """
        return len((await self._sampler.place(request)).prompt_ids)

    @contextmanager
    def joined(self, request: ChatRequest) -> Generator[SessionTurn]:
        """Take part in the request's turn, which is started unless it is a resend of one that is there.

        Raises:
          SessionClosed: the session takes no more turns.
          Refusal: a limit of the session is reached.

        """
        turn = self._known(request) or self._start(self._whole(request))
        with turn.wanted():
            yield turn

    def _whole(self, request: ChatRequest) -> ChatRequest:
        """The request with the conversation that it only names."""
        if not request.previous:
            return request
        before, place = self._nameable.get(request.previous), request.instructions
        if before is None:
            raise Refusal(400, f"previous_response_id: this session has no such response among its last {_NAMEABLE}")
        self._nameable.move_to_end(request.previous)
        return attrs.evolve(request, messages=(*request.messages[:place], *before, *request.messages[place:]))

    def _known(self, request: ChatRequest) -> SessionTurn | None:
        """The turn that this is a resend of.

        A request that says so, or one whose answer was lost on the way. Anything else that looks the same is another
        sample: an agent may ask for several.
        """
        self._refuse_if_closing()
        turn = self._resendable.get(request.key)
        if turn is None or turn.error is not None or turn.scope.cancel_called:
            return None
        if not (request.again or turn.is_undelivered):
            return None
        self._resends += 1
        return turn

    def _refuse_if_closing(self) -> None:
        if self._closing:
            raise SessionClosed("session closed")

    def _start(self, request: ChatRequest) -> SessionTurn:
        most, at_once = self._settings.max_turns, self._settings.max_concurrent_turns
        if most is not None and self._started - self._left >= most:
            raise Limit("turns of this session", most, passing=False).refusal()
        if len(self._running) >= at_once:
            raise Limit("turns of this session at once", at_once, passing=True).refusal()
        turn = SessionTurn(id=self._new_id(), request=request, reveal=self._sampler.reveal(request))
        self._started += 1
        self._running[turn] = None
        self._resendable.pop(request.key, None)
        self._resendable[request.key] = turn
        while len(self._resendable) > _RESENDABLE:
            self._resendable.popitem(last=False)
        if request.stream and turn.reveal.thinks:
            self._nursery.start_soon(self._sampler.follow, turn)
        self._nursery.start_soon(self._run, turn, name=f"session {self.id[:8]} turn {self._started}")
        return turn

    async def _run(self, turn: SessionTurn) -> None:
        try:
            with turn.scope:
                await self._answer(turn)
                await turn.wait_left()
        finally:
            self._left += not turn.is_over
            turn.end(None, SessionClosed("session closed"))
            del self._running[turn]
            self._changed.notify()

    async def _answer(self, turn: SessionTurn) -> None:
        request = turn.request
        try:
            answer, stop = await self._sampler.sample(turn, self._rollout)
        except (Refusal, RequestRejected) as error:
            turn.end(None, error)
        except Exception as error:  # noqa: BLE001  the boundary: the agent is told, and the rollout at its end
            self._failure = error
            turn.end(None, error)
        else:
            self._failure, self._last_stop = None, stop
            if turn.node is not None:
                self._recorded[turn.id] = turn
            if request.nameable:
                self._nameable[turn.id] = (*request.messages[request.instructions :], message_of(answer))
                while len(self._nameable) > _NAMEABLE:
                    self._nameable.popitem(last=False)
            turn.end(answer, None)

    async def close(self) -> None:
        """Refuse newcomers, let running turns finish within ``GatewaySettings.drain``, cancel the rest.

        Blocks until every turn has ended and aborts were paid. Called again, it waits for the first call's end. Cancelled,
        nothing is drained any more; the rest happens all the same, within the abort budget.
        """
        if self._closing:
            await self._closed.wait()
            return
        await self._close(self._settings.drain)

    async def close_now(self) -> None:
        """Close without a drain: nobody will look at what is still running."""
        if self._closing:
            await self._closed.wait()
            return
        await self._close(0.0)

    async def _close(self, grace: float) -> None:
        self._closing = True
        try:
            with trio.move_on_after(grace):
                await self._changed.wait_until(lambda: not self._running)
        finally:
            for turn in self._running:
                turn.scope.cancel(reason="the session was closed")
            # Bounded: each turn ends within the abort budget of its request. ruff and flake8-async can't know.
            with trio.CancelScope(shield=True):
                await self._changed.wait_until(lambda: not self._running)
            self._drop_lost()
            self._closed.set()

    def _drop_lost(self) -> None:
        tree = self._conversation.tree
        for turn in reversed(self._recorded.values()):
            if not turn.delivered and turn.node is not None and not tree.is_continued(turn.node):
                self._conversation.forget(turn.node)
                self._lost += 1

    def trajectory(self, *, status: Status | None = None) -> Trajectory:
        """What the agent did, as training rows: one for each branch of its conversation, each answer trained once.

        ``status`` follows the last answer's stop unless given.

        Raises:
          RuntimeError: the session is still open.
          ServerError: the servers failed a turn and none was answered after that: the attempt is to be tried again.
          GenerateError: the agent got no answer with a token in it.

        """
        if not self._closed.is_set():
            raise RuntimeError("session.trajectory(): leave the session's block first")
        if self._failure is not None:
            raise ServerError(f"the agent's last turn failed: {self._failure}") from self._failure
        tree = self._conversation.tree
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
