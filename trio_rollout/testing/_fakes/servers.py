"""FakeServers: inference servers without I/O, for tests of generate functions, sources and trainers in virtual time.

They keep the contract of ``trio_rollout.abc.InferenceServers`` (pause modes, versions, spans, aborts that keep tokens), and
answer by a script and a clock. To test HTTP use FakeSGLang, to test with a real model the tiny server.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeAlias, final

import attrs
import numpy as np
import trio

from ..._core.arrays import id_array
from ..._core.enums import PauseMode, Stop
from ..._core.sampling import SamplingParams
from ..._core.settings import Deadlines
from ..._core.statistics import ServerCounts, ServerStatistics
from ..._core.values import Prompt, Turn, VersionSpan
from ..._util.condition import Condition
from ..._util.ports import Ports
from ...abc import ModelInput, OnTokens


@attrs.frozen
class Say:
    """Answer with these tokens (None: as many as asked for), evenly over so many seconds."""

    tokens: int | None = 4
    seconds: float = 1.0
    stop: Stop = Stop.STOP


@attrs.frozen
class Fail:
    """Raise this after so many seconds."""

    error: Exception
    seconds: float = 0.0


HANG = Say(seconds=math.inf)
"""Never answer."""

Behaviour: TypeAlias = Say | Fail
Plan: TypeAlias = Callable[[int, ModelInput], Behaviour]
"""A function of the call's number (from 0) and its input."""


@attrs.define(eq=False)
class _Call:
    number: int
    behaviour: Behaviour
    spans: list[VersionSpan]
    on_progress: Callable[[], None] | None
    on_tokens: OnTokens | None = None
    done: float = 0.0
    aborted: bool = False


