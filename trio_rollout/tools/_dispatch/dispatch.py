"""Tool dispatch: one call from the model's request to its one result.

Stages: readiness → gate → admission → lookup → start listeners → pre-hook → handler → post-hook → claim and finish listeners.
They run inline under a scope that the turn cancels. Whether the outcome is the dispatch's or "aborted" is decided by who
claims it first, never by whether a cancellation was asked for:

Invariant 1: each call that passes lookup, or is aborted before it, has exactly one outcome and one finish event.
Invariant 2: between claiming the outcome and leaving with the result nothing can be cancelled.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, final

import attrs
import trio

from ..._util.exception_groups import bare_errors, errors_of
from ..._util.read_write_lock import ReadWriteLock
from .tool import (
    Block,
    Continue,
    FatalToolError,
    Feedback,
    Hooks,
    Invocation,
    LifecycleEvent,
    LifecycleListener,
    RespondToModel,
    Rewrite,
    Tool,
    ToolRegistry,
    as_registry,
)
from .turn import TurnCancellation
from .values import (
    Aborted,
    AbortedOutput,
    Blocked,
    CallTiming,
    Completed,
    Failed,
    FeedbackOutput,
    FunctionOutput,
    Outcome,
    Source,
    ToolCall,
    ToolOutput,
    ToolResult,
    abort_text,
)

_log = logging.getLogger("trio_rollout.tools")


def _in_order(listeners: Iterable[LifecycleListener]) -> tuple[LifecycleListener, ...]:
    return tuple(listeners)


OnTiming: TypeAlias = Callable[[ToolCall, CallTiming], None]


@final
@attrs.define(eq=False)
class _Call:
    """One call under way."""

    call: ToolCall
    turn: TurnCancellation
    source: Source
    began: float
    admitted: float | None = None
    outcome: Outcome | None = None
    started: bool = False
    handler_executed: bool = False
    handled: ToolOutput | None = None

    def owes_an_end(self, error: BaseException) -> bool:
        """Whether listeners wait for an end: of what they saw start, or of a call that was cancelled before."""
        return self.outcome is None and (self.started or errors_of(error) is None)

    def failure(self) -> Outcome:
        """The outcome of an error at this point. It describes the handler: what comes after can't undo its end."""
        if self.handled is not None:
            return Completed(success=self.handled.success_for_logging)
        return Failed(handler_executed=self.handler_executed)

    def claim(self, outcome: Outcome) -> None:
        """Take the outcome. From here on nothing can be cancelled (invariant 2), so nobody else comes to take one."""
        if self.outcome is not None:
            raise AssertionError(f"call {self.call.call_id}: {self.outcome} and {outcome} were both claimed")
        self.outcome = outcome

    def timing(self) -> CallTiming:
        """The times up to now, from one snapshot of the admission."""
        now = trio.current_time()
        started = self.admitted is not None
        admitted = now if self.admitted is None else self.admitted
        return CallTiming(
            execution_started=started,
            dispatch=admitted - self.began,
            handler=now - admitted,
            total=now - self.began,
        )


