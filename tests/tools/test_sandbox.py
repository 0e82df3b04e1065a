"""Sandboxes: each is destroyed, also if its creation failed; a failed cleanup changes no result."""

import fcntl
import os
import resource
import subprocess
import sys

import pytest
import trio

from trio_rollout.errors import ToolError
from trio_rollout.tools import (
    ExecCommandTool,
    LocalSandboxes,
    NeverRan,
    SandboxCounts,
    SandboxSettings,
    ToolCall,
    ToolName,
    ToolRuntime,
    TurnCancellation,
    open_rollout_tools,
)
from trio_rollout.tools._sandboxes.sandbox import lifetime, open_sandbox

SETTINGS = SandboxSettings(create=10, destroy=5, backoff=0.1)


def sh(line):
    return ["sh", "-c", line]


@pytest.fixture
def provider(tmp_path):
    return LocalSandboxes(tmp_path / "sandboxes")


def left(provider):
    return sorted(path.name for path in provider.root.iterdir()) if provider.root.exists() else []


class RemoteService:
    """A remote provider: slow, with given failures. ``alive`` has its sandboxes."""

    def __init__(self, nursery):
        self._nursery = nursery
        self.counts = SandboxCounts()
        self.alive = {}
        self.asked_to_destroy = []
        self.slow = 0.0
        self.create_errors = []
        self.destroy_errors = []
        self.exec_errors = []
        self.executed = []

    async def create(self, spec):
        made = trio.Event()
        self._nursery.start_soon(self._make, spec, made)  # the service goes on whatever its client does
        await made.wait()
        if self.create_errors:
            raise self.create_errors.pop(0)
        return self

    async def _make(self, spec, made):
        await trio.sleep(self.slow)
        if not (self.create_errors and isinstance(self.create_errors[0], NeverRan)):
            self.alive[spec.name] = spec
        made.set()

    async def destroy(self, name):
        self.asked_to_destroy.append(name)
        await trio.sleep(0.1)
        if self.destroy_errors:
            raise self.destroy_errors.pop(0)
        self.alive.pop(name, None)

    async def exec(self, argv, *, cwd, env, **_limits):
        await trio.lowlevel.checkpoint()
        if self.exec_errors:
            error = self.exec_errors.pop(0)
            if not isinstance(error, NeverRan):
                self.executed.append(argv)
            raise error
        self.executed.append(argv)
        return "done"


@pytest.fixture
async def remote(nursery):
    return RemoteService(nursery)


async def test_cancelled_while_it_is_created_it_is_still_destroyed(autojump_clock, remote):
    """F089: the service answers after 500 ms, the cancellation comes at 100 ms, and no sandbox is left."""
    remote.slow = 0.5
    with trio.move_on_after(0.1) as scope:
        async with open_sandbox(remote, settings=SETTINGS):
            pytest.fail("the block of a cancelled creation must not run")

    assert scope.cancelled_caught
    assert (remote.alive, remote.counts) == ({}, SandboxCounts(created=1, destroyed=1))


async def test_a_creation_that_takes_too_long_is_infrastructure_and_destroyed(autojump_clock, remote):
    """F041: not the policy's fault, so the group is requeued."""
    remote.slow = 12.0
    with pytest.raises(ToolError, match="not created within 10 s"):
        async with open_sandbox(remote, settings=SETTINGS):
            pass

    assert len(remote.asked_to_destroy) == 1


async def test_a_creation_that_failed_for_good_may_exist_and_is_destroyed(autojump_clock, remote):
    remote.create_errors = [ConnectionResetError("after the request")]
    with pytest.raises(ToolError, match="after the request"):
        async with open_sandbox(remote, settings=SETTINGS):
            pass

    assert remote.alive == {}
    assert remote.create_errors == [], "not tried again: it might have been made twice"


async def test_a_creation_that_never_ran_is_tried_again(autojump_clock, remote):
    remote.create_errors = [NeverRan("refused"), NeverRan("refused")]
    async with open_sandbox(remote, settings=SETTINGS):
        assert len(remote.alive) == 1

    assert remote.alive == {}


