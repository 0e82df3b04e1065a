"""A sandbox's directory is removed with everything that a hostile command left: at any depth, bounded in time, and no other file."""

import os
import sys
import tempfile
import time
from pathlib import Path

import pytest
import trio

from trio_rollout.tools import LocalSandboxes, SandboxCounts, SandboxSettings
from trio_rollout.tools._sandboxes.safe_files import read_inside, remove_tree, write_inside
from trio_rollout.tools._sandboxes.sandbox import open_sandbox

DEEP = "import os\nfor _ in range({}):\n  os.mkdir('directory'); os.chdir('directory'); open('f', 'w').close()"


@pytest.fixture
def room(tmp_path):
    """A directory in memory, if possible: a disk takes milliseconds to remove a directory."""
    memory = Path("/dev/shm")
    where = tempfile.mkdtemp(dir=memory if memory.is_dir() else tmp_path)
    yield Path(where)
    remove_tree(where)


@pytest.fixture
def provider(room):
    return LocalSandboxes(room / "boxes")


def left(provider):
    return sorted(path.name for path in provider.root.iterdir())


def nest(directory, depth, name="directory"):
    """Make nested directories with a file in each: with 1100 too deep for any path."""
    current = os.open(directory, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=current)
        os.close(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=current))
        below = os.open(name, os.O_RDONLY, dir_fd=current)
        os.close(current)
        current = below
    os.close(current)


def test_a_tree_deeper_than_any_stack_or_path_is_removed(room, processes):
    root = room / "root"
    for branch in ("x", "y"):
        (root / branch).mkdir(parents=True)
        nest(root / branch, 1100)
    before = processes.descriptors()
    remove_tree(str(root))

    assert (root.exists(), processes.descriptors()) == (False, before)


def test_links_and_special_files_go_and_what_they_point_at_stays(tmp_path):
    outside, root = tmp_path / "outside", tmp_path / "root"
    (outside / "kept").mkdir(parents=True)
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "link").symlink_to(outside, target_is_directory=True)
    (root / "link").symlink_to(outside, target_is_directory=True)
    (root / "a" / "dangling").symlink_to("nowhere")
    os.mkfifo(root / "a" / "b" / "fifo")
    (outside / "kept").chmod(0o555)
    remove_tree(str(root))

    assert (root.exists(), (outside / "kept").stat().st_mode & 0o777) == (False, 0o555)


def test_names_of_any_bytes(tmp_path):
    inner = tmp_path / "root" / os.fsdecode(b"\xff\n")
    inner.mkdir(parents=True)
    (inner / ("x" * 255)).touch()
    remove_tree(str(tmp_path / "root"))

    assert not (tmp_path / "root").exists()


def test_nothing_is_no_error_and_a_link_is_not_followed(tmp_path):
    remove_tree(str(tmp_path / "nothing"))
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(NotADirectoryError):
        remove_tree(str(tmp_path / "link"))

    assert tmp_path.is_dir()


def test_one_thing_that_cannot_go_does_not_keep_the_rest(tmp_path, monkeypatch):
    unlink = os.unlink

    def stubborn(path, **options):
        if path == "stubborn":
            raise PermissionError(path)
        unlink(path, **options)

    (tmp_path / "root" / "a").mkdir(parents=True)
    for name in ("a/x", "a/stubborn", "a/y", "z"):
        (tmp_path / "root" / name).touch()
    monkeypatch.setattr(os, "unlink", stubborn)
    with pytest.raises(PermissionError):
        remove_tree(str(tmp_path / "root"))

    assert [path.name for path in (tmp_path / "root").rglob("*") if path.is_file()] == ["stubborn"]


def test_it_can_be_left_anywhere_and_the_last_file_goes_last(tmp_path):
    """A sweep finds a half-removed directory by its owner file."""
    root = tmp_path / "root"

    def stop_after(count):
        calls = iter(range(count))

        def check():
            if next(calls, None) is None:
                raise KeyboardInterrupt

        return check

    for count in range(12):
        (root / "a" / "b").mkdir(parents=True, exist_ok=True)
        for name in ("owner.lock", "a/x", "a/b/y", "z"):
            (root / name).touch()
        try:
            remove_tree(str(root), last="owner.lock", check=stop_after(count))
        except KeyboardInterrupt:
            assert (root / "owner.lock").exists()
        else:
            assert not root.exists()
            assert count >= 6
            break
    else:
        pytest.fail("it never came to its end")


