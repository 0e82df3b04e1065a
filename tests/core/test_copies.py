"""Copies of values skip the checks that were made already, and nothing else."""

import attrs
import pytest

from trio_rollout import Prompt, Trajectory
from trio_rollout._core.values import copied

ROW = {"prompt": Prompt(id="0", text="a"), "index": 0, "segments": ()}


def _doubled(value):
    return None if value is None else 2 * value


@attrs.frozen(kw_only=True)
class Derived(Trajectory):
    """A user's class: one field is made of another, one is converted, one is set later or never."""

    reward: float | None = attrs.field(default=None, converter=_doubled)
    twice: float | None = attrs.field(init=False)
    later: object = attrs.field(init=False)

    def __attrs_post_init__(self):
        object.__setattr__(self, "twice", self.reward)


def test_a_copy_has_the_changes_and_everything_else_as_it_was():
    row = Trajectory(**ROW, metadata={"a": 1})
    again = copied(row, Trajectory, {"reward": 2.0})

    assert (again.reward, row.reward) == (2.0, None)
    assert attrs.evolve(again, reward=None) == row
    assert again.metadata is row.metadata


def test_a_users_own_kind_is_made_as_its_class_says():
    again = copied(Derived(**ROW), Trajectory, {"reward": 2.0})

    assert type(again) is Derived
    assert (again.reward, again.twice) == (4.0, 4.0)
    with pytest.raises(AttributeError):
        again.later  # noqa: B018  never set, as before
