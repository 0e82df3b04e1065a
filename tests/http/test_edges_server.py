"""Edges of the server's half: a request target that is no URL, and requests without an end."""

from contextlib import suppress

import pytest

from trio_rollout._http.server_reader import REQUEST_HEADERS_LIMIT, BadRequest, RequestReader


@pytest.mark.parametrize("target", [b"http://[", b"http://[::1/x"])
def test_the_path_of_a_target_that_is_no_url_is_a_bad_request(target):
    """It is the client's mistake: a ValueError ends the connection without an answer, and a fake server with it."""
    reader = RequestReader()
    reader.feed(b"GET %b HTTP/1.1\r\nhost: a\r\n\r\n" % target)
    with suppress(BadRequest):
        assert isinstance(reader.next().path, str)


POST = b"POST /x HTTP/1.1\r\nhost: a\r\n"
ENDLESS = {
    "a target": (b"GET /", b"x" * 5000),
    "headers": (POST, b"x: y\r\n" * 100),
    "one header": (POST + b"x: ", b"y" * 5000),
    "empty lines": (b"", b"\r\n" * 2000),
    "a length": (POST + b"content-length: ", b"0" * 5000),
    "a chunk's extension": (POST + b"transfer-encoding: chunked\r\n\r\n1;", b"a=b;" * 1000),
    "trailers": (POST + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"t: u\r\n" * 1000),
    "a chunked body": (POST + b"transfer-encoding: chunked\r\n\r\n", b"ff\r\n%b\r\n" % (b"x" * 255) * 200),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_f111_a_request_without_an_end_is_refused_by_a_limit(kind):
    """The server's side has the same bounds as the client's."""
    reader = RequestReader(body_limit=1_000_000)
    first, more = ENDLESS[kind]
    if first:
        reader.feed(first)
    for _ in range(2000):
        reader.feed(more)
        if reader.has_next:
            break
    with pytest.raises(BadRequest):
        while reader.next() is not None:
            pass


def test_f111_more_headers_than_the_limit_are_refused():
    reader = RequestReader()
    reader.feed(POST + b"x: y\r\n" * REQUEST_HEADERS_LIMIT + b"\r\n")
    with pytest.raises(BadRequest, match="headers") as caught:
        reader.next()
    assert caught.value.status == 431


@pytest.mark.parametrize(
    ("zeros", "length", "status"), [(5000, b"5", None), (5000, b"99999999999", 413), (0, b"9" * 30, 400)]
)
def test_f112_a_length_with_zeros_in_front_is_read_or_refused(zeros, length, status):
    reader = RequestReader()
    reader.feed(POST + b"content-length: " + b"0" * zeros + length + b"\r\n\r\nhello")
    if status is None:
        assert reader.next().body == b"hello"
    else:
        with pytest.raises(BadRequest) as caught:
            reader.next()
        assert caught.value.status == status
