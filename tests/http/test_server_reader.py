"""The server's reader: every cut, every kind of framing, every kind of damage, and its bounds."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_rollout._http.server_reader import BadRequest, RequestReader, split_head

BODY = b'{"input_ids": [6, 7, 8]}'
PLAIN = b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n"
SIZED = b"POST /generate?a=1&b=x+y HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
CHUNKED = (
    b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5;name=value\r\n" + BODY[:5] + b"\r\n%x\r\n" % (len(BODY) - 5) + BODY[5:] + b"\r\n0\r\nX-Trailer: yes\r\n\r\n"
)
OFFER = b"GET /offer HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
LAST = b"POST /last HTTP/1.1\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}"
OLD = b"GET /old HTTP/1.0\r\n\r\n"
TUNNEL = b"CONNECT a:443 HTTP/1.1\r\n\r\n"

KEPT = {PLAIN: ("GET", b"/ready", b""), SIZED: ("POST", b"/generate?a=1&b=x+y", BODY)}
KEPT |= {CHUNKED: ("POST", b"/generate", BODY), OFFER: ("GET", b"/offer", b"")}
ENDING = {LAST: ("POST", b"/last", b"{}"), OLD: ("GET", b"/old", b""), TUNNEL: ("CONNECT", b"a:443", b"")}

CUTS = st.lists(st.integers(0, 10_000), max_size=20)


def cut(data, cuts):
    """Return ``data`` in pieces, cut at these places."""
    marks = sorted({place % (len(data) + 1) for place in cuts} | {0, len(data)})
    return [data[start:stop] for start, stop in itertools.pairwise(marks)]


def read(data, *, cuts=(), eof=True, **limits):
    """Feed ``data`` in pieces and the end of the stream; return the requests, and the error behind them or None."""
    reader, found = RequestReader(**limits), []
    try:
        for piece in [*cut(data, cuts), *([b""] if eof else [])]:
            reader.feed(piece)
            while (request := reader.next()) is not None:
                found.append(request)
    except BadRequest as error:
        return found, error
    assert not reader.has_next
    return found, None


def shown(requests):
    return [(request.method, request.target, request.body) for request in requests]


@given(
    sent=st.lists(st.sampled_from(list(KEPT)), max_size=5),
    last=st.sampled_from([b"", *ENDING]),
    cuts=CUTS,
    junk=st.binary() | st.sampled_from(list(KEPT)),
)
def test_any_cut_gives_the_same_requests(sent, last, cuts, junk):
    """Pipelined or not, and however the bytes are cut, the requests are those that were sent, in their order."""
    data = b"".join([*sent, last, junk if last else b""])  # behind the last request of a connection nothing is read
    found, error = read(data, cuts=cuts)

    assert error is None
    assert shown(found) == [{**KEPT, **ENDING}[one] for one in [*sent, *([last] if last else [])]]
    assert [request.keep_alive for request in found] == [True] * len(sent) + [False] * bool(last)


@pytest.mark.parametrize("data", [PLAIN, SIZED, CHUNKED, OFFER], ids=["plain", "sized", "chunked", "offer"])
def test_every_shortened_request_is_no_request(data):
    for length in range(len(data)):
        assert read(data[:length]) == ([], None)


@given(
    sent=st.lists(st.sampled_from(list(KEPT)), min_size=1, max_size=3),
    at=st.integers(0, 10_000),
    junk=st.binary(min_size=1, max_size=40),
    insert=st.booleans(),
    cuts=CUTS,
)
def test_fuzz_damage_never_gives_a_wrong_request(sent, at, junk, insert, cuts):
    """Requests that are complete before the damage are returned; the reader ends, and cuts do not change the result."""
    data = b"".join(sent)
    at %= len(data)
    damaged = data[:at] + junk + data[at + (0 if insert else len(junk)) :]
    found, error = read(damaged, cuts=cuts)

    whole, start = [], 0
    for one in sent:
        start += len(one)
        if start <= at:
            whole.append(KEPT[one])
    assert shown(found[: len(whole)]) == whole
    at_once, at_once_error = read(damaged)
    assert shown(found) == shown(at_once)
    assert (error is None) == (at_once_error is None)
    for request in found:
        announced = request.header(b"content-length")
        assert announced is None or len(request.body) == int(announced)


@given(noise=st.binary(min_size=1, max_size=300), cuts=CUTS)
def test_fuzz_noise_is_never_a_request(noise, cuts):
    """Bytes that do not begin as a request does are damage at once, or the beginning of something that never ends."""
    if re.match(rb"\s*[A-Z-]+ \S* (HTTP|RTSP|ICE)/", noise):
        return
    found, _ = read(noise, cuts=cuts)
    assert not found


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 24\r\ncontent-length: 24",
        b"content-length: 24\r\ntransfer-encoding: chunked",
        b"content-length: -1",
        b"content-length: 0x18",
        b"content-length: 99999999999999999999999",
        b"transfer-encoding: gzip",
        b"host : x",
        b"host: x\r\n folded",
        b"connection: upgrade\r\nupgrade: x\r\ncontent-length: 24",
        b"connection: upgrade\r\nupgrade: x\r\ntransfer-encoding: chunked",
    ],
)
def test_contradictory_framing_is_refused(head):
    """Two lengths, a length and chunks, a length that is none: refused, never guessed at."""
    found, error = read(b"POST / HTTP/1.1\r\n" + head + b"\r\n\r\n" + BODY)

    assert (found, error.status) == ([], 400)


@pytest.mark.parametrize(
    "noise", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02", b"nonsense", b"GET / HTTP/1.1\nhost: x\n\n"]
)
def test_another_protocol_is_noticed_without_the_end_of_a_head(noise):
    _, error = read(PLAIN + noise, eof=False)
    assert error.status == 400


any_pieces = pytest.mark.parametrize("size", [1, 7, 1000])


@any_pieces
@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 300,
        b"GET / HTTP/1.1\r\nx: " + b"a" * 300,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 60,
        b"\r\n" * 150,
    ],
)
def test_a_head_beyond_its_limit_is_refused_before_it_ends(head, size):
    found, error = read(head, cuts=range(0, 400, size), eof=False, head_limit=100)
    assert (found, error.status) == ([], 431)


def test_a_whole_head_beyond_its_limit_is_refused():
    head = b"GET / HTTP/1.1\r\nx: " + b"a" * 300 + b"\r\n\r\n"
    assert read(head, head_limit=100)[1].status == 431
    found, error = read(head, head_limit=len(head))
    assert (len(found), error) == (1, None)


@any_pieces
def test_a_long_body_is_not_taken_for_a_long_head(size):
    """Neither the body behind a head nor many requests in one piece count as its head."""
    body = b"b" * 500
    data = (PLAIN + b"POST / HTTP/1.1\r\ncontent-length: 500\r\n\r\n" + body) * 3
    found, error = read(data, cuts=range(0, len(data), size), head_limit=60)

    assert error is None
    assert [request.body for request in found] == [b"", body] * 3


def test_a_body_beyond_its_limit_is_refused_when_it_is_announced():
    _, error = read(b"POST / HTTP/1.1\r\ncontent-length: 101\r\n\r\n", eof=False, body_limit=100)
    assert error.status == 413


@any_pieces
def test_a_chunked_body_beyond_its_limit_is_refused(size):
    data = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + b"a\r\n0123456789\r\n" * 11
    _, error = read(data, cuts=range(0, len(data), size), eof=False, body_limit=100)
    assert error.status == 413


@pytest.mark.parametrize("size", [1, 7, 100])
@pytest.mark.parametrize("framing", [b"1;" + b"a" * 300, b"1\r\nx\r\n0\r\nx: " + b"a" * 300])
def test_framing_without_a_body_is_bounded(framing, size):
    """A chunk's extension or a trailer that never ends is refused like a head that never ends."""
    data = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + framing
    _, error = read(data, cuts=range(0, len(data), size), eof=False, head_limit=100)
    assert error.status == 431


