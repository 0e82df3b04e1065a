"""The task tree shows what each task waits for, until when, and the cancellations under way; and it never fails."""

import trio

from trio_rollout.observe import task_tree
from trio_rollout.observe._tree import cancel_reason, is_cancelled, scopes_of


async def wait_for_event(event: trio.Event) -> None:
    """A helper, to be seen on the await stack."""
    await event.wait()


async def test_each_task_has_its_await_stack_and_its_scopes(autojump_clock):
    async def worker(event: trio.Event) -> None:
        with trio.move_on_after(5), trio.CancelScope(shield=True):
            await wait_for_event(event)

    event = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker, event, name="group 7")
        await trio.sleep(1)
        tree = task_tree()
        event.set()
    lines = tree.splitlines()
    place = next(number for number, line in enumerate(lines) if "* group 7" in line)
    assert "worker:" in lines[place]
    assert lines[place].endswith(" > Event.wait")
    assert "wait_for_event:" in lines[place]
    assert lines[place + 1].strip() == "scope: deadline in 4.000 s"
    assert lines[place + 2].strip() == "scope: shielded"
    assert "nursery of 1" in lines[place - 1]
    assert "test_each_task" in tree
    assert "run_sync_soon" not in tree


async def test_a_cancellation_is_shown_with_its_reason():
    async def stubborn(event: trio.Event) -> None:
        with trio.CancelScope(shield=True):
            await event.wait()

    event = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stubborn, event, name="stubborn")
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel(reason="deadline: the group's deadline passed")
        tree = task_tree()
        event.set()
    assert 'cancelled (explicit "deadline: the group\'s deadline passed")' in tree
    assert "* stubborn: " in tree  # not cancelled itself: it is shielded
    assert "[cancelled]: " in tree


async def test_the_tree_can_start_anywhere_and_is_bounded():
    async with trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(trio.sleep_forever, name=f"sleeper {number}")
        await trio.testing.wait_all_tasks_blocked()
        whole = task_tree(trio.lowlevel.current_task())
        cut = task_tree(trio.lowlevel.current_task(), most_tasks=10)
        nursery.cancel_scope.cancel()
    assert whole.count("* sleeper") == 50
    assert cut.count("* ") == 10
    assert "more tasks are not shown" in cut


async def test_a_description_of_scopes_is_added():
    with trio.CancelScope() as scope:
        await trio.lowlevel.checkpoint()
        tree = task_tree(describe=lambda found: "the group's scope" if found is scope else None)
    assert "scope: the group's scope" in tree


async def test_what_cannot_be_shown_says_so():
    """A description that fails hides its task's scopes, not the tree."""

    def broken(_: trio.CancelScope) -> str:
        raise ZeroDivisionError("no description")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever, name="sleeper")
        await trio.testing.wait_all_tasks_blocked()
        tree = task_tree(describe=broken)
        nursery.cancel_scope.cancel()
    assert "could not be shown: ZeroDivisionError: no description" in tree
    assert "could not be shown: AttributeError" in task_tree(root=object())  # type: ignore[arg-type]


def test_outside_of_a_run_there_is_no_tree():
    assert task_tree() == "(no Trio run in this thread)"


async def test_a_very_deep_tree():
    async def deeper(levels: int) -> None:
        if levels == 0:
            nonlocal tree
            tree = task_tree()
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(deeper, levels - 1)

    tree = ""
    await deeper(1500)
    assert tree.count("* ") > 1500
    assert "could not be shown" not in tree


async def test_canary_trios_private_names_mean_what_the_tree_takes_them_for():
    """If this fails after an update of Trio, look at observe/_tree.py."""
    task = trio.lowlevel.current_task()
    with trio.CancelScope() as outer, trio.CancelScope() as inner:
        await trio.lowlevel.checkpoint()
        assert scopes_of(task)[-2:] == [outer, inner]
        assert not is_cancelled(task)
        outer.cancel(reason="told to")
        assert is_cancelled(task)
        assert cancel_reason(outer) == "explicit 'told to'"
    assert outer not in scopes_of(task)