@final
@attrs.define(eq=False, repr=False, kw_only=True)
class FakeServers:
    """One fake server. ``calls`` counts the calls so far, ``running`` those under way, ``sent`` keeps the inputs."""

    plan: Plan = lambda number, prompt: Say()  # noqa: ARG005  the plain default reads best where it is
    version: int | None = 0
    ports: Ports = attrs.field(factory=Ports)
    names_version: Callable[[int | None], int | None] = lambda version: version
    sent: list[ModelInput] = attrs.field(factory=list, init=False)
    aborts: int = attrs.field(default=0, init=False)
    paused: PauseMode | None = attrs.field(default=None, init=False)
    required: int | None = attrs.field(default=None, init=False)
    most_running: int = attrs.field(default=0, init=False)
    _running: dict[_Call, None] = attrs.field(factory=dict, init=False)
    _changed: Condition = attrs.field(factory=Condition, init=False)

    @property
    def calls(self) -> int:
        """The number of calls so far."""
        return len(self.sent)

    @property
    def running(self) -> int:
        """The number of calls under way."""
        return len(self._running)

    def under(self, deadlines: Deadlines) -> "FakeServers":
        """Return the same object: it needs no budgets."""
        del deadlines
        return self

    def encode(self, prompt: Prompt) -> ModelInput:
        """Return the prompt's ids, or its text."""
        return prompt.input_ids if prompt.input_ids is not None else str(prompt.text or prompt.messages)

    def set_version(self, version: int | None) -> None:
        """Set the version of the weights; running calls go on under it."""
        self.version = version

    def abort_all(self) -> None:
        """Abort every running call, as another client of the server could."""
        for call in self._running:
            call.aborted = True
        self._changed.notify()

    async def generate(
        self,
        input_ids: ModelInput,
        sampling: SamplingParams,
        *,
        affinity: str | None = None,
        extra: Mapping[str, object] | None = None,
        on_progress: Callable[[], None] | None = None,
        on_tokens: OnTokens | None = None,
        while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Turn:
        """Behave as the plan's entry for this call."""
        del affinity, extra
        with while_waiting():
            await self._changed.wait_until(lambda: self.paused is None)
        call = _Call(self.calls, self.plan(self.calls, input_ids), [], on_progress, on_tokens)
        self.sent.append(input_ids)
        self._running[call] = None
        self.most_running = max(self.most_running, len(self._running))
        try:
            if isinstance(call.behaviour, Fail):
                await self._run(call, call.behaviour.seconds, 1)
                if not call.aborted:
                    raise call.behaviour.error
                return self._turn(call, input_ids, 0, Stop.ABORT)
            return await self._say(call, call.behaviour, input_ids, sampling)
        except trio.Cancelled:
            self.aborts += 1
            raise
        finally:
            del self._running[call]
            self._changed.notify()

    async def _say(self, call: _Call, say: Say, input_ids: ModelInput, sampling: SamplingParams) -> Turn:
        wanted = sampling.max_new_tokens if say.tokens is None else min(say.tokens, sampling.max_new_tokens)
        await self._run(call, say.seconds, max(wanted, 1))
        if not call.aborted:
            return self._turn(call, input_ids, wanted, say.stop)
        tokens = 0 if math.isinf(say.seconds) or not say.seconds else int(wanted * min(1.0, call.done / say.seconds))
        return self._turn(call, input_ids, tokens, Stop.ABORT)

    async def _run(self, call: _Call, seconds: float, tokens: int) -> None:
        """Run the call's clock to ``seconds``; the clock stands still while the server is paused."""
        unwatched = call.on_progress is None and call.on_tokens is None
        while call.done < seconds and not call.aborted:
            if self.paused is not None:
                await self._changed.wait_until(lambda: self.paused is None or call.aborted)
                continue
            version, began = self.version or 0, trio.current_time()
            slice_s = seconds - call.done if unwatched else min(seconds - call.done, seconds / tokens)
            with trio.move_on_after(slice_s) as rest:
                await self._changed.wait_until(partial(self._disturbed, call, version))
            last = rest.cancelled_caught and slice_s == seconds - call.done
            call.done = seconds if last else call.done + trio.current_time() - began
            self._note_span(call, version, seconds, tokens)
            if rest.cancelled_caught:
                self._tell(call, 0 if isinstance(call.behaviour, Fail) else tokens)

    @staticmethod
    def _tell(call: _Call, tokens: int) -> None:
        if call.on_progress is not None:
            call.on_progress()
        if call.on_tokens is not None and tokens:
            reached = call.spans[-1].stop if call.spans else 0
            call.on_tokens(range(100, 100 + min(tokens, reached)))

    def _disturbed(self, call: _Call, version: int) -> bool:
        return call.aborted or self.paused is not None or (self.version or 0) != version

    def _note_span(self, call: _Call, version: int, seconds: float, tokens: int) -> None:
        reached = tokens if seconds <= 0 else int(tokens * min(1.0, call.done / seconds))
        start = call.spans[-1].stop if call.spans else 0
        if reached > start:
            call.spans.append(VersionSpan(start, reached, version))

    def _turn(self, call: _Call, input_ids: ModelInput, tokens: int, stop: Stop) -> Turn:
        spans = [VersionSpan(start, min(end, tokens), version) for start, end, version in call.spans if start < tokens]
        if tokens and not spans:
            spans = [VersionSpan(0, tokens, self.version or 0)]
        return Turn(
            rid=self.ports.new_rid(),
            prompt_ids=id_array(list(input_ids.encode()) if isinstance(input_ids, str) else input_ids),
            output_ids=np.arange(tokens, dtype=np.int32) + 100,
            log_probs=np.full(tokens, -0.5, np.float32),
            text=f"answer {call.number}",
            stop=stop,
            weight_version=spans[-1].version if spans else self.version or 0,
            versions=spans,
        )

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling; ABORT ends the running calls."""
        await trio.lowlevel.checkpoint()
        self.paused = mode
        if mode is PauseMode.ABORT:
            self.abort_all()
        self._changed.notify()

    async def resume(self) -> None:
        """Resume sampling."""
        await trio.lowlevel.checkpoint()
        self.paused = None
        self._changed.notify()

    async def versions(self) -> Mapping[str, int | None]:
        """Return the server's version, as ``names_version`` names it."""
        await trio.lowlevel.checkpoint()
        return {"fake": self.names_version(self.version)}

    def require_version(self, version: int, *, named_by: Collection[str] = ()) -> None:
        """Note the required version."""
        del named_by
        self.required = version

    async def blocked_reason_after(self, known: str | None) -> str | None:
        """Wait for ever: only a pause keeps requests from this server."""
        del known
        await trio.sleep_forever()

    async def flush_cache(self) -> None:
        """Do nothing: there is no cache."""
        await trio.lowlevel.checkpoint()

    async def abort_until_idle(self) -> None:
        """Abort every call and wait until none runs."""
        self.abort_all()
        await self._changed.wait_until(lambda: not self._running)

    async def health(self) -> Mapping[str, bool]:
        """Return ready, unless paused."""
        await trio.lowlevel.checkpoint()
        return {"fake": self.paused is None}

    def statistics(self) -> ServerStatistics:
        """Return the counts of this moment."""
        server = ServerCounts(
            url="fake",
            usable=True,
            paused=self.paused is not None,
            version=self.version,
            in_flight=len(self._running),
            requests=self.calls,
        )
        return ServerStatistics(servers=(server,), connections=0, owed_aborts=0, orphans=0, late=0)


def prompts(count: int, *, prefix: str = "p") -> Sequence[Prompt]:
    """Return this many different prompts."""
    return [Prompt(id=f"{prefix}{number}", input_ids=[1, 2, number + 3], label=str(number)) for number in range(count)]