@final
@attrs.define(eq=False, repr=False)
class ToolRuntime:
    """Runs the tool calls of one sampling step.

    ``teardown_timeout`` bounds listeners once an outcome is claimed; a handler that shields its cleanup for longer can't
    be stopped and is logged. ``on_timing`` is told of each direct call exactly once, aborted and failed ones too.
    """

    _registry: ToolRegistry = attrs.field(converter=as_registry)
    _listeners: tuple[LifecycleListener, ...] = attrs.field(
        default=(), converter=_in_order, kw_only=True, alias="listeners"
    )
    _hooks: Hooks | None = attrs.field(default=None, kw_only=True, alias="hooks")
    _teardown_timeout: float = attrs.field(default=5.0, kw_only=True, alias="teardown_timeout")
    _on_timing: OnTiming | None = attrs.field(default=None, kw_only=True, alias="on_timing")
    _gate: ReadWriteLock = attrs.field(factory=ReadWriteLock, init=False)

    async def call(self, call: ToolCall, *, turn: TurnCancellation, source: Source = Source.DIRECT) -> ToolResult:
        """Run one call to its one result.

        Blocks for the tool's readiness, the gate and the handler. When ``turn`` is cancelled before the outcome is
        claimed, the handler is cancelled and the result is an ``AbortedOutput``; later, it is the handler's. Cancelled
        from outside, listeners are told Aborted and Cancelled goes on.

        Raises:
          FatalToolError: the payload is not of the tool's kind.
          ToolError, Exception: what the handler or a hook raised, RespondToModel excepted.

        """
        state = _Call(call, turn, source, trio.current_time())
        try:
            output = await self._run(state)
        except (trio.Cancelled, BaseExceptionGroup) as error:  # a group: cancelled, and failed while it was
            if state.owes_an_end(error):
                ending = Aborted() if errors_of(error) is None else state.failure()
                await self._settle(state, ending)  # noqa: ASYNC102  it shields and bounds itself
            raise
        finally:
            timing = state.timing()
            self._tell_timing(state, timing)
        lost = state.handled if isinstance(output, AbortedOutput) else None
        return ToolResult(call_id=call.call_id, output=output, outcome=state.outcome, timing=timing, lost=lost)

    async def call_all(self, calls: Sequence[ToolCall], *, turn: TurnCancellation) -> tuple[ToolResult, ...]:
        """Run a turn's calls side by side, as far as the gate allows; one result each, in their order.

        Raises:
          ValueError: two calls have the same id.
          FatalToolError, ToolError, Exception: as ``call``; the other calls are cancelled.

        """
        ids = [call.call_id for call in calls]
        if len(set(ids)) != len(ids):
            raise ValueError(f"call ids must differ, each gets one result; got {ids}")
        results: dict[str, ToolResult] = {}

        async def one(call: ToolCall) -> None:
            results[call.call_id] = await self.call(call, turn=turn)

        with bare_errors():
            async with trio.open_nursery() as nursery:
                for call in calls:
                    nursery.start_soon(one, call)
        return tuple(results[call_id] for call_id in ids)

    async def _run(self, state: _Call) -> ToolOutput:
        output: ToolOutput | None = None
        with trio.CancelScope() as scope, state.turn.link(scope):
            output = await self._dispatch(state)
        if output is not None:
            return output
        await self._settle(state, Aborted())
        now = trio.current_time()
        if now - (state.turn.cancelled_at or now) > self._teardown_timeout:
            _log.warning("tool %s took %.1f s to stop after its turn was cancelled", state.call.name, now - state.began)
        return AbortedOutput(text=abort_text(state.call.name, now - state.began))

    async def _dispatch(self, state: _Call) -> ToolOutput:
        tool = self._registry.find(state.call.name)
        if tool is not None:
            await tool.wait_until_ready()
        shared = tool is not None and tool.supports_parallel
        async with self._gate.reading() if shared else self._gate.writing():
            state.admitted = trio.current_time()
            if tool is None:
                return FunctionOutput(text=f"unsupported call: {state.call.name}", success=False)
            if not tool.accepts(state.call.payload):
                raise FatalToolError(f"tool {state.call.name} invoked with incompatible payload")
            await self._tell_start(state)
            try:
                output, outcome = await self._handle(tool, state)
            except RespondToModel as error:
                output, outcome = FunctionOutput(text=str(error), success=False), state.failure()
            except Exception:
                await self._settle(state, state.failure())  # noqa: ASYNC120  it can't be cancelled
                raise
            await self._settle(state, outcome)
            return output

    async def _handle(self, tool: Tool, state: _Call) -> tuple[ToolOutput, Outcome]:
        """Hooks and handler: what the model reads, and the outcome."""
        invocation = Invocation(call=state.call, payload=state.call.payload, turn=state.turn, source=state.source)
        checked = await self._check_before(tool, invocation)
        if isinstance(checked, Block):
            text = checked.reason or "PreToolUse hook blocked the tool call"
            return FunctionOutput(text=text, success=False), Blocked()
        state.handler_executed = True
        with bare_errors():
            output = state.handled = await tool.handle(checked)
        shown = await self._check_after(tool, checked, output)
        return shown, Completed(success=output.success_for_logging)

    async def _check_before(self, tool: Tool, invocation: Invocation) -> Invocation | Block:
        shown = None if self._hooks is None else tool.pre_hook_payload(invocation)
        if self._hooks is None or shown is None:
            return invocation  # noqa: ASYNC910  the handler that follows is what checkpoints
        match await self._hooks.pre_tool_use(invocation, shown):
            case Block() as block:
                return block
            case Rewrite(payload):
                return attrs.evolve(invocation, payload=tool.with_updated_input(invocation.payload, payload))
            case Continue():
                return invocation

    async def _check_after(self, tool: Tool, invocation: Invocation, output: ToolOutput) -> ToolOutput:
        payload = tool.post_hook_payload(output) if output.success_for_logging else None
        if self._hooks is None or payload is None:
            return output  # noqa: ASYNC910  nothing may cancel between a handler's end and the claim
        match await self._hooks.post_tool_use(invocation, payload, output):
            case Block(reason):
                return FunctionOutput(text=reason or "PostToolUse hook blocked the tool result", success=False)
            case Feedback(text):
                return FeedbackOutput(result=output, text=text)
            case Continue():
                return output

    async def _tell_start(self, state: _Call) -> None:
        await trio.lowlevel.checkpoint()
        state.started = True
        event = LifecycleEvent(call=state.call, source=state.source)
        for listener in self._listeners:
            try:
                await listener.on_tool_start(event)
            except Exception:  # ruff: ignore[blind-except]  a watcher's error must not change what it watches
                _log.exception("a listener failed at the start of tool %s", state.call.name)

    def _tell_timing(self, state: _Call, timing: CallTiming) -> None:
        if state.source is Source.DIRECT and self._on_timing is not None:
            try:
                self._on_timing(state.call, timing)
            except Exception:  # ruff: ignore[blind-except]  whoever measures must not lose what is measured
                _log.exception("on_timing failed for tool %s", state.call.name)

    async def _settle(self, state: _Call, outcome: Outcome) -> None:  # noqa: ASYNC910  as below
        """Claim the outcome and tell the listeners: shielded, bounded for each."""
        state.claim(outcome)
        event = LifecycleEvent(call=state.call, source=state.source)
        for listener in self._listeners:
            with trio.move_on_after(self._teardown_timeout, shield=True) as limit:  # noqa: ASYNC912  user code waits
                try:
                    await listener.on_tool_finish(event, outcome)
                except Exception:  # ruff: ignore[blind-except]  the outcome stands whatever its watchers do
                    _log.exception("a listener failed at the end of tool %s", state.call.name)
            if limit.cancelled_caught:
                _log.warning("a listener took more than %.1f s at the end of a tool", self._teardown_timeout)
