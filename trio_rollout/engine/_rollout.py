"""The rollout handle, through which a generate function reaches everything outside; and the stock generate function."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn, final

import attrs

from .._core.checks import instance
from .._core.enums import Status
from .._core.events import TurnFinished
from .._core.sampling import SamplingParams
from .._core.segments import no_room, segments_of, status_of
from .._core.values import Prompt, Trajectory, Turn
from ..abc import ModelInput, OnTokens, Rollout, Session
from ..errors import ContextFull, GenerateError
from ._attempt import SampleTry
from ._context import RolloutContext
from ._gate import Clock, ignore_progress
from ._replay import Replay
from ._turn import sample_turn

if TYPE_CHECKING:
    from ..tools import RolloutTools

_NOTHING: Mapping[str, object] = MappingProxyType({})


@final
@attrs.define(eq=False, repr=False)
class RolloutHandle:
    """One execution of one prompt, as its generate function sees it (``trio_rollout.abc.Rollout``)."""

    this_try: SampleTry
    _context: RolloutContext
    _prompt: Prompt
    progress: Clock | None = attrs.field(default=None, init=False)
    """Idle timer, reset by every token; None if ``no_progress`` is not set."""
    opened_tools: "RolloutTools | None" = attrs.field(default=None, init=False)
    """The rollout's tools, once it has asked for them: most rollouts run no command, and pay for none."""
    replay: Replay | None = attrs.field(default=None, init=False)
    """The recorded turns of the sample; None if turns are not recorded."""
    _turns: int = attrs.field(default=0, init=False)
    is_over: bool = attrs.field(default=False, init=False)
    """The generate function has returned: through a handle that was kept nothing can be started, as nothing would end it."""

    @property
    def attempt(self) -> int:
        """Number of this try at the sample, from 1."""
        return self.this_try.number

    @property
    def index(self) -> int:
        """The sample's place in its group, from 0."""
        return self.this_try.index

    @property
    def deadline(self) -> float:
        """When it must be over, on ``trio.current_time()``'s clock; infinite if there is no limit."""
        return self.this_try.deadline

    @property
    def weight_version(self) -> int:
        """The engine's newest weight version."""
        return self._context.gate.version

    @property
    def new_tokens(self) -> int:
        """Number of tokens that this try has sampled so far."""
        return self.this_try.new_tokens

    def note_tokens(self, count: int) -> None:
        """Count tokens that were sampled past ``generate``; see ``trio_rollout.abc.Rollout.note_tokens``."""
        self.this_try.note_tokens(count)

    @property
    def replaying(self) -> bool:
        """True while there are recorded turns that ``generate`` has not given back."""
        return self.replay is not None and self.replay.is_replaying

    @property
    def tools(self) -> "RolloutTools":
        """The commands and sandboxes of this rollout: everything started with them dies when the generate function is over."""
        if self.is_over:
            self._refuse("tools")
        if self.opened_tools is None:
            self.opened_tools = self._context.new_tools(
                deadline=self.deadline, on_output=ignore_progress if self.progress is None else self.progress.reset
            )
        return self.opened_tools

    @property
    def input(self) -> ModelInput:
        """The prompt as the servers take it."""
        return self._context.servers.encode(self._prompt)

    async def generate(
        self,
        input_ids: ModelInput,
        sampling: SamplingParams | None = None,
        *,
        extra: Mapping[str, object] = _NOTHING,
        on_tokens: OnTokens | None = None,
    ) -> Turn:
        """Sample one turn; see ``trio_rollout.abc.Rollout.generate``.

        Blocks for the gate, then until the answer is there, at most ``Deadlines.turn``. Cancelled, the request is aborted
        on its server before Cancelled goes on.

        If earlier turns have filled the context, nothing is sent: the turn has no tokens and its stop is LENGTH.

        Raises:
          RequestRejected: no server will take this request; ContextFull if the prompt alone fills the context.
          ServerError: the server answered with an error or with no answer. Both can be caught; uncaught they end the
            try. An interrupted turn raises nothing: the try is cancelled.
        """
        if self.is_over:
            self._refuse("generate")
        chosen = sampling or self._default_sampling()
        fields = {**self._prompt.extra, **extra} if extra else self._prompt.extra
        if self.replay is None:
            turn = await self._sampled(input_ids, chosen, fields, on_tokens)
        else:
            turn = await self.replay.turn(self._sampled, input_ids, chosen, fields, on_tokens)
            if self.progress is not None:
                self.progress.reset()
        self._turns += 1
        return turn

    async def _sampled(
        self, input_ids: ModelInput, sampling: SamplingParams, extra: Mapping[str, object], on_tokens: OnTokens | None
    ) -> Turn:
        this = self.this_try
        try:
            turn = await sample_turn(
                this,
                self._context,
                input_ids,
                sampling,
                affinity=f"{this.attempt.id}#{this.number}.{this.index}",
                extra=extra,
                progress=self.progress,
                on_tokens=on_tokens,
            )
        except ContextFull:
            if not self._turns:
                raise  # the prompt itself: bad input
            return no_room(input_ids, self.weight_version)  # the policy's own doing, and worth training on
        if self._context.instruments.working:
            self._tell_of(turn)
        return turn

    def _tell_of(self, turn: Turn) -> None:
        this = self.this_try
        self._context.instruments.emit(
            TurnFinished(id=this.id, attempt=this.attempt.number, index=self.index, turn=turn)
        )

    def session(self, *, sampling: SamplingParams | None = None) -> AbstractAsyncContextManager[Session]:
        """Open a session for an agent that speaks OpenAI or Anthropic over HTTP; see ``trio_rollout.gateway``.

        Raises:
          GenerateError: the engine was opened without a gateway.
        """
        if self.is_over:
            self._refuse("session")
        if self._context.gateway is None:
            raise GenerateError("rollout.session() needs a gateway: open_rollout_engine(..., gateway=...)")
        return self._context.gateway.open_session(
            self, prompt=self._prompt, sampling=sampling or self._default_sampling()
        )

    def _refuse(self, what: str) -> NoReturn:
        raise GenerateError(
            f"rollout.{what}: group {self.this_try.id}, attempt {self.attempt}, rollout {self.index} is over, its generate "
            "function has returned"
        )

    def _default_sampling(self) -> SamplingParams:
        return self._prompt.sampling or _default_sampling(self._context.generate)

    def finish(self, turns: Sequence[Turn], *, status: Status | None = None) -> Trajectory:
        """The trajectory of these turns.

        Raises:
          GenerateError: there are no turns.
        """
        if not turns:
            raise GenerateError(f"group {self.this_try.id}, rollout {self.index}: finish() needs at least one turn")
        return Trajectory(
            prompt=self._prompt,
            index=self.this_try.index,
            segments=segments_of([turn for turn in turns if len(turn.output_ids)] or turns),
            status=status or status_of(turns[-1].stop),
            stop=turns[-1].stop,
            turns=len(turns),
            metadata=self._prompt.metadata,
        )


def _default_sampling(generate: object) -> SamplingParams:
    sampling = getattr(generate, "sampling", None)
    return sampling if isinstance(sampling, SamplingParams) else SamplingParams()


@final
@attrs.frozen
class SingleTurn:
    """The stock generate function: one turn per rollout, sampled as ``sampling`` says."""

    sampling: SamplingParams = attrs.field(factory=SamplingParams, validator=instance(SamplingParams))

    async def __call__(self, prompt: Prompt, rollout: Rollout, /) -> Trajectory:
        """Sample one answer to the prompt."""
        del prompt  # the rollout knows it, encoded as the servers take it
        return rollout.finish([await rollout.generate(rollout.input)])
