"""Helpers that the tests of slime and of miles share: an importable host, its data source, its trainer."""

import contextlib
import importlib
import sys
import threading
from argparse import Namespace
from pathlib import Path

import httpx

from trio_rollout_compat.slime import close_engines
from trio_rollout_compat.slime._adapters import load

HOSTS = Path(__file__).parent / "hosts"


@contextlib.contextmanager
def importable(monkeypatch, name):
    """Make the stand-in for a host importable; its loop and the engines end with the test."""
    monkeypatch.syspath_prepend(str(HOSTS))
    load.cache_clear()
    with contextlib.ExitStack() as afterwards:
        afterwards.callback(forget, name)
        afterwards.callback(close_engines)
        yield importlib.import_module(f"{name}.utils.async_utils")


def forget(name):
    """End the host's loop, if there is one, and unload its modules."""
    loop = sys.modules[f"{name}.utils.async_utils"].async_loop
    if loop is not None:
        loop.stop()
    for module in [module for module in sys.modules if module.partition(".")[0] in {name, "user_functions"}]:
        del sys.modules[module]


class DataSource:
    """The host's data source; it records which threads called it, and which groups came back."""

    def __init__(self, samples=2, host="slime"):
        self.samples, self.host, self.taken, self.threads, self.returned = samples, host, 0, set(), []

    def get_samples(self, count):
        self.threads.add(threading.current_thread())
        return [self._group() for _ in range(count)]

    def _group(self):
        sample = importlib.import_module(f"{self.host}.utils.types").Sample
        number, self.taken = self.taken, self.taken + 1
        first = number * self.samples
        return [sample(group_index=number, index=first + n, prompt=f"prompt {number}") for n in range(self.samples)]

    def add_samples(self, groups):
        self.threads.add(threading.current_thread())
        assert all(len(group) == self.samples for group in groups)
        self.returned.append(groups)


def arguments(server, **more):
    defaults = {
        "rollout_batch_size": 3,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": 8,
        "rollout_external_engine_addrs": [server.value.url],
    }
    return Namespace(**{**defaults, **more})


def rows(output):
    return [sample for group in output.samples for sample in group]


async def update_behind_our_back(fake):
    """Pause, update and resume each server, as the host does."""
    await fake.until(lambda: fake.in_flight == 2)
    async with httpx.AsyncClient(base_url=fake.url, trust_env=False) as client:
        await client.post("/pause_generation", json={"mode": "abort"})
        await client.post("/update_weight_version", json={"new_version": "7"})
        await client.post("/continue_generation", json={})
