"""The output of a command may be closed, full, dumb or unable to write a character: a run goes on, others say so."""

import os
import pty
import subprocess
import sys
from contextlib import suppress

import pytest
from click.testing import CliRunner

from trio_rollout.cli import main

from ._commands import COMMAND, LONGEST_S, tiny_server, write_jsonl


@pytest.fixture(scope="module")
def url():
    with tiny_server() as (url, _):
        yield url


@pytest.fixture
def arguments(tmp_path, url):
    """A run that shows its progress as often as it can."""
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"count to {n}"} for n in range(6)])
    common = ("--samples", 2, "--max-new-tokens", 4, "--reward", "regex:", "--progress-every", 0.001)
    run = ("run", "--prompts", prompts, "--out", tmp_path / "out", "--server", url, *common)
    return [*COMMAND, *map(str, run)]


def acked(tmp_path):
    """Return the number of groups in the folder."""
    return len(CliRunner().invoke(main, ["export", str(tmp_path / "out")]).stdout.splitlines())


def reader_gone():
    """Return the writing end of a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "wb")


def disk_full():
    """Return a file on a full disk."""
    return os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb")


def finish(arguments, **options):
    """Run a command until it exits."""
    return subprocess.run(arguments, timeout=LONGEST_S, check=False, **options)


@pytest.mark.parametrize(
    ("lost", "more"),
    [(reader_gone, ()), (disk_full, ()), (reader_gone, ("--no-progress",)), (disk_full, ("--quiet",))],
)
def test_f164_a_run_goes_on_without_an_output(arguments, tmp_path, lost, more):
    """The pipe's reader has gone, or the disk is full: said once on stderr, where the summary goes then."""
    with lost() as out:
        done = finish([*arguments, *more], stdout=out, stderr=subprocess.PIPE, text=True)

    assert done.returncode == 0, done.stderr
    assert acked(tmp_path) == 6
    assert done.stderr.count("can't be written any more") == (0 if "--quiet" in more else 1)
    assert ("groups scored" in done.stderr) == ("--quiet" not in more)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("lost", [reader_gone, disk_full], ids=["pipe", "disk"])
def test_f164_a_run_goes_on_without_any_output(arguments, tmp_path, lost):
    with lost() as out:
        done = finish(arguments, stdout=out, stderr=out)

    assert done.returncode == 0
    assert acked(tmp_path) == 6


def test_f164_a_run_goes_on_with_closed_descriptors(arguments, tmp_path):
    """No file of the run takes the place of stdout, which a command of a rollout would print into."""
    shell = 'exec "$0" "$@" <&- >&- 2>&-'
    done = finish(["sh", "-c", shell, *arguments])

    assert done.returncode == 0
    assert acked(tmp_path) == 6


def test_f164_a_run_goes_on_when_its_reader_leaves_later(arguments, tmp_path):
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 0, errors
    assert acked(tmp_path) == 6


def test_f164_a_run_goes_on_when_its_terminal_hangs_up(arguments, tmp_path):
    """The terminal answers EIO to every write."""
    ours, terminal = pty.openpty()
    with subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=terminal, stderr=subprocess.PIPE, text=True
    ) as process:  # fmt: skip
        os.close(terminal)
        os.read(ours, 1)
        os.close(ours)
        errors = process.stderr.read()
    assert process.returncode == 0, errors
    assert acked(tmp_path) == 6


def test_f164_characters_that_the_output_lacks_are_escaped(arguments, tmp_path):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = finish(arguments, capture_output=True, env=environment)

    assert done.returncode == 0, done.stderr
    assert b"groups scored" in done.stdout
    assert done.stderr == b""


@pytest.mark.parametrize("command", [("inspect",), ("inspect", "a"), ("inspect", "--state", "ready"), ("export",)])
def test_f164_a_command_whose_output_is_full_says_so(results, command):
    name, *rest = command
    with disk_full() as out:
        done = finish([*COMMAND, name, results, *rest], stdout=out, stderr=subprocess.PIPE, text=True)

    assert done.returncode == 1
    assert done.stderr == "Error: the output can't be written: No space left on device\n"


def on_terminal(arguments, **environment):
    """Run a command on a terminal; return its exit status and everything that the terminal got."""
    ours, terminal = pty.openpty()
    with subprocess.Popen(arguments, stdout=terminal, stderr=terminal, env={**os.environ, **environment}) as process:
        os.close(terminal)
        text = b""
        with suppress(OSError):  # EIO: the command has closed the terminal
            while part := os.read(ours, 1 << 16):
                text += part
    os.close(ours)
    return process.returncode, text.decode()


@pytest.mark.parametrize("kind", ["dumb", "unknown"])
def test_f169_a_terminal_that_can_only_print_gets_lines(arguments, kind):
    status, text = on_terminal(arguments, TERM=kind)

    assert status == 0, text
    assert "groups, " in text
    assert "\x1b" not in text


def test_f169_a_terminal_that_can_do_more_gets_the_bar(arguments):
    status, text = on_terminal(arguments, TERM="xterm-256color")

    assert status == 0, text
    assert "\x1b[2K" in text


def test_f169_a_file_gets_no_live_display_although_colors_are_forced(arguments):
    done = finish(arguments, capture_output=True, text=True, env={**os.environ, "FORCE_COLOR": "1"})

    assert done.returncode == 0, done.stderr
    assert "groups, " in done.stdout
    assert "\x1b[2K" not in done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"]])
def test_f169_help_does_not_wait_for_the_engine(arguments):
    """Half a second of processor time goes into these libraries and the rooms that need them."""
    program = (
        "import sys\nfrom trio_rollout.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n"
        "    print([name for name in ('trio', 'httpx', 'apsw', 'rich', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", ["export", "inspect", "run", "tiny-server"])
def test_f169_the_list_of_subcommands_says_what_they_say(name):
    """The list is written without importing them."""
    command = main.get_command(None, name)
    _, listed = CliRunner().invoke(main, ["--help"]).output.split("Commands:")
    (line,) = [line for line in listed.splitlines() if line.split()[:1] == [name]]
    assert line.split(maxsplit=1)[1] == command.short_help
    assert CliRunner().invoke(main, [name, "--help"]).exit_code == 0


def test_f169_a_finished_run_starts_no_model(arguments, tmp_path):
    """Nor does one whose folder belongs to another run; both are told without a server that answers."""
    first = finish(arguments, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    at = arguments.index("--server")
    nowhere = [*arguments[:at], "--server", "http://127.0.0.1:9", *arguments[at + 2 :]]

    again = finish(nowhere, capture_output=True, text=True)
    other = finish([*nowhere, "--temperature", "0.5"], capture_output=True, text=True)

    assert again.returncode == 0, again.stderr
    assert "6 of 6" in again.stdout
    assert other.returncode == 1
    assert "belongs to another run: its temperature is '1.0'" in other.stderr
