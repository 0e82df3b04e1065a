"""Dispatch: one outcome a call, at every moment at which a cancellation may arrive. Virtual time, without processes."""

import pytest
import trio

from trio_rollout.errors import ToolError
from trio_rollout.tools import (
    AbortedOutput,
    Block,
    Feedback,
    FunctionOutput,
    RespondToModel,
    Rewrite,
    ToolCall,
    ToolName,
    ToolOutcome,
    ToolRuntime,
    TurnCancellation,
)
from trio_rollout.tools._dispatch.tool import abort_text

from .stage_play import Play, PlayTool, Recorder, Stages

DONE = ToolOutcome.COMPLETED


async def cancel_at(play, stage, after=3.0):
    """Run a call, cancel its turn ``after`` seconds into ``stage``, and return the result."""
    results = []
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def call():
            results.append(await play.call())

        await play.stages.wait_reached(stage)
        await trio.sleep(after)
        play.turn.cancel()
        if stage == "finish":
            await trio.sleep(1)
            play.stages.finish.set()
    (result,) = results
    return result


async def test_a_call_passes_every_stage_in_order(autojump_clock):
    play = Play()
    result = await play.call()

    assert play.stages.reached == ["ready", "start", "pre", "handler", "post", "finish"]
    assert (result.output.model_text(), result.outcome) == ("ok", DONE)
    assert play.events == ["start", DONE]


async def test_already_cancelled_at_entry_runs_nothing_and_says_so(autojump_clock):
    play = Play()
    play.turn.cancel()
    result = await play.call()

    assert result.output.model_text() == "aborted by user after 0.1s"
    assert play.events == [ToolOutcome.ABORTED]
    assert (result.timing.execution_started, result.timing.handler) == (False, 0.0)
    assert play.tool.seen == []


async def test_cancelled_in_the_readiness_wait_was_never_admitted(autojump_clock):
    play = Play(hold=["ready"])
    result = await cancel_at(play, "ready")

    assert play.events == [ToolOutcome.ABORTED]
    assert result.timing.execution_started is False
    assert (result.timing.handler, result.timing.dispatch) == (0.0, result.timing.total)
    assert result.timing.total == pytest.approx(3, abs=0.1)


async def test_cancelled_in_the_gate_logs_dispatch_only_timing(autojump_clock):
    """Codex: ``cancellation_before_dispatch_admission_logs_dispatch_only_timing``."""
    holder = PlayTool(Stages.holding("handler"), name="holder", shares=False)
    play = Play(tools=[holder])
    async with trio.open_nursery() as nursery:
        other_turn = TurnCancellation()
        call = ToolCall(call_id="0", name=holder.name)
        nursery.start_soon(lambda: play.runtime.call(call, turn=other_turn))
        await holder.stages.wait_reached("handler")
        play.events.clear()
        result = await cancel_at(play, "ready")
        holder.stages.handler.set()

    assert play.events[0] == ToolOutcome.ABORTED
    assert result.timing.execution_started is False
    assert (result.timing.handler, result.timing.dispatch) == (0.0, result.timing.total)
    assert [call_id for call_id, _ in play.timings].count("1") == 1


@pytest.mark.parametrize("stage", ["start", "pre"])
async def test_cancelled_before_the_handler_it_never_ran(autojump_clock, stage):
    play = Play(hold=[stage])
    result = await cancel_at(play, stage)

    assert play.events == ["start", ToolOutcome.ABORTED]
    assert result.timing.execution_started is True
    assert play.tool.seen == []


async def test_cancelled_in_the_handler_it_is_aborted_and_its_time_counts(autojump_clock):
    play = Play(hold=["handler"])
    result = await cancel_at(play, "handler")

    assert isinstance(result.output, AbortedOutput)
    assert play.events == ["start", ToolOutcome.ABORTED]
    assert result.timing.handler == pytest.approx(3, abs=0.1)


async def test_cancelled_in_the_post_hook_the_handlers_result_is_lost_but_recorded(autojump_clock):
    play = Play(hold=["post"])
    result = await cancel_at(play, "post")

    assert result.output.model_text() == "aborted by user after 3.0s"
    assert play.events == ["start", ToolOutcome.ABORTED]
    assert result.lost == FunctionOutput(text="ok")