async def test_a_failed_cleanup_changes_no_result_and_is_counted(autojump_clock, remote):
    """F091: delete answers 500 three times, the sample is delivered, the leak counter is 1."""
    remote.destroy_errors = [RuntimeError("500")] * 3
    async with open_sandbox(remote, settings=SETTINGS):
        result = "the sample"

    assert (result, remote.counts.leaked) == ("the sample", 1)


async def test_a_cleanup_that_hangs_is_bounded_and_counted(autojump_clock, remote):
    async def hang(_name):
        await trio.sleep_forever()

    remote.destroy = hang
    began = trio.current_time()
    async with open_sandbox(remote, settings=SETTINGS):
        pass

    assert trio.current_time() - began < 6
    assert remote.counts == SandboxCounts(created=1, leaked=1)


async def test_a_cleanup_is_finished_although_the_block_was_cancelled(autojump_clock, remote):
    with trio.move_on_after(1):
        async with open_sandbox(remote, settings=SETTINGS):
            await trio.sleep_forever()

    assert (remote.alive, remote.counts.destroyed) == ({}, 1)


async def test_the_blocks_own_error_comes_out_as_itself(autojump_clock, remote):
    error = FileNotFoundError("mine")
    with pytest.raises(FileNotFoundError) as caught:
        async with open_sandbox(remote, settings=SETTINGS):
            raise error

    assert caught.value is error


async def test_a_command_that_may_have_run_is_not_tried_again(autojump_clock, remote):
    """F030: the server appends a line, then drops the socket: one line in the file, and an infrastructure failure."""
    remote.exec_errors = [RuntimeError("the socket was dropped")]
    async with open_sandbox(remote, settings=SETTINGS) as sandbox:
        with pytest.raises(ToolError, match="may have run"):
            await sandbox.exec(["append"])

    assert remote.executed == [["append"]]


async def test_a_command_that_certainly_did_not_run_is_tried_again(autojump_clock, remote):
    remote.exec_errors = [NeverRan("connection refused")]
    async with open_sandbox(remote, settings=SETTINGS) as sandbox:
        assert await sandbox.exec(["append"]) == "done"

    assert remote.executed == [["append"]]


async def test_tries_are_bounded(autojump_clock, remote):
    remote.exec_errors = [NeverRan("connection refused")] * 5
    async with open_sandbox(remote, settings=SETTINGS) as sandbox:
        with pytest.raises(NeverRan):
            await sandbox.exec(["append"])

    assert len(remote.exec_errors) == 2


async def test_a_provider_without_processes_says_so(autojump_clock, remote):
    async with open_sandbox(remote, settings=SETTINGS) as sandbox:
        with pytest.raises(ToolError, match="can't keep processes"):
            await sandbox.start(["sleep", "1"])


@pytest.mark.parametrize(("remaining", "expected"), [(100.0, 115.0), (None, 3615.0), (1e9, 3615.0)])
def test_a_lifetime_follows_from_what_remains(remaining, expected):
    """F090: a finite lifetime at the provider, no longer than the deadlines' sum."""
    assert lifetime(SETTINGS, remaining) == expected


async def test_the_lifetime_is_sent_with_the_request(autojump_clock, remote):
    async with (
        open_rollout_tools(deadline=trio.current_time() + 50) as tools,
        tools.open_sandbox(remote, settings=SETTINGS, label="run7") as sandbox,
    ):
        (spec,) = remote.alive.values()

    assert spec.name == sandbox.name
    assert (spec.label, spec.lifetime) == ("run7", pytest.approx(49 + 15))


# Local ones, with real processes


