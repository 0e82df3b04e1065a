"""A service outlives its body's cleanup, whenever the cancellation comes."""

import pytest
import trio
import trio.testing

from trio_rollout.lowlevel import open_service, open_service_nursery

STARTING = 3  # checkpoints that the service takes to start


async def run(cancel_after):
    """Cancel everything ``cancel_after`` checkpoints after the service began to start; return the events in order."""
    log, outer = [], trio.CancelScope()

    async def serve(*, task_status):
        try:
            for _ in range(STARTING):
                await trio.lowlevel.checkpoint()
            task_status.started()
            await trio.sleep_forever()
        finally:
            log.append("service")

    async def leave(_value, _error):
        await trio.lowlevel.checkpoint()
        log.append("leave")

    async def cancel():
        for _ in range(cancel_after):
            await trio.lowlevel.checkpoint()
        outer.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(cancel)
        with outer:
            async with open_service(serve, leave):
                try:
                    await trio.sleep_forever()
                finally:
                    log.append("body")
    return log


@pytest.mark.parametrize("cancel_after", range(STARTING + 4))
async def test_a_service_that_has_started_outlives_its_body_whenever_it_is_cancelled(cancel_after):
    """Also in the tick between the service's start and the body's: several orders of the tasks are tried."""
    for _ in range(30):
        assert await run(cancel_after) in (["service"], ["body", "leave", "service"])


async def test_a_body_that_was_only_cancelled_adds_nothing_to_the_service_s_failure():
    """Also when a nursery inside the body has put the Cancelled into groups."""

    async def serve(*, task_status):
        task_status.started()
        await trio.lowlevel.checkpoint()
        raise OSError("the service's own")

    async def leave(_value, _error):
        await trio.lowlevel.checkpoint()

    with pytest.raises(OSError, match="own"):
        async with open_service(serve, leave), trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            await trio.sleep_forever()


async def test_a_service_nursery_serves_until_its_body_is_left():
    """A cancellation reaches the body at once, and the tasks of the nursery only behind the body's cleanup."""
    log = []

    async def serve():
        try:
            await trio.sleep_forever()
        finally:
            log.append("service")

    with trio.CancelScope() as outer:
        async with open_service_nursery() as nursery:
            nursery.start_soon(serve)
            await trio.testing.wait_all_tasks_blocked()
            outer.cancel()
            try:
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    await trio.testing.wait_all_tasks_blocked()
                log.append("body")
    assert log == ["body", "service"]


async def test_a_failure_in_a_service_nursery_ends_the_body_and_comes_out_bare():
    async def fail():
        await trio.lowlevel.checkpoint()
        raise OSError("the service's own")

    with pytest.raises(OSError, match="the service's own"):
        async with open_service_nursery() as nursery:
            nursery.start_soon(fail)
            await trio.sleep_forever()


@pytest.mark.parametrize("cancels", [False, True])
async def test_f139_if_body_and_service_both_fail_neither_error_is_lost(cancels):
    async def serve(*, task_status):
        task_status.started()
        await trio.testing.wait_all_tasks_blocked()
        raise OSError("the service")

    async def leave(_value, _error):
        await trio.sleep(0.01)

    with pytest.raises((BaseExceptionGroup, OSError)) as caught:
        async with open_service(serve, leave):
            if cancels:
                await trio.sleep_forever()  # the service's failure cancels it: that is no error of the body's
            raise KeyError("the body")
    if cancels:
        assert type(caught.value) is OSError
    else:
        assert {type(error) for error in caught.value.exceptions} == {KeyError, OSError}
