"""Edges of the server's half: a request target that is no URL."""

from contextlib import suppress

import pytest

from trio_rollout._http.server_reader import BadRequest, RequestReader


@pytest.mark.parametrize("target", [b"http://[", b"http://[::1/x"])
def test_the_path_of_a_target_that_is_no_url_is_a_bad_request(target):
    """It is the client's mistake: a ValueError ends the connection without an answer, and a fake server with it."""
    reader = RequestReader()
    reader.feed(b"GET %b HTTP/1.1\r\nhost: a\r\n\r\n" % target)
    with suppress(BadRequest):
        assert isinstance(reader.next().path, str)
