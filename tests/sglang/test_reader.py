"""The response reader, fed by hand: no I/O, every framing, every kind of damage."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_rollout._http import BadResponse, ConnectionBroken
from trio_rollout._http.reader import HEAD_LIMIT, ResponseReader

BODY = b'{"text": "six", "output_ids": [6, 7, 8]}'
SIZED = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5;name=value\r\n" + BODY[:5] + b"\r\n%x\r\n" % (len(BODY) - 5) + BODY[5:] + b"\r\n0\r\nX-Trailer: yes\r\n\r\n"
)
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\nx: y\r\n\r\n" + SIZED
UNTIL_EOF = b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n" + BODY


def feed(data: bytes, *, cuts: list[int] = [], scratch: int = 65536, eof: bool = True):  # noqa: B006
    """Feed ``data``, cut at these places, and the end of the stream; return the answer, or None if more is needed."""
    reader = ResponseReader(memoryview(bytearray(scratch)))
    marks = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    for start, stop in itertools.pairwise(marks):
        piece = data[start:stop]
        while piece:
            buffer = reader.buffer()
            taken = min(len(buffer), len(piece))
            assert taken > 0
            buffer[:taken] = piece[:taken]
            piece = piece[taken:]
            reader.received(taken)
            if reader.response is not None:
                # The pool notices what follows an answer before it uses the connection again.
                return reader.response
    if eof:
        reader.received(0)
    return reader.response


@pytest.mark.parametrize("data", [SIZED, CHUNKED, CONTINUED, UNTIL_EOF], ids=["sized", "chunked", "100", "until-eof"])
@given(cuts=st.lists(st.integers(0, 10_000), max_size=20), scratch=st.sampled_from([1, 7, 64, 65536]))
def test_any_cut_gives_the_same_answer(data, cuts, scratch):
    """An answer does not depend on the pieces in which it arrives."""
    response = feed(data, cuts=cuts, scratch=scratch)

    assert response.status == 200
    assert bytes(response.body) == BODY
    assert response.reusable == (data != UNTIL_EOF)


@pytest.mark.parametrize("data", [SIZED, CHUNKED, CONTINUED], ids=["sized", "chunked", "100"])
def test_every_shortened_answer_is_refused(data):
    """Cut short at any byte, an answer that announces its own end is never a success."""
    for length in range(len(data)):
        with pytest.raises(ConnectionBroken) as caught:
            feed(data[:length])
        assert caught.value.answered == (length > 0)


@given(
    data=st.sampled_from([SIZED, CHUNKED, CONTINUED]),
    at=st.integers(0, 10_000),
    junk=st.binary(min_size=1, max_size=40),
    cuts=st.lists(st.integers(0, 10_000), max_size=6),
)
def test_fuzz_damage_never_hangs_and_never_passes_for_the_whole(data, at, junk, cuts):
    """After any damage, the reader ends with an answer of the announced length or with one of its two errors."""
    at %= len(data)
    damaged = data[:at] + junk + data[at + len(junk) :]
    try:
        response = feed(damaged, cuts=cuts)
    except (BadResponse, ConnectionBroken):
        return
    assert response is not None
    announced = response.header(b"content-length")
    assert announced is None or len(response.body) == int(announced)


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=6))
def test_fuzz_noise_is_never_an_answer(noise, cuts):
    """Bytes that do not begin like HTTP give an error."""
    if noise.startswith(b"HTTP/"):
        return
    with pytest.raises((BadResponse, ConnectionBroken)):
        feed(noise, cuts=cuts)


@pytest.mark.parametrize("cuts", [[], [len(SIZED) - 10], [60], [len(SIZED) - 1]])
def test_a_body_that_is_too_long_is_refused(cuts):
    """Bytes beyond the announced length, in the same piece as its end, make the answer a damaged one."""
    with pytest.raises(BadResponse, match="longer than the 40 bytes"):
        feed(SIZED + b"{}\n", cuts=cuts)


@pytest.mark.parametrize("more", [b"junk", SIZED, b"0\r\n\r\n", b"HTTP/1.1 200"])
def test_bytes_after_a_chunked_body_are_refused(more):
    with pytest.raises(BadResponse):
        feed(CHUNKED + more)


@pytest.mark.parametrize(
    "headers",
    [
        b"content-length: 40\r\ncontent-length: 41",
        b"content-length: 40\r\ntransfer-encoding: chunked",
        b"content-length: -1",
        b"content-length: 0x28",
        b"content-length: 99999999999999999999999",
        b"transfer-encoding: gzip, chunked",
        b"content-encoding: gzip\r\ncontent-length: 40",
        b"content-length: 1073741825",
    ],
)
def test_contradictory_and_unwanted_framing_is_refused(headers):
    """Two lengths, a length and chunks, a length that is none, or an encoding that was not asked for: refused, never guessed at."""
    with pytest.raises(BadResponse):
        feed(b"HTTP/1.1 200 OK\r\n" + headers + b"\r\n\r\n" + BODY)


def test_an_endless_head_is_refused():
    with pytest.raises(BadResponse, match=f"longer than {HEAD_LIMIT}"):
        feed(b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * HEAD_LIMIT * 2, eof=False)


def test_switching_protocols_is_refused():
    with pytest.raises(BadResponse):
        feed(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n")


SIZED_REST = b"content-length: 40\r\n\r\n" + BODY
CHUNKED_REST = CHUNKED.partition(b"OK\r\n")[2]


@pytest.mark.parametrize(
    ("head", "rest", "reusable"),
    [
        (b"HTTP/1.1 200 OK\r\n", SIZED_REST, True),
        (b"HTTP/1.1 200 OK\r\n", CHUNKED_REST, True),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n", SIZED_REST, False),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n", CHUNKED_REST, False),
        (b"HTTP/1.1 200 OK\r\nconnection: Keep-Alive, TE\r\n", b"content-length: 0\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nconnection: te, CLOSE\r\n", b"content-length: 0\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\n", b"content-length: 0\r\n\r\n", True),
        (b"HTTP/1.0 200 OK\r\n", SIZED_REST, False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n", SIZED_REST, True),
    ],
)
def test_whether_a_connection_is_kept_is_the_servers_word(head, rest, reusable):
    for cuts in ([], [len(head) + 30]):
        assert feed(head + rest, cuts=cuts).reusable == reusable


@pytest.mark.parametrize("status", [204, 304])
def test_answers_without_a_body_end_with_their_head(status):
    response = feed(b"HTTP/1.1 %d Nothing\r\n\r\n" % status, eof=False)

    assert response.body == b""
    assert response.reusable
