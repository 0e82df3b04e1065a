"""Sandboxes of slime's protocol: made and destroyed even if their rollout is cancelled, each command run once."""

import math
from functools import partial
from pathlib import Path

import pytest
import trio

from trio_rollout import Cause, EngineSettings, IterableSource, Retry, open_rollout_engine
from trio_rollout.errors import ToolError
from trio_rollout.testing import FakeServers, Say, prompts
from trio_rollout.tools import SandboxSettings, SandboxSpec
from trio_rollout.tools._sandboxes.sandbox import open_sandbox
from trio_rollout_compat import open_bridge
from trio_rollout_compat.sandboxes import open_slime_sandboxes

from .e2b_double import Sandbox, Service

QUICK = SandboxSettings(backoff=0.01)


@pytest.fixture
def service(tmp_path):
    return Service(tmp_path)


@pytest.fixture
async def provider(service):
    async with (
        open_bridge("thread") as bridge,
        open_slime_sandboxes(partial(Sandbox, service), bridge=bridge) as provider,
    ):
        yield provider
        with trio.fail_after(20):
            while service.alive:
                await trio.sleep(0.01)


async def test_commands_and_files_through_each_backend(bridge, service):
    async with (
        open_slime_sandboxes(partial(Sandbox, service), bridge=bridge, user="agent") as provider,
        open_sandbox(provider, env={"A": "1"}) as sandbox,
    ):
        await sandbox.write_file("in.txt", "words")
        result = await sandbox.exec(["sh", "-c", 'cat in.txt; echo "$A$B" >&2; exit 3'], env={"B": "2"})
        assert (result.exit_code, result.stdout, result.stderr) == (3, b"words", b"12\n")
        assert await sandbox.read_file("in.txt") == b"words"
        with pytest.raises(FileNotFoundError):
            await sandbox.read_file("other.txt")

    assert service.alive == set()
    assert (provider.counts.created, provider.counts.destroyed, provider.counts.leaked) == (1, 1, 0)
    assert {call["user"] for call in service.asked} == {"agent"}


async def test_words_are_words_although_the_service_takes_a_line(provider):
    async with open_sandbox(provider) as sandbox:
        words = ["printf", "%s|", "a b", "$HOME", "`id`", "*", "it's", "", ";", "\n"]
        result = await sandbox.exec(words, cwd=".")
        with pytest.raises(ValueError, match="argv is empty"):
            await sandbox.exec([])

    assert result.stdout == b"a b|$HOME|`id`|*|it's||;|\n|"


async def test_words_may_be_bytes_or_paths_and_a_directory_may_look_like_an_option(provider, tmp_path):
    async with open_sandbox(provider) as sandbox:
        assert (await sandbox.exec([b"echo", Path("a b"), "$c"], timeout=math.inf)).stdout == b"a b $c\n"
        assert (await sandbox.exec(["pwd"], cwd=str(tmp_path))).stdout == f"{tmp_path}\n".encode()
        assert (await sandbox.exec(["pwd"], cwd="-P")).exit_code != 0, "it is no option, and there is no such directory"
        with pytest.raises(ValueError, match="null character"):
            await sandbox.exec(["a\0b"])


async def test_a_command_over_its_limit_is_killed_and_a_result(provider, service, given_time):
    """The service would only stop waiting: a limit inside of it kills."""
    async with open_sandbox(provider) as sandbox:
        result = await given_time(lambda limit: sandbox.exec(["sh", "-c", "echo $$; exec sleep 600"], timeout=limit))
        assert (result.exit_code, result.timed_out) == (124, True)
        gone = await sandbox.exec(["kill", "-0", result.stdout.decode().strip()])
        assert gone.exit_code != 0
        own = await sandbox.exec(["sh", "-c", "exit 124"], timeout=10)
        assert (own.exit_code, own.timed_out) == (124, False)

    assert service.asked[0]["timeout"] > 0.2


async def test_a_service_that_gives_up_waiting_is_a_timeout(provider, service):
    service.exec_errors = [TimeoutError()]
    async with open_sandbox(provider) as sandbox:
        result = await sandbox.exec(["make"], timeout=60)

    assert (result.exit_code, result.timed_out) == (124, True)


