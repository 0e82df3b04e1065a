"""A ledger's files are private to their user, never another file under the ledger's name, and never begun anew in silence."""

import os
import random
import re
import signal
import stat
import subprocess
import sys
from contextlib import suppress

import apsw
import pytest
import trio

from trio_rollout import IterableSource, Prompt
from trio_rollout.errors import LedgerError, SourceError
from trio_rollout.ledger import open_ledger, read_ledger
from trio_rollout.ledger._store import StoreLimits

from ._samples import IDENTITY, finished, pulled

SIZES = StoreLimits(inline=100, together=0, segment=1000)


async def fill(path):
    """Make a ledger with waiting groups, a finished one in a segment, and a closed database."""
    async with open_ledger(path, sizes=SIZES) as ledger:
        await ledger.begin(IDENTITY)
        await ledger.record([pulled(*range(3))])
        await ledger.record([finished(1)])


async def reopened(path):
    """Open a ledger as the next run does."""
    async with open_ledger(path, sizes=SIZES) as ledger:
        return await ledger.begin(IDENTITY)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "one"


@pytest.mark.parametrize("umask", [0o022, 0o000, 0o077])
async def test_f178_the_files_are_private_to_their_user(path, umask):
    before = os.umask(umask)
    try:
        async with open_ledger(path, sizes=SIZES) as ledger:
            await ledger.begin(IDENTITY)
            await ledger.record([pulled(0)])
            await ledger.record([finished(0)])
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()}
    finally:
        os.umask(before)
    assert {"lock", "ledger.db", "ledger.db-wal", "ledger.db-shm", "0000000000.seg"} <= set(modes)
    assert set(modes.values()) == {0o600}, modes
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


async def test_f178_the_files_of_an_older_version_become_private(path):
    await fill(path)
    for file in path.iterdir():
        file.chmod(0o644)
    await reopened(path)
    assert stat.S_IMODE((path / "ledger.db").stat().st_mode) == 0o600
    assert stat.S_IMODE((path / "lock").stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["lock", "ledger.db", "ledger.new", "0000000000.seg", "0000000001.seg"])
@pytest.mark.parametrize("dangling", [False, True])
async def test_f178_no_link_is_followed(tmp_path, name, dangling):
    """Neither in a new ledger nor in one that exists; and the link's target stays as it was."""
    target = tmp_path / "precious"
    if not dangling:
        target.write_text("precious")
    for path in (tmp_path / "new", tmp_path / "old"):
        if path.name == "old":
            await fill(path)
        path.mkdir(exist_ok=True)
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(target)
        if name in {"lock", "ledger.db"} or (name == "0000000000.seg" and path.name == "old"):
            with pytest.raises(LedgerError, match=f"{re.escape(name)} is a symbolic link, which is not followed"):
                await reopened(path)
        else:  # a name that the ledger does not need, or makes anew: the link goes, and not its target
            with suppress(LedgerError):
                await reopened(path)
        assert target.exists() is not dangling
        assert dangling or target.read_text() == "precious"
        if name == "ledger.db":
            with pytest.raises(LedgerError, match=r"ledger\.db is a symbolic link"), read_ledger(path):
                pass