async def test_cancelled_after_the_claim_the_finished_result_is_returned(autojump_clock):
    """Codex: ``cancellation_after_handler_finishes_preserves_completed_lifecycle``."""
    play = Play(hold=["finish"])
    result = await cancel_at(play, "finish")

    assert result.output.model_text() == "ok"
    assert (play.events, result.outcome) == (["start", DONE], DONE)


async def test_cancelled_in_the_tick_in_which_it_finished_the_result_is_kept(autojump_clock):
    play = Play()
    result = await play.call()
    play.turn.cancel()

    assert result.output.model_text() == "ok"


async def test_a_handler_that_swallows_the_cancellation_and_returns_is_completed(autojump_clock):
    class Stubborn(PlayTool):
        async def handle(self, invocation):
            with trio.CancelScope(shield=True):
                await super().handle(invocation)
                await trio.sleep(5)
            return FunctionOutput(text="anyway")

    play = Play(hooks=False, tools=[stubborn := Stubborn(name="stubborn")])
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def cancel():
            await stubborn.stages.wait_reached("handler")
            play.turn.cancel()

        result = await play.call("stubborn")

    assert (result.output.model_text(), play.events) == ("anyway", ["start", DONE])


async def test_a_handler_that_fails_while_it_is_cancelled_has_failed(autojump_clock):
    class Clumsy(PlayTool):
        async def handle(self, invocation):
            try:
                await super().handle(invocation)
            except trio.Cancelled:
                raise ToolError("the sandbox is gone") from None  # noqa: ASYNC104  that is what is tested

    play = Play(tools=[clumsy := Clumsy(Stages.holding("handler"), name="clumsy")])
    with pytest.RaisesGroup(pytest.RaisesExc(ToolError, match="the sandbox is gone")):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(play.call, "clumsy")
            await clumsy.stages.wait_reached("handler")
            play.turn.cancel()

    assert play.events == ["start", ToolOutcome.FAILED]


class Nursery(PlayTool):
    """A tool that works in child tasks, which raise given errors at once or when they are cancelled."""

    def __init__(self, *errors, at_once):
        super().__init__(name="nursery")
        self.errors, self.at_once = errors, at_once

    async def handle(self, _invocation):
        async with trio.open_nursery() as nursery:
            for error in self.errors:
                nursery.start_soon(self._raise, error)
            await trio.sleep_forever()

    async def _raise(self, error):
        try:
            if not self.at_once:
                await trio.sleep_forever()
        finally:
            raise error


async def test_an_answer_from_a_handlers_child_task_reaches_the_model(autojump_clock):
    play = Play(tools=[Nursery(RespondToModel("no such file"), at_once=True)])
    result = await play.call("nursery")

    assert result.output.model_text() == "no such file"
    assert play.events == ["start", ToolOutcome.FAILED]


@pytest.mark.parametrize("by", ["turn", "ambient"])
@pytest.mark.parametrize("errors", [1, 2])
async def test_child_tasks_that_fail_while_they_are_cancelled_make_it_failed(autojump_clock, by, errors):
    play = Play(tools=[Nursery(*[ToolError(str(n)) for n in range(errors)], at_once=False)])
    with pytest.raises((ToolError, ExceptionGroup)):  # one comes bare
        with trio.move_on_after(1 if by == "ambient" else 100):
            async with trio.open_nursery(strict_exception_groups=True) as nursery:

                @nursery.start_soon
                async def cancel():
                    await trio.sleep(1)
                    play.turn.cancel() if by == "turn" else None

                await play.call("nursery")

    assert play.events == ["start", ToolOutcome.FAILED]


async def test_ambient_cancellation_is_one_aborted_and_goes_on(autojump_clock):
    play = Play(hold=["handler"])
    with trio.move_on_after(3) as scope:
        await play.call()

    assert scope.cancelled_caught
    assert play.events == ["start", ToolOutcome.ABORTED]
    assert repr(play.runtime._gate) == "<ReadWriteLock 0 readers, 0 waiting>"
    assert len(play.timings) == 1


async def test_unknown_tool_is_an_answer_without_events(autojump_clock):
    play = Play()
    result = await play.call("nonsense")

    assert (result.output.success, result.output.model_text()) == (False, "unsupported call: nonsense")
    assert (play.events, result.outcome) == ([], None)


