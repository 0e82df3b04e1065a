"""``trio-rollout run`` refuses bad input with a clear message, and nothing is lost by it."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from click.testing import CliRunner

from trio_rollout.cli import main
from trio_rollout.tiny import DATA

from ._commands import write_jsonl

NOWHERE = "http://127.0.0.1:9"  # the discard port, on which no server listens


@pytest.fixture
def refused(tmp_path):
    """Return a function that runs with arguments, checks the exit status, and returns the message as one line."""

    def run(*arguments, status):
        result = CliRunner().invoke(main, ["run", "--out", str(tmp_path / "out"), *map(str, arguments)])
        assert result.exit_code == status, result.output
        assert "Traceback" not in result.output
        return " ".join(result.output.split())

    return run


@pytest.fixture
def prompts(tmp_path):
    """A file with one good prompt."""
    return write_jsonl(tmp_path / "good.jsonl", [{"prompt": "1+1", "label": "2"}])


@pytest.mark.parametrize(
    ("content", "arguments", "words"),
    [
        (None, [], "No such file"),
        ("", [], "is empty"),
        ("\n\n", [], "only blank lines"),
        ('{"prompt": "a"}\n{"prompt": \n', [], "line 2: is not JSON"),
        ('{"prompt": "a"}\n[1]\n', [], "line 2: must be a JSON object"),
        ('{"text": "a"}\n', [], "line 1: lacks the key 'prompt'"),
        ('{"prompt": "a"}\n', ["--label-key", "answer"], "line 1: lacks the key 'answer'"),
        ('{"prompt": "a", "k": 1}\n{"prompt": "b", "k": 1}\n', ["--id-key", "k"], "lines 1 and 2 have the same id '1'"),
        ('{"prompt": 7}\n', [], "line 1: the prompt under 'prompt' must be a string"),
        ('{"prompt": [-1]}\n', [], "line 1: token ids must lie in"),
        (
            '{"prompt": [{"role": "user", "content": "a"}]}\n',
            [],
            "the prompts are messages; --tokenizer PATH is needed",
        ),
    ],
)
def test_a_bad_prompt_file_fails_the_run_before_it_begins(refused, tmp_path, content, arguments, words):
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_text(content)

    assert words in refused("--prompts", path, "--server", NOWHERE, *arguments, status=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--server", "htp://x"], "its scheme is 'htp'"),  # F167
        (["--server", "x:1"], "it has no scheme"),
        (["--router", "htp://x"], "its scheme is 'htp'"),
        (["--tasks", "gcd:3"], "not both: got"),
        (["--samples", 0], "0 is not in the range x>=1"),
        (["--temperature", -1], "-1.0 is not in the range x>=0"),
        (["--temperature", "nan"], "SamplingParams.temperature: got nan"),
        (["--top-p", 0], "not in the range 0<x<=1"),
        (["--samples", 8, "--max-running", 4], "EngineSettings.max_running: got 4"),
        (["--reward", "nonsense"], "'nonsense': expected module:function"),
        (["--reward", "no_such_module:f"], "can't import 'no_such_module'"),
        (["--generate", "os:getcwd"], "must be async"),
        (["--tasks", "gcd:10"], "give either --prompts FILE.jsonl or --tasks NAME:COUNT"),
        (["--template-variable", "enable_thinking"], "expected NAME=JSON, for example enable_thinking=false"),
        (["--template-variable", "enable_thinking=False"], "expected NAME=JSON"),
        (["--template-variable", "=1"], "'' is no name of a variable"),
        (["--template-variable", "tools=[]", "--tokenizer", DATA], "--template-variable: got tools"),
        (["--template-variable", "a=1"], "--tokenizer PATH is needed"),
        (["--no-such-option"], "No such option '--no-such-option'"),
    ],
)
def test_wrong_usage_is_named(refused, prompts, tmp_path, arguments, words):
    assert words in refused("--prompts", prompts, "--server", NOWHERE, *arguments, status=2)
    assert not (tmp_path / "out").exists()


def test_prompts_are_needed(refused):
    assert "give either --prompts FILE.jsonl or --tasks" in refused(status=2)


@pytest.mark.parametrize("spec", ["gcd", "gcd:", "gcd:0", "gcd:many", ":3"])
def test_tasks_have_a_form(refused, spec):
    assert "expected NAME:COUNT" in refused("--tasks", spec, status=2)


def test_a_server_that_is_down_is_named(refused, prompts):
    with socket.socket() as taken:  # bound and not listening: no other process can get the port
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"

        words = refused("--prompts", prompts, "--server", url, status=1)

    assert url in words


class SomethingElse(BaseHTTPRequestHandler):
    """A web server that is no SGLang."""

    def do_GET(self):
        """Answer every request with a page."""
        self.send_response(404)
        self.end_headers()
        self.wfile.write(b"<html>hello</html>")

    def log_message(self, *_):
        """Log nothing."""


def test_a_server_that_speaks_something_else_is_named(refused, prompts):
    with HTTPServer(("127.0.0.1", 0), SomethingElse) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            words = refused("--prompts", prompts, "--server", f"http://127.0.0.1:{server.server_port}", status=1)
        finally:
            server.shutdown()
            thread.join()

    assert f"http://127.0.0.1:{server.server_port}" in words


BAD_SAMPLING = [("stop", "", "stop"), ("temperature", "inf", "temperature"), ("temperature", "nan", "temperature")]
BAD_SAMPLING += [
    ("top-p", "nan", "top"),
    ("max-new-tokens", "2.5", "max"),
    ("top-k", "1.5", "top"),
    ("top-k", "0", "top"),
]


@pytest.mark.parametrize(("option", "value", "words"), BAD_SAMPLING)
@pytest.mark.parametrize("way", ["option", "file"])
def test_f114_sampling_parameters_out_of_range_are_refused_before_a_server_is_asked(
    refused, prompts, tmp_path, option, value, words, way
):
    if way == "option":
        arguments = [f"--{option}", value]
    else:
        written = {"stop": '[""]'}.get(option, value)
        (tmp_path / "run.toml").write_text(f"{option} = {written}\n")
        arguments = ["--config", tmp_path / "run.toml"]
    said = refused("--prompts", prompts, "--server", NOWHERE, *arguments, status=2)
    assert words in said