async def test_f178_a_link_to_the_directory_is_the_users_own_choice(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    await fill(tmp_path / "link" / "run")
    with read_ledger(tmp_path / "real" / "run") as reader:
        assert reader.identity() is not None


@pytest.mark.parametrize("name", ["lock", "ledger.db"])
async def test_f178_what_is_no_file_is_refused(path, name):
    path.mkdir(parents=True)
    os.mkfifo(path / name)
    with trio.fail_after(60), pytest.raises(LedgerError, match=rf"{name} is no regular file"):
        await reopened(path)


async def test_f178_a_file_with_the_name_of_the_lock_is_not_emptied(path):
    path.mkdir(parents=True)
    (path / "lock").write_text("a bicycle lock")
    with pytest.raises(LedgerError, match="lock is no lock of a ledger, but begins with b'a bicycle lock'"):
        await reopened(path)
    assert (path / "lock").read_text() == "a bicycle lock"


async def test_f178_a_database_of_0_bytes_begins_no_new_run(path):
    await fill(path)
    (path / "ledger.db").write_bytes(b"")
    with pytest.raises(
        LedgerError, match=r"ledger\.db has 0 bytes, so its content was lost: restore the file, or use another"
    ):
        await reopened(path)
    with pytest.raises(LedgerError, match=r"ledger\.db has 0 bytes"), read_ledger(path):
        pass
    assert (path / "0000000000.seg").exists(), "nothing was cleaned up"


async def test_f178_segments_without_a_database_begin_no_new_run(path):
    await fill(path)
    (path / "ledger.db").unlink()
    with pytest.raises(LedgerError, match=r"has 0000000000.seg, but no ledger.db: restore that file"):
        await reopened(path)
    assert (path / "0000000000.seg").exists()


@pytest.mark.parametrize("left", [b"", b"half a database"])
async def test_f178_a_run_that_was_killed_while_it_made_its_database_can_begin_again(path, left):
    path.mkdir(parents=True)
    (path / "ledger.new").write_bytes(left)
    (path / "ledger.new-wal").write_bytes(left)
    assert (await reopened(path)).unfinished == ()
    assert sorted(file.name for file in path.iterdir()) == ["ledger.db", "lock"]


def damages(path):
    """Yield ways to damage a closed ledger, each by a name and a function."""
    data = (path / "ledger.db").read_bytes()
    rng = random.Random(0)
    for length in (1, 15, 100, 512, 4096, len(data) // 2, len(data) - 4096):
        yield f"cut to {length}", lambda length=length: (path / "ledger.db").write_bytes(data[:length])
    for number in range(25):
        at = [rng.randrange(100, len(data)) for _ in range(200)]

        def flip(at=at):
            changed = bytearray(data)
            for place in at:
                changed[place] ^= 0xFF
            (path / "ledger.db").write_bytes(changed)

        yield f"flipped {number}", flip
    for statement in (
        "UPDATE groups SET state = 'odd'", "UPDATE groups SET place = NULL", "UPDATE bodies SET body = x'c1'",
        "UPDATE bodies SET body = x'80'", "UPDATE bodies SET body = 'text'", "DELETE FROM bodies", "DROP TABLE bodies",
        "UPDATE groups SET segment = 9", "UPDATE groups SET segment = 'x' WHERE segment IS NOT NULL",
        "UPDATE groups SET start = NULL", "UPDATE groups SET length = -1", "UPDATE groups SET prompt = x'ff'",
        "UPDATE groups SET epoch = 'x'", "UPDATE groups SET counts = x'c1'", "UPDATE groups SET attempt = 'x'",
        "UPDATE meta SET value = x'c1' WHERE key = 'source_state'", "UPDATE meta SET value = 'x' WHERE key = 'settings'",
        "UPDATE meta SET value = '[1]' WHERE key = 'settings'", "UPDATE meta SET value = NULL WHERE key = 'format'",
        "UPDATE meta SET value = 5 WHERE key = 'source'", "DROP TABLE samples", "DROP VIEW whole", "DROP TABLE groups",
        "ALTER TABLE groups DROP COLUMN counts", "UPDATE groups SET state = 'quarantined', cause = 'odd', error = x'c1'",
    ):  # fmt: skip

        def change(statement=statement):
            (path / "ledger.db").write_bytes(data)
            db = apsw.Connection(str(path / "ledger.db"))
            try:
                db.execute("PRAGMA writable_schema = OFF; " + statement)
            except apsw.Error:
                pass  # this statement does not fit the tables: nothing is damaged
            finally:
                db.close()

        yield statement, change


async def test_f178_a_damaged_ledger_raises_the_documented_class(path):
    """A run and a reader; or the ledger is read as it is, where the damage hit nothing that is used."""
    await fill(path)
    wrong, raised = [], 0
    for what, damage in damages(path):
        for name in ("ledger.db-wal", "ledger.db-shm"):
            (path / name).unlink(missing_ok=True)
        damage()
        for use in (read_everything, run_again):
            try:
                await use(path)
            except LedgerError:
                raised += 1
            except Exception as error:  # ruff: ignore[blind-except]  every other class is what the test looks for
                wrong.append(f"{what}, {use.__name__}: {error!r}")
    assert not wrong, "\n".join(wrong)
    assert raised > 50


async def read_everything(path):
    """Read a ledger as inspect and export do."""
    await trio.lowlevel.checkpoint()
    with read_ledger(path) as reader:
        reader.identity(), reader.counts(), reader.next_step(), reader.weight_version(), reader.quarantined()
        for summary in list(reader.summaries()):
            reader.group_by_id(summary.id)
            reader.samples(summary.id)
            reader.summary_by_id(summary.id)
        list(reader.groups())


async def run_again(path):
    """Open a ledger as the next run does, and write."""
    async with open_ledger(path, sizes=SIZES) as ledger:
        await ledger.begin(IDENTITY)
        await ledger.record([finished(2)])


FORKS = """
import os, sys, time, trio
from trio_rollout.ledger import open_ledger

async def main():
    async with open_ledger(sys.argv[1]):
        if os.fork() == 0:
            print(os.getpid(), flush=True)
            time.sleep(1000)
        await trio.sleep_forever()

trio.run(main)
"""


async def test_f178_a_child_that_was_forked_and_holds_the_lock_is_named(path):
    """Its parent, which took the lock, is dead; a message with the parent's id would name no process."""
    with subprocess.Popen(  # ruff: ignore[create-subprocess-in-async-function]  plain, to be killed plainly
        [sys.executable, "-c", FORKS, str(path)], stdout=subprocess.PIPE, text=True
    ) as parent:
        child = int(await trio.to_thread.run_sync(parent.stdout.readline))
        with pytest.raises(LedgerError, match=f"is in use by process {parent.pid}: stop that run"):
            await reopened(path)
        parent.kill()
        await trio.to_thread.run_sync(parent.wait)
        with pytest.raises(
            LedgerError, match=f"in use by process {child}, forked from process {parent.pid}, which took"
        ):
            await reopened(path)
        watched = os.pidfd_open(child)
        os.kill(child, signal.SIGKILL)
        await trio.lowlevel.wait_readable(watched)
        os.close(watched)
    assert (await reopened(path)).unfinished == ()


def prompts(**changes):
    """Return three prompts, the second with changes."""
    return [Prompt(**({"id": str(n), "text": f"text {n}", "label": n} | (changes if n == 1 else {}))) for n in range(3)]


@pytest.mark.parametrize(
    "change",
    [{"id": "x"}, {"text": "other"}, {"label": 7}, {"text": None, "input_ids": [1]},
     {"text": None, "messages": [{"role": "user", "content": "text 1"}]}],
)  # fmt: skip
async def test_f178_another_iterable_source_is_refused(change):
    """By what the model and the reward get, and not by the ids alone, which are often numbers."""
    first = IterableSource(prompts())
    await first.take(2)
    state = first.state()

    IterableSource(prompts()).restore(state)
    with pytest.raises(SourceError, match="the state belongs to another"):
        IterableSource(prompts(**change)).restore(state)


async def test_f178_a_state_of_an_older_version_is_taken_by_its_ids():
    source = IterableSource(prompts())
    await source.take(2)
    state = {name: value for name, value in source.state().items() if name != "content"}
    again = IterableSource(prompts())
    again.restore(state)
    assert [prompt.id for prompt in await again.take(5)] == ["2"]


async def test_f178_labels_that_are_no_json_are_told_by_their_kind():
    source = IterableSource(prompts(label={"set": {1, 2}, "lone": "\ud800"}))
    await source.take(3)
    IterableSource(prompts(label={"set": {3}, "lone": "\ud800"})).restore(source.state())