async def test_commands_run_in_a_directory_of_their_own_with_a_minimal_environment(provider, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    async with open_sandbox(provider) as sandbox:
        result = await sandbox.exec(sh("pwd; echo $HOME; echo $TMPDIR; env | grep -c SECRET; umask; echo x > f"))
        home, files = provider.root / sandbox.name, provider.root / sandbox.name / "files"
        assert result.stdout_text.split() == [str(files), str(files), str(home / "tmp"), "0", "0077"]
        assert (home.stat().st_mode & 0o777, (files / "f").read_text(encoding="ascii")) == (0o700, "x\n")

    assert left(provider) == []


async def test_the_environment_can_be_added_to(provider):
    async with open_sandbox(provider, env={"A": "1"}) as sandbox:
        assert (await sandbox.exec(sh("echo $A$B"), env={"B": "2"})).stdout == b"12\n"


async def test_limits_hold(provider):
    script = (
        "import resource as r; print(*(r.getrlimit(n)[0] for n in (r.RLIMIT_CORE, r.RLIMIT_FSIZE, r.RLIMIT_NOFILE)))"
    )
    async with open_sandbox(provider) as sandbox:
        result = await sandbox.exec([sys.executable, "-c", script])
        provider.rlimits[resource.RLIMIT_FSIZE] = 1000
        too_much = await sandbox.exec(sh("head -c 5000 /dev/zero > f; stat -c %s f"))

    assert result.stdout_text.split() == ["0", str(1 << 30), "1024"]
    assert too_much.stdout == b"1000\n"


async def test_a_command_over_its_limit_is_an_observation(provider):
    """F041"""
    async with open_sandbox(provider) as sandbox:
        result = await sandbox.exec(["sleep", "60"], timeout=0.2)
        assert result.timed_out
        assert (await sandbox.exec(["true"])).exit_code == 0, "the sandbox goes on"


async def test_sessions_live_in_it_and_die_with_it(provider, processes):
    async with open_sandbox(provider) as sandbox:
        started = await sandbox.start(sh("pwd; echo $HOME; setsid sleep 600"), call_id="c")
        assert started.alive
        assert started.output.split() == [bytes(provider.root / sandbox.name / "files")] * 2
        pid = provider._open[sandbox.name]._supervisor._process.pid

    assert not processes.alive(pid)
    assert left(provider) == []


async def test_a_models_tools_run_in_it(provider):
    async with open_sandbox(provider) as sandbox:
        runtime = ToolRuntime([ExecCommandTool(sandbox.sessions)])
        call = ToolCall(call_id="1", name=ToolName("exec_command"), payload={"argv": ["pwd"]})
        result = await runtime.call(call, turn=TurnCancellation())

    assert f"{provider.root}/{sandbox.name}/files" in result.output.model_text()


async def test_files_are_written_at_once_and_read_back(provider):
    async with open_sandbox(provider) as sandbox:
        await sandbox.write_file("a/b/c.txt", "hello")
        await sandbox.write_file("/a/b/d.bin", b"\x00\xff")
        assert (await sandbox.exec(sh("cat a/b/c.txt"))).stdout == b"hello"
        assert await sandbox.read_file("a/b/d.bin") == b"\x00\xff"
        assert sorted(os.listdir(provider.root / sandbox.name / "files/a/b")) == ["c.txt", "d.bin"]  # ruff: ignore[os-listdir]


async def test_a_missing_file_is_the_policys_doing(provider):
    async with open_sandbox(provider) as sandbox:
        with pytest.raises(FileNotFoundError):
            await sandbox.read_file("answer.txt")


@pytest.mark.parametrize(
    "make",
    [
        "ln -s /etc/passwd target",
        "ln -s / target",
        "mkfifo target",
        "mkdir target",
        "head -c 2000000 /dev/zero > target",
    ],
)
async def test_what_is_no_plain_file_of_the_sandbox_is_not_read(provider, make):
    async with open_sandbox(provider) as sandbox:
        await sandbox.exec(sh(make))
        with trio.fail_after(120), pytest.raises(OSError):  # ruff: ignore[pytest-raises-too-broad]  each kind has its own
            await sandbox.read_file("target/etc/passwd" if make == "ln -s / target" else "target")


@pytest.mark.parametrize("path", ["../x", "a/../../x", "", "/", "a\0b"])
async def test_no_path_leads_out(provider, path):
    async with open_sandbox(provider) as sandbox:
        with pytest.raises(PermissionError):
            await sandbox.read_file(path)
        with pytest.raises(PermissionError):
            await sandbox.write_file(path, b"x")


async def test_writing_does_not_follow_a_link_that_the_policy_made(provider, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("safe", encoding="ascii")
    async with open_sandbox(provider) as sandbox:
        await sandbox.exec(["ln", "-s", str(victim), "out"])
        await sandbox.write_file("out", b"overwritten")
        assert await sandbox.read_file("out") == b"overwritten"

    assert victim.read_text(encoding="ascii") == "safe"


async def test_it_is_removed_also_where_permissions_were_taken_away(provider):
    async with open_sandbox(provider) as sandbox:
        await sandbox.exec(sh("mkdir -p a/b; touch a/b/c; chmod 000 a/b a; ln -s / root"))

    assert left(provider) == []


async def test_a_root_that_is_open_to_others_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ToolError, match="no other user can enter"):
        async with open_sandbox(LocalSandboxes(tmp_path), settings=SETTINGS):
            pass
    tmp_path.chmod(0o700)


async def test_a_sweep_removes_what_died_with_its_host_and_nothing_else(provider):
    """F090: after kill -9 and a restart with the same label, the old sandboxes are removed."""
    async with open_sandbox(provider, label="run1") as mine:
        dead = [provider.root / f"run1-dead{n}" for n in range(3)]
        other = provider.root / "run2-dead"
        for home in (*dead, other):
            home.mkdir()
            (home / "owner.lock").touch()
        assert await provider.sweep("run1") == 3
        assert left(provider) == sorted([mine.name, other.name])
        assert await LocalSandboxes(provider.root).sweep("run1") == 0, "another provider sees the lock too"


HOST = """
import contextlib, sys, trio
from trio_rollout.tools import LocalSandboxes, open_rollout_tools

async def main():
    async with contextlib.AsyncExitStack() as stack:
        tools = await stack.enter_async_context(open_rollout_tools())
        for _ in range(3):
            sandbox = await stack.enter_async_context(tools.open_sandbox(LocalSandboxes(sys.argv[1]), label="run1"))
            await sandbox.start(["sh", "-c", "setsid sleep 600 & exec sleep 600"])
        print("ready", flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


async def test_kill_9_with_three_sandboxes_then_a_restart_leaves_none(provider, processes):
    """F090: the processes die with the host, and a sweep removes the directories."""
    host = await trio.lowlevel.open_process([sys.executable, "-c", HOST, str(provider.root)], stdout=subprocess.PIPE)
    try:
        with trio.fail_after(120):
            assert b"ready" in await host.stdout.receive_some()
        pids = processes.marked_by(host.pid)
        assert len(pids) == 6
    finally:
        host.kill()
        with trio.move_on_after(10, shield=True):
            await host.wait()
            await host.stdout.aclose()

    assert len(left(provider)) == 3
    for pid in pids:
        await processes.wait_gone(pid)
    assert (await provider.sweep("run1"), left(provider)) == (3, [])


async def test_the_lock_is_not_inherited_by_commands(provider):
    """Else a leaked command would keep a sweep from removing a dead host's sandbox."""
    async with open_sandbox(provider) as sandbox:
        await sandbox.start(["sleep", "600"])
        home = provider.root / sandbox.name
        os.close(provider._open[sandbox.name]._owner)
        provider._open[sandbox.name]._owner = -1
        taken = os.open(home / "owner.lock", os.O_RDWR)
        fcntl.flock(taken, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(taken)


async def test_sixteen_at_a_time_leave_nothing(provider, processes):
    async def one():
        async with open_sandbox(provider) as sandbox:
            await sandbox.exec(sh("setsid sleep 600 >/dev/null 2>&1 & echo x > f"))

    async with trio.open_nursery() as nursery:
        for _ in range(16):
            nursery.start_soon(one)

    assert (left(provider), processes.marked()) == ([], [])
    assert provider.counts == SandboxCounts(created=16, destroyed=16)