async def test_a_cancelled_creation_does_not_hold_up_its_rollout_and_is_destroyed_all_the_same(provider, service):
    """The service needs a second; the rollout leaves at once, and the sandbox is killed when it is there."""
    service.latency = 1.0
    began = trio.current_time()
    with trio.move_on_after(0.1) as scope:
        async with open_sandbox(provider, settings=SandboxSettings(create=30)):
            pytest.fail("the block of a cancelled creation must not run")

    assert scope.cancelled_caught
    assert trio.current_time() - began < 20
    assert service.created == 1
    assert service.alive == set()
    assert provider.counts.destroyed == 1


async def test_a_creation_that_is_refused_is_tried_again_and_one_that_may_have_happened_is_not(provider, service):
    service.create_errors = [ConnectionRefusedError(), ConnectionRefusedError()]
    async with open_sandbox(provider, settings=QUICK):
        assert service.created == 1
    service.create_errors = [ConnectionResetError("after the request")]
    with pytest.raises(ToolError, match="after the request"):
        async with open_sandbox(provider, settings=QUICK):
            pass

    assert service.created == 2
    assert service.alive == set()


async def test_the_user_may_say_which_failures_had_no_effect(bridge, service):
    service.create_errors = [OSError("no quota"), ConnectionRefusedError(111, "refused")]
    async with open_slime_sandboxes(
        partial(Sandbox, service), bridge=bridge, never_ran=lambda error: "quota" in str(error)
    ) as provider:
        with pytest.raises(ToolError, match="refused"):
            async with open_sandbox(provider, settings=QUICK):
                pass

    assert service.create_errors == []


async def test_a_command_that_may_have_run_is_not_run_again(provider, service):
    async with open_sandbox(provider, settings=QUICK) as sandbox:
        service.exec_errors = [ConnectionResetError("lost")]
        with pytest.raises(ToolError, match="lost"):
            await sandbox.exec(["charge", "the", "card"])
        assert len(service.asked) == 1
        service.exec_errors = [ConnectionRefusedError()]
        assert (await sandbox.exec(["true"])).exit_code == 0

    assert [call["idempotent"] for call in service.asked] == [False] * 3


async def test_an_end_that_fails_is_tried_again_then_counted_and_changes_no_result(provider, service):
    service.kill_errors = [RuntimeError("500")] * 2
    async with open_sandbox(provider, settings=QUICK):
        pass
    assert (service.alive, provider.counts.leaked) == (set(), 0)

    service.kill_errors = [RuntimeError("500")] * 100
    async with open_sandbox(provider, settings=QUICK):
        result = "the sample"
    assert (result, provider.counts.leaked) == ("the sample", 1)
    service.kill_errors.clear()
    service.alive.clear()


async def test_leaving_the_provider_destroys_every_sandbox_that_is_left(service):
    service.latency = 0.5
    async with open_bridge("thread") as bridge:
        async with open_slime_sandboxes(partial(Sandbox, service), bridge=bridge) as provider:
            with trio.move_on_after(0.1):
                await provider.create(SandboxSpec(name="forgotten", label="test", lifetime=60.0))
        assert service.alive == set()
        assert service.created == 1


async def test_in_the_engine_one_that_cannot_be_created_is_infrastructure(provider, service):
    async def generate(_prompt, rollout):
        async with rollout.tools.open_sandbox(provider, settings=QUICK) as sandbox:
            assert (await sandbox.exec(["true"])).exit_code == 0
        return rollout.finish([await rollout.generate([1, 2])])

    service.create_errors = [OSError("no quota")]
    async with open_rollout_engine(
        IterableSource(prompts(1)),
        generate,
        servers=FakeServers(plan=lambda *_: Say(seconds=0.0)),
        settings=EngineSettings(samples_per_prompt=1, retry=Retry(backoff_base=0.0)),
    ) as engine:
        batch = await engine.next_batch(1)
        assert engine.statistics().retries[Cause.INFRASTRUCTURE] == 1

    assert batch.groups[0].attempt == 1
    assert service.alive == set()
