"""``trio-rollout tiny-server`` in a separate process."""

import signal
import socket

import httpx

from ._commands import command, tiny_server


def test_it_prints_its_url_once_it_answers_and_ends_by_ctrl_c():
    with tiny_server() as (url, server):
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200

        server.signal(signal.SIGINT)

        assert server.end().status == 130


def test_a_port_that_is_taken_is_one_clear_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        ended = command("tiny-server", "--port", port)

    assert ended.status == 1
    assert ended.err == f"Error: can't listen on 127.0.0.1:{port}: Address already in use\n"


def test_an_invalid_script_is_a_usage_error(tmp_path):
    (tmp_path / "script.json").write_text("[]")

    ended = command("tiny-server", "--port", 0, "--script", tmp_path / "script.json")

    assert ended.status == 2
    assert "TinySettings.script: cannot use" in ended.err
