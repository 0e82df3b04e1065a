"""A service outlives its body's wrap-up, whenever the cancellation comes."""

import pytest
import trio

from trio_rollout._util.service import open_service

STARTING = 3  # checkpoints that the service takes to start


async def run(cancel_after):
    """Cancel everything ``cancel_after`` checkpoints after the service began to start; what happened, in order."""
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
    """Also in the tick between its start and the body's: several orders of the tasks are tried."""
    for _ in range(30):
        assert await run(cancel_after) in (["service"], ["body", "leave", "service"])


async def test_a_body_that_was_only_cancelled_adds_nothing_to_the_service_s_failure():
    """Also when a nursery of the body's own has put its Cancelled into groups."""

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
