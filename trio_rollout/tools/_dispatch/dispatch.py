"""Tool dispatch: one tool call, from the model's request to its one result.

Stages: readiness → gate → admission → lookup → start listeners → pre-hook → handler → post-hook → claim and finish listeners.

**Who wins.** A turn's cancellation may arrive at any of these stages, also at the instant at which the handler returns. Then two
answers are possible, the handler's and "aborted", and listeners must hear of exactly one. The decision is a *claim*: the
first outcome that is stored in ``_Call`` wins. A request for cancellation decides nothing by itself, so neither
``cancel_called`` nor ``cancelled_caught`` is read: the stages run inline under a scope that the turn cancels, and either a
value came out of the scope, or it did not.

    value      → the handler's outcome was claimed inside the scope; the value is the result, however late the cancellation
    no value   → the scope was cancelled before a claim; "aborted" is claimed, and the result is synthetic

Invariant 1: each call that passes the lookup, or is aborted before it, has exactly one outcome and one finish event.
Invariant 2: between the claim and the return nothing can be cancelled: listeners run in a shield, bounded for each. Else a
cancellation could strike after a listener has heard "completed", and there would be a second outcome. This is also why
``claim`` needs no lock and asserts instead.

**Timing.** The clock of a call has two parts. ``dispatch`` runs until the admission: readiness and gate, in which other tools are
waited for, so it says nothing about this tool. ``handler`` runs from then on, with lookup and hooks. A call that is never
admitted has only ``dispatch``. The admission is read once, so that the parts add up to ``total``. Each call reports its times
exactly once, in a ``finally``: also when it was aborted, raised, or was cancelled from outside.

A handler that shields its cleanup delays the abort; it can't be stopped, and is logged (``teardown_timeout``).
See docs/decisions/0009-each-command-has-a-keeper.md and docs/decisions/0038-tools-offer-what-rollouts-use.md.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, final

import attrs
import trio

from ..._util.exception_groups import bare_errors, errors_of
from ..._util.read_write_lock import ReadWriteLock
from ..._util.user_code import ends_the_process, logging_failures
from ...errors import ToolError
from .tool import (
    AbortedOutput,
    Block,
    CallTiming,
    Continue,
    Feedback,
    FeedbackOutput,
    FunctionOutput,
    Hooks,
    Invocation,
    LifecycleListener,
    RespondToModel,
    Rewrite,
    Tool,
    ToolCall,
    ToolName,
    ToolOutcome,
    ToolOutput,
    ToolResult,
    TurnCancellation,
    abort_text,
    outcome_of,
)

_log = logging.getLogger("trio_rollout.tools")

OnTiming: TypeAlias = Callable[[ToolCall, CallTiming], None]


def _by_name(tools: Iterable[Tool]) -> dict[ToolName, Tool]:
    tools = tuple(tools)
    named = {tool.name: tool for tool in tools}
    if len(named) != len(tools):
        raise ValueError(f"tools need different names, got {[str(tool.name) for tool in tools]}")
    return named


def _in_order(listeners: Iterable[LifecycleListener]) -> tuple[LifecycleListener, ...]:
    return tuple(listeners)


@final
@attrs.define(eq=False)
class _Call:
    """One tool call under way."""

    call: ToolCall
    turn: TurnCancellation
    began: float
    admitted: float | None = None
    outcome: ToolOutcome | None = None
    started: bool = False
    handler_executed: bool = False
    handled: ToolOutput | None = None

    def needs_finish(self, error: BaseException) -> bool:
        """Return True if listeners wait for an end: of a call that they saw start, or that was cancelled before."""
        return self.outcome is None and (self.started or errors_of(error) is None)

    def failure(self) -> ToolOutcome:
        """Return the outcome of an error at this point. After the handler's end an error can't change its outcome."""
        if self.handled is not None:
            return outcome_of(self.handled)
        return ToolOutcome.FAILED if self.handler_executed else ToolOutcome.FAILED_BEFORE

    def claim(self, outcome: ToolOutcome) -> None:
        """Store the outcome. From here on nothing can be cancelled (invariant 2), so there is no second claim."""
        if self.outcome is not None:
            raise AssertionError(f"call {self.call.call_id}: {self.outcome} and {outcome} were both claimed")
        self.outcome = outcome

    def timing(self) -> CallTiming:
        """Return the times up to now."""
        now = trio.current_time()
        admitted = now if self.admitted is None else self.admitted
        return CallTiming(
            execution_started=self.admitted is not None,
            dispatch=admitted - self.began,
            handler=now - admitted,
            total=now - self.began,
        )


@final
@attrs.define(eq=False, repr=False)
class ToolRuntime:
    """Runs the tool calls of one sampling step.

    ``teardown_timeout`` bounds listeners once an outcome is claimed, in seconds. ``on_timing`` receives the times of each call
    exactly once, also of aborted and failed calls.

    Raises:
      ValueError: two tools have the same name.
    """

    _tools: dict[ToolName, Tool] = attrs.field(converter=_by_name)
    _listeners: tuple[LifecycleListener, ...] = attrs.field(
        default=(), converter=_in_order, kw_only=True, alias="listeners"
    )
    _hooks: Hooks | None = attrs.field(default=None, kw_only=True, alias="hooks")
    _teardown_timeout: float = attrs.field(default=5.0, kw_only=True, alias="teardown_timeout")
    _on_timing: OnTiming | None = attrs.field(default=None, kw_only=True, alias="on_timing")
    _gate: ReadWriteLock = attrs.field(factory=ReadWriteLock, init=False)
    """Tools that support parallel calls read, all others write."""

    async def call(self, call: ToolCall, *, turn: TurnCancellation) -> ToolResult:
        """Run one tool call to its one result.

        Blocks for the tool's readiness, the gate and the handler. When ``turn`` is cancelled before the outcome is
        claimed, the handler is cancelled and the result is an ``AbortedOutput``; later, the result is the handler's. Cancelled
        from outside, listeners hear ABORTED and Cancelled goes on.

        Raises:
          ToolError: the payload is not of the tool's kind.
          ToolError, Exception: raised by the handler or a hook, RespondToModel excepted.
        """
        state = _Call(call, turn, trio.current_time())
        try:
            output = await self._run(state)
        except (trio.Cancelled, BaseExceptionGroup) as error:  # a group: cancelled, and failed at the same time
            if state.needs_finish(error):
                outcome = ToolOutcome.ABORTED if errors_of(error) is None else state.failure()
                await self._settle(state, outcome)  # noqa: ASYNC102  it shields and bounds itself
            raise
        finally:
            timing = state.timing()
            self._report_timing(state, timing)
        lost = state.handled if isinstance(output, AbortedOutput) else None
        return ToolResult(call_id=call.call_id, output=output, outcome=state.outcome, timing=timing, lost=lost)

    async def call_all(self, calls: Sequence[ToolCall], *, turn: TurnCancellation) -> tuple[ToolResult, ...]:
        """Run a turn's tool calls side by side, as far as the gate allows; return one result each, in their order.

        Raises:
          ValueError: two calls have the same id.
          ToolError, Exception: as ``call``; the other calls are cancelled.
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
        await self._settle(state, ToolOutcome.ABORTED)
        now = trio.current_time()
        if now - (state.turn.cancelled_at or now) > self._teardown_timeout:
            _log.warning("tool %s took %.1f s to stop after its turn was cancelled", state.call.name, now - state.began)
        return AbortedOutput(text=abort_text(state.call.name, now - state.began))

    async def _dispatch(self, state: _Call) -> ToolOutput:
        tool = self._tools.get(state.call.name)
        if tool is not None:
            await tool.wait_until_ready()
        shared = tool is not None and tool.supports_parallel
        async with self._gate.reading() if shared else self._gate.writing():
            state.admitted = trio.current_time()
            if tool is None:
                return FunctionOutput(text=f"unsupported call: {state.call.name}", success=False)
            if not tool.accepts(state.call.payload):
                raise ToolError(f"tool {state.call.name} invoked with incompatible payload")
            await self._report_start(state)
            try:
                output, outcome = await self._handle(tool, state)
            except RespondToModel as error:
                output, outcome = FunctionOutput(text=str(error), success=False), state.failure()
            except BaseException as error:  # noqa: ASYNC103  a handler or hook is user code; raised again in any case
                if not ends_the_process(error):
                    await self._settle(state, state.failure())  # noqa: ASYNC102, ASYNC120  it shields and bounds itself
                raise
            await self._settle(state, outcome)
            return output

    async def _handle(self, tool: Tool, state: _Call) -> tuple[ToolOutput, ToolOutcome]:
        """Run hooks and handler; return the output for the model, and the outcome."""
        invocation = Invocation(call=state.call, payload=state.call.payload, turn=state.turn)
        checked = await self._check_before(tool, invocation)
        if isinstance(checked, Block):
            text = checked.reason or "PreToolUse hook blocked the tool call"
            return FunctionOutput(text=text, success=False), ToolOutcome.BLOCKED
        state.handler_executed = True
        with bare_errors():
            output = state.handled = await tool.handle(checked)
        return await self._check_after(tool, checked, output), outcome_of(output)

    async def _check_before(self, tool: Tool, invocation: Invocation) -> Invocation | Block:
        shown = None if self._hooks is None else tool.pre_hook_payload(invocation)
        if self._hooks is None or shown is None:
            return invocation
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
            return output  # nothing may cancel between a handler's end and the claim
        match await self._hooks.post_tool_use(invocation, payload, output):
            case Block(reason):
                return FunctionOutput(text=reason or "PostToolUse hook blocked the tool result", success=False)
            case Feedback(text):
                return FeedbackOutput(result=output, text=text)
            case Continue():
                return output

    async def _report_start(self, state: _Call) -> None:
        await trio.lowlevel.checkpoint()
        state.started = True
        for listener in self._listeners:
            with logging_failures(_log, "a listener failed at the start of tool %s", state.call.name):
                await listener.on_tool_start(state.call)

    def _report_timing(self, state: _Call, timing: CallTiming) -> None:
        if self._on_timing is not None:
            with logging_failures(_log, "on_timing failed for tool %s", state.call.name):
                self._on_timing(state.call, timing)

    async def _settle(self, state: _Call, outcome: ToolOutcome) -> None:
        """Claim the outcome and report it to the listeners: shielded, and bounded for each."""
        state.claim(outcome)
        for listener in self._listeners:
            with trio.move_on_after(self._teardown_timeout, shield=True) as limit:
                with logging_failures(_log, "a listener failed at the end of tool %s", state.call.name):
                    await listener.on_tool_finish(state.call, outcome)
            if limit.cancelled_caught:
                _log.warning("a listener took more than %.1f s at the end of a tool", self._teardown_timeout)
