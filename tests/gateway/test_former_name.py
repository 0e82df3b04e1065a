"""``trio_rollout.sessions``, the former name of ``trio_rollout.gateway``, stays importable."""

from trio_rollout import gateway, sessions


def test_every_name_is_the_same_object():
    assert sorted(sessions.__all__) == sorted(gateway.__all__)
    assert all(getattr(sessions, name) is getattr(gateway, name) for name in gateway.__all__)