async def test_the_wrong_kind_of_payload_is_fatal_without_events(autojump_clock):
    play = Play()
    with pytest.raises(ToolError, match="tool play invoked with incompatible payload"):
        await play.call(payload="a text")

    assert play.events == []
    assert len(play.timings) == 1


async def test_an_answer_for_the_model_is_an_output_without_success(autojump_clock):
    play = Play(answer=RespondToModel("no such file"))
    result = await play.call()

    assert (result.output.model_text(), result.output.success) == ("no such file", False)
    assert play.events == ["start", ToolOutcome.FAILED]


async def test_a_declared_failure_is_completed_without_success(autojump_clock):
    play = Play(answer=FunctionOutput(text="bad", success=False))
    result = await play.call()

    assert result.outcome == ToolOutcome.UNSUCCESSFUL
    assert [kind for kind, _ in play.hooks.seen] == ["pre"], "no hook after what is no success"


async def test_a_hook_that_blocks_keeps_the_handler_from_starting(autojump_clock):
    play = Play(pre=Block("not this one"))
    result = await play.call()

    assert (result.output.model_text(), result.outcome) == ("not this one", ToolOutcome.BLOCKED)
    assert (play.events, play.tool.seen) == (["start", ToolOutcome.BLOCKED], [])


async def test_a_hook_may_rewrite_the_input(autojump_clock):
    play = Play(pre=Rewrite({"path": "/safe"}))
    await play.call(payload={"path": "/etc"})

    assert play.tool.seen == [{"path": "/safe"}]


async def test_a_rewrite_that_makes_no_sense_is_an_error_before_the_handler(autojump_clock):
    class Strict(PlayTool):
        def with_updated_input(self, _payload, rewritten):
            raise RespondToModel(f"can't take {rewritten}")

    play = Play(pre=Rewrite(7), tools=[Strict(name="strict")])
    result = await play.call("strict")

    assert result.output.model_text() == "can't take 7"
    assert play.events == ["start", ToolOutcome.FAILED_BEFORE]


async def test_a_post_hook_that_blocks_changes_the_response_and_not_the_lifecycle(autojump_clock):
    play = Play()
    play.hooks.post = Block()
    result = await play.call()

    assert (result.output.model_text(), result.output.success) == ("PostToolUse hook blocked the tool result", False)
    assert play.events == ["start", DONE]


async def test_feedback_replaces_the_text_and_keeps_the_typed_result(autojump_clock):
    play = Play()
    play.hooks.post = Feedback("read this")
    result = await play.call()

    assert result.output.model_text() == "read this"
    assert result.output.result == FunctionOutput(text="ok")


async def test_an_error_in_a_post_hook_does_not_undo_the_handlers_end(autojump_clock):
    play = Play()
    play.hooks.post_tool_use = None  # not callable
    with pytest.raises(TypeError):
        await play.call()

    assert play.events == ["start", DONE]


@pytest.mark.parametrize(
    ("name", "seconds", "text"),
    [
        (ToolName("exec_command"), 2.04, "Wall time: 2.0 seconds\naborted by user"),
        (ToolName("exec_command"), 0.0, "Wall time: 0.1 seconds\naborted by user"),
        (ToolName("exec_command", "other"), 2.0, "aborted by user after 2.0s"),
        (ToolName("write_stdin"), 0.0, "aborted by user after 0.1s"),
    ],
)
def test_abort_texts(name, seconds, text):
    assert abort_text(name, seconds) == text


def test_an_aborted_output_has_no_success_at_all():
    output = AbortedOutput(text="x")

    assert output.success is None
    assert output.success_for_logging is False


async def test_readiness_runs_outside_the_gate(autojump_clock):
    """A tool server that starts slowly holds up no other tool."""
    slow = PlayTool(Stages.holding("ready"), name="slow", shares=False)
    play = Play(tools=[slow])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(play.call, "slow", "2")
        await slow.stages.wait_reached("ready")
        assert (await play.call()).outcome == DONE
        slow.stages.ready.set()


async def test_the_exact_tool_is_asked_for_its_readiness(autojump_clock):
    mine, other = PlayTool(name="tool"), PlayTool(name="tool", namespace="other")
    runtime = ToolRuntime([mine, other])
    await runtime.call(ToolCall(call_id="1", name=other.name), turn=TurnCancellation())

    assert (mine.stages.reached, other.stages.reached) == ([], ["ready", "handler"])