async def test_a_sandbox_with_a_deep_tree_is_destroyed(provider):
    async with open_sandbox(provider, settings=SandboxSettings(destroy=110)) as sandbox:
        assert (await sandbox.exec([sys.executable, "-c", DEEP.format(1100)])).exit_code == 0

    assert (left(provider), provider.counts) == ([], SandboxCounts(created=1, destroyed=1))


async def test_a_removal_ends_at_the_deadline_of_the_destruction_and_the_rest_is_swept(provider, monkeypatch):
    unlink = os.unlink

    def slow(path, **options):
        time.sleep(0.05)
        unlink(path, **options)

    async with open_sandbox(provider, settings=SandboxSettings(destroy=0.5), label="big") as sandbox:
        await sandbox.exec(["sh", "-c", "mkdir d; for i in $(seq 2000); do : > d/$i; done"])
        monkeypatch.setattr(os, "unlink", slow)
        began = trio.current_time()

    assert trio.current_time() - began < 30, "all of them would take 100 s"
    monkeypatch.undo()
    assert (len(left(provider)), provider.counts.leaked, provider._open) == (1, 1, {})
    assert (await provider.sweep("big"), left(provider)) == (1, [])


async def test_every_step_of_closing_is_done_although_one_fails(provider, monkeypatch):
    """The lock is released with the sandbox: else no sweep could remove the rest."""
    async with open_sandbox(provider, label="run1", settings=SandboxSettings(attempts=1)) as sandbox:
        await sandbox.exec(["true"])
        owner = provider._open[sandbox.name]._owner
        monkeypatch.setattr(os, "rmdir", lambda *_, **__: (_ for _ in ()).throw(PermissionError("no")))

    assert (len(left(provider)), provider.counts.leaked) == (1, 1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(owner)
    monkeypatch.undo()
    assert (await provider.sweep("run1"), left(provider)) == (1, [])


async def test_a_sweep_goes_on_past_what_it_cannot_remove(provider, monkeypatch):
    provider.root.mkdir(mode=0o700)
    for name in ("run1-a", "run1-b", "run1-c"):
        (provider.root / name / "files").mkdir(parents=True)
        (provider.root / name / "owner.lock").touch()
    nest(provider.root / "run1-a" / "files", 1100)
    (provider.root / "run1-b" / "files" / "stubborn").touch()
    unlink = os.unlink

    def stubborn(path, **options):
        if path == "stubborn":
            raise PermissionError(path)
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", stubborn)
    assert (await provider.sweep("run1"), left(provider)) == (2, ["run1-b"])
    monkeypatch.undo()
    assert (await provider.sweep("run1"), left(provider)) == (1, [])


def test_a_deep_path_costs_no_descriptors(room, processes):
    """A path of the greatest depth, at one descriptor a level, would exceed the host's limit."""
    nest(room, 1100, "a")
    deep = "a/" * 1100 + "f"
    before = processes.descriptors()
    write_inside(str(room), deep, b"x")
    assert (read_inside(str(room), deep, 10), processes.descriptors()) == (b"x", before)
    with pytest.raises(OSError, match="File name too long"):
        write_inside(str(room), "b/" * 3000 + "f", b"x")


@pytest.mark.parametrize("cwd", ["..", "../../x", "a/../..", "/.."])
async def test_a_commands_directory_is_inside(provider, cwd):
    async with open_sandbox(provider) as sandbox:
        with pytest.raises(ValueError, match="leads out of the sandbox"):
            await sandbox.exec(["pwd"], cwd=cwd)
        with pytest.raises(ValueError, match="leads out of the sandbox"):
            await sandbox.start(["pwd"], cwd=cwd)
