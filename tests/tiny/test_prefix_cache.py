"""The prefix cache holds exactly the prefixes of what it was given, within its bound."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trio_rollout.tiny._scheduler.prefix_cache import PrefixCache

sequences = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int64)


def longest_shared(seen: list[list[int]], wanted: list[int]) -> int:
    return max((size for one in seen for size in range(len(wanted) + 1) if one[:size] == wanted[:size]), default=0)


@given(st.lists(sequences, max_size=15), sequences)
def test_a_match_is_the_longest_prefix_it_has_seen(seen, wanted):
    cache = PrefixCache(10_000)
    for one in seen:
        cache.insert(array(one))

    assert cache.match(array(wanted)) == longest_shared(seen, wanted)
    assert cache.tokens == len({tuple(one[:size]) for one in seen for size in range(1, len(one) + 1)})


@given(st.lists(sequences, max_size=30), st.integers(0, 30))
def test_it_never_holds_more_than_it_may(seen, capacity):
    cache = PrefixCache(capacity)
    for one in seen:
        cache.insert(array(one))
        assert 0 <= cache.tokens <= capacity


def test_what_was_used_longest_ago_goes_first():
    cache = PrefixCache(10)
    cache.insert(array([1] * 5))
    cache.insert(array([2] * 5))
    cache.match(array([1] * 5))
    cache.insert(array([3] * 4))

    assert [cache.match(array([token] * 5)) for token in (1, 2, 3)] == [5, 0, 4]


def test_cleared_it_knows_nothing():
    cache = PrefixCache(100)
    cache.insert(array([1, 2]))
    cache.clear()

    assert (cache.match(array([1, 2])), cache.tokens) == (0, 0)