def test_requests_before_the_damage_are_returned_first():
    reader = RequestReader()
    reader.feed(PLAIN + SIZED + b"nonsense")
    assert reader.waiting == 2
    assert shown([reader.next(), reader.next()]) == [KEPT[PLAIN], KEPT[SIZED]]
    for _ in range(2):
        with pytest.raises(BadRequest):
            reader.next()


def test_a_client_that_waits_for_100_continue_is_noticed():
    head = b"POST / HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
    reader = RequestReader()
    reader.feed(head)
    assert reader.expects_continue
    reader.continued()
    assert not reader.expects_continue
    reader.feed(b"{}" + head + b"{}")  # this one did not wait
    assert not reader.expects_continue
    assert [reader.next().body, reader.next().body] == [b"{}", b"{}"]


def test_the_parts_of_a_request():
    ((request,), _) = read(SIZED)
    assert (request.path, request.query) == ("/generate", {"a": "1", "b": "x y"})
    assert (request.header(b"host"), request.header(b"no")) == ("x", None)
    assert request.headers == [(b"Host", b"x"), (b"Content-Length", b"24")]
    ((absolute,), _) = read(b"GET http://host:1/path?q=1 HTTP/1.1\r\n\r\n")
    assert (absolute.path, absolute.query) == ("/path", {"q": "1"})


def test_trailers_are_no_headers():
    ((request,), _) = read(CHUNKED)
    assert request.header(b"x-trailer") is None


@pytest.mark.parametrize("data", [PLAIN, SIZED, CHUNKED, LAST, OFFER, TUNNEL])
def test_a_head_is_split_from_what_follows_it(data):
    """A proxy reads a head and hands on the rest as it is."""
    size = data.index(b"\r\n\r\n") + 4
    for length in range(size):
        assert split_head(data[:length]) is None
    request, rest = split_head(data + b"more")
    assert (request.method, request.target) == {**KEPT, **ENDING}[data][:2]
    assert (request.body, rest) == (b"", data[size:] + b"more")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\r\n\r\n" + PLAIN, 400),
        (b"GET /" + b"a" * 100, 431),
        (b"GET /%b\r\n\r\n" % (b"a" * 100), 431),
    ],
)
def test_what_is_no_head_is_not_split(data, status):
    with pytest.raises(BadRequest) as caught:
        split_head(data, limit=60)
    assert caught.value.status == status
