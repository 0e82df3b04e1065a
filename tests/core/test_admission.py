"""The quick answers of admission: they may only say no where the rule says no."""

import attrs
from hypothesis import given
from hypothesis import strategies as st

from trio_rollout._core.admission import Load, may_pull, may_start, pullable, startable

SMALL = st.integers(0, 12)
LOADS = st.builds(
    Load,
    open=st.booleans(),
    free_slots=SMALL,
    per_group=st.integers(1, 5),
    eligible=SMALL,
    needs=st.lists(st.integers(1, 5), min_size=1, max_size=12),
    finished=SMALL,
    bound=SMALL,
    exhausted=st.booleans(),
    fresh_room=st.none() | st.integers(-3, 12),
    ahead=SMALL,
    resting=SMALL,
    most_resting=SMALL,
)


@given(LOADS)
def test_where_something_may_start_or_be_pulled_the_quick_answers_say_so(load):
    if startable(load) > 0:
        assert may_start(free_slots=load.free_slots, per_group=load.needs[0])
    if pullable(load) > 0:
        assert may_pull(free_slots=load.free_slots, per_group=load.per_group, eligible=load.eligible, ahead=load.ahead)


@given(LOADS)
def test_where_slots_and_queue_alone_decide_they_are_the_rule_itself(load):
    free = attrs.evolve(
        load,
        open=True,
        eligible=load.eligible + 1,
        finished=0,
        bound=1,
        exhausted=False,
        fresh_room=None,
        resting=0,
        most_resting=1,
    )
    slots = {"free_slots": free.free_slots, "per_group": free.per_group}
    assert may_start(free_slots=free.free_slots, per_group=free.needs[0]) == (startable(free) > 0)
    assert may_pull(**slots, eligible=free.eligible, ahead=free.ahead) == (pullable(free) > 0)
