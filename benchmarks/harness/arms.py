"""The arms that do a job: the engine, and the baseline with each client. A client process runs this module."""

import gc
import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

OURS = "trio_rollout"
HTTPX = "httpx"
AIOHTTP = "aiohttp"
AIOHTTP_UVLOOP = "aiohttp + uvloop"
CONTROL = "aiohttp + uvloop + our decoder"
ARMS = (OURS, HTTPX, AIOHTTP, AIOHTTP_UVLOOP, CONTROL)


def world_of(arm: str) -> Any:
    """The world of an arm. Imports only what it needs, so that an arm's memory is its own."""
    if arm == OURS:
        from .trio_world import TrioWorld  # noqa: PLC0415

        return TrioWorld()
    from asyncio_baseline.world import AsyncioWorld  # noqa: PLC0415

    dresses: dict[str, Callable[[], Any]] = {
        HTTPX: lambda: AsyncioWorld(client_name="httpx"),
        AIOHTTP: AsyncioWorld,
        AIOHTTP_UVLOOP: lambda: AsyncioWorld(fast_loop=True),
        CONTROL: lambda: AsyncioWorld(fast_loop=True, our_decoder=True),
    }
    return dresses[arm]()


def main(arm: str, job: str, spec: str) -> None:
    """Do a job in this process and print its figures as a line of JSON."""
    from .jobs import JOBS  # noqa: PLC0415
    from .spec import Spec  # noqa: PLC0415

    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    world = world_of(arm)
    gc.collect()
    gc.freeze()  # what the imports made is not the arm's
    print(json.dumps(world.run(JOBS[job], world, Spec(**json.loads(spec)))), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main(*sys.argv[1:])
