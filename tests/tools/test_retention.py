"""The bytes that are kept of the output: pure arithmetic."""

import pytest

from trio_rollout.tools._commands.output import HeadBuffer, aggregate


@pytest.mark.parametrize(
    ("out", "err", "limit", "expected"),
    [
        (b"o" * 4, b"e" * 4, 8, b"ooooeeee"),
        (b"o" * 9, b"e" * 9, 9, b"ooo" + b"e" * 6),  # a third, and the rest
        (b"o" * 9, b"e" * 2, 9, b"o" * 7 + b"ee"),  # what stderr leaves goes back
        (b"o" * 2, b"e" * 9, 9, b"oo" + b"e" * 7),
        (b"o" * 9, b"", 4, b"oooo"),
        (b"", b"e" * 9, 4, b"eeee"),
        (b"o", b"e", 0, b""),
    ],
)
def test_aggregate_prefers_stderr_and_fills_the_cap(out, err, limit, expected):
    assert aggregate(out, err, limit) == expected


def test_the_head_is_kept_and_the_rest_counted():
    buffer = HeadBuffer(5)
    for chunk in (b"abc", b"def", b"ghi"):
        buffer.append(chunk)

    assert (buffer.kept, buffer.dropped) == (b"abcde", 4)
