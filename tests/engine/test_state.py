"""The engine's state: its phase only goes on, and each change wakes the tasks that wait for it."""

from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trio_rollout import EngineSettings, Ports, SingleTurn
from trio_rollout.engine._context import RolloutContext
from trio_rollout.engine._gate import Gate
from trio_rollout.engine._state import Phase, new_state
from trio_rollout.errors import EngineClosed, RolloutError
from trio_rollout.sources import IterableSource
from trio_rollout.testing import FakeServers, prompts


@pytest.fixture
def state():
    """A state of an engine that has not started."""
    context = RolloutContext(
        generate=SingleTurn(),
        reward=None,
        group_reward=None,
        group_filter=None,
        servers=FakeServers(),
        gate=Gate(),
        settings=EngineSettings(samples_per_prompt=1, max_running=2),
        ports=Ports(),
        new_tools=lambda **_: None,
        show_tasks=str,
    )
    return new_state(IterableSource(prompts(1)), context, None)


CHANGES = {
    "a phase": (lambda state: state.go_on_to(Phase.DRAINING), "both"),
    "a failure": (lambda state: state.failure.fail(RolloutError("broken")), "consumers"),
    "a reason": (lambda state: state.failure.block("only a weight update helps"), "consumers"),
    "the end of data": (lambda state: state.end_data(), "consumers"),
    "a version": (lambda state: state.context.gate.adopt(3), "both"),
    "a queued group": (lambda state: state.enqueue([]), "admission"),
    "a wish": (lambda state: state.want(4), "admission"),
    "a ready group": (lambda state: state.ready.add([]), "consumers"),
    "room": (lambda state: state.ready.remove([]), "admission"),
    "a slot": (lambda state: state.slots.claim(1).release_one(), "admission"),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_each_setter_wakes_the_tasks_that_wait_for_it(state, change):
    set_it, kinds = CHANGES[change]
    looked = []
    async with trio.open_nursery() as nursery:
        for kind in ("consumers", "admission"):
            nursery.start_soon(getattr(state.wake, kind).wait_until, partial(looked.append, kind))
        await wait_all_tasks_blocked()
        looked.clear()
        set_it(state)
        assert set(looked) == ({"consumers", "admission"} if kinds == "both" else {kinds})
        nursery.cancel_scope.cancel()


def test_a_phase_only_goes_on(state):
    for phase in Phase:
        state.go_on_to(phase)
        for earlier in Phase:
            if earlier < phase:
                state.go_on_to(earlier)
        assert state.phase is phase


@pytest.mark.parametrize("phase", Phase)
def test_calls_are_refused_from_the_moment_when_the_block_is_being_left(state, phase):
    state.go_on_to(phase)
    if phase >= Phase.LEAVING:
        with pytest.raises(EngineClosed, match="next_batch"):
            state.require_open("next_batch")
    else:
        state.require_open("next_batch")


@pytest.mark.parametrize("phase", Phase)
def test_admission_is_open_and_the_buffer_bounded_while_the_engine_runs_only(state, phase):
    state.go_on_to(phase)
    assert state.load().open == (phase is Phase.RUNNING)
    state.ready.max_ready = 0
    assert state.has_room() == (phase is not Phase.RUNNING)
    assert state.supply().drained == (phase >= Phase.OVER)