async def test_a_listener_that_fails_changes_nothing(autojump_clock, caplog):
    class Broken:
        async def on_tool_start(self, call):
            raise OSError("start")

        async def on_tool_finish(self, call, outcome):
            raise OSError("finish")

    recorder = Recorder()
    runtime = ToolRuntime([PlayTool()], listeners=[Broken(), recorder])
    result = await runtime.call(ToolCall(call_id="1", name=ToolName("play")), turn=TurnCancellation())

    assert (result.output.model_text(), recorder.events) == ("ok", ["start", DONE])
    assert len(caplog.records) == 2


async def test_a_listener_that_hangs_is_left_after_its_bound(autojump_clock):
    class Hanging(Recorder):
        async def on_tool_finish(self, call, outcome):
            await trio.sleep_forever()

    after = Recorder()
    runtime = ToolRuntime([PlayTool()], listeners=[Hanging(), after], teardown_timeout=2)
    began = trio.current_time()
    await runtime.call(ToolCall(call_id="1", name=ToolName("play")), turn=TurnCancellation())

    assert trio.current_time() - began == pytest.approx(2, abs=0.1)
    assert after.events == ["start", DONE]


async def test_cancelling_a_turn_aborts_both_its_calls_and_not_those_of_the_next(autojump_clock):
    play = Play(hold=["handler"])
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def cancel():
            await play.stages.wait_reached("handler")
            play.turn.cancel()

        calls = [ToolCall(call_id=call_id, name=ToolName("play")) for call_id in "ab"]
        results = await play.runtime.call_all(calls, turn=play.turn)
    play.turn = TurnCancellation()
    play.stages.handler.set()

    assert [(result.call_id, result.outcome) for result in results] == [
        ("a", ToolOutcome.ABORTED),
        ("b", ToolOutcome.ABORTED),
    ]
    assert (await play.call()).outcome == DONE


async def test_each_call_of_a_turn_has_exactly_one_result_in_its_order(autojump_clock):
    """F087: finished, aborted and unsupported calls."""
    play = Play(tools=[PlayTool(name="other", answer="second", shares=False)])
    calls = [ToolCall(call_id=str(n), name=ToolName(name)) for n, name in enumerate(["play", "other", "none", "play"])]
    results = await play.runtime.call_all(calls, turn=play.turn)

    assert [result.call_id for result in results] == ["0", "1", "2", "3"]
    assert [result.output.model_text() for result in results] == ["ok", "second", "unsupported call: none", "ok"]


async def test_two_calls_with_one_id_are_refused(autojump_clock):
    play = Play()
    call = ToolCall(call_id="x", name=ToolName("play"))
    with pytest.raises(ValueError, match="call ids must differ"):
        await play.runtime.call_all([call, call], turn=play.turn)


async def test_infrastructure_that_fails_in_one_call_ends_its_siblings_and_comes_out_bare(autojump_clock):
    play = Play(hold=["handler"], tools=[PlayTool(name="broken", answer=ToolError("no sandbox"))])
    calls = [ToolCall(call_id=name, name=ToolName(name)) for name in ("play", "broken")]
    with pytest.raises(ToolError, match="no sandbox"):
        await play.runtime.call_all(calls, turn=play.turn)

    outcomes = [event for event in play.events if event != "start"]
    assert set(outcomes) == {ToolOutcome.FAILED, ToolOutcome.ABORTED}
    assert len(outcomes) == 2


async def test_dispatch_and_handler_times_add_up(autojump_clock):
    play = Play(hold=["ready", "handler"])
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def open_the_stages():
            await trio.sleep(2)
            play.stages.ready.set()
            await trio.sleep(3)
            play.stages.handler.set()

        result = await play.call()

    timing = result.timing
    assert (timing.dispatch, timing.handler, timing.total) == (pytest.approx(2), pytest.approx(3), pytest.approx(5))


def test_tools_of_one_name_are_refused():
    with pytest.raises(ValueError, match="different names"):
        ToolRuntime([PlayTool(), PlayTool()])


async def test_a_turn_can_be_waited_for_and_keeps_its_first_reason(autojump_clock):
    turn = TurnCancellation()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(turn.wait)
        turn.cancel("the user said so")
        turn.cancel("too late")
    with trio.CancelScope() as scope, turn.link(scope):
        await trio.lowlevel.checkpoint()

    assert turn.reason == "the user said so"
    assert scope.cancelled_caught
