"""The engine that lives between the host's calls, with its bridge, its servers and its settings."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, final

import attrs

from trio_rollout import Deadlines, EngineSettings, RolloutEngine, open_rollout_engine, open_sglang_servers
from trio_rollout.sources import IterableSource

from .._host_servers import HostServers
from ..bridge import Bridge, BridgeSettings, OnLeak, open_bridge
from ._adapters import Aborts, Filter, Generate, GroupReward, Reward
from ._arguments import Arguments
from ._evaluation import Evaluated, eval_prompts, evaluated
from ._plugins import Plugins
from ._samples import index_of, made_of
from ._source import HostSource


@final
@attrs.define(eq=False)
class HostEngine:
    """On the engine's thread: an open engine, and the answers to the host's calls."""

    args: Arguments
    engine: RolloutEngine
    bridge: Bridge
    plugins: Plugins
    dropped: dict[str, int]
    aborts: Aborts

    async def train(self, weight_version: int | None = None) -> tuple[list[list[Any]], dict[str, Any]]:
        """Return the next ``rollout_batch_size`` groups in the host's order, and metrics. Cancelled, it has taken nothing.

        ``weight_version``: the version that the servers have, if the host says so.
        """
        if weight_version is not None:
            await self.engine.note_weight_version(weight_version)
        batch = await self.engine.next_batch(self.args.rollout_batch_size)
        await batch.ack()  # at once: there is no ledger
        groups = sorted((made_of(group) for group in batch.groups), key=index_of)
        return groups, self._metrics()

    def _metrics(self) -> dict[str, Any]:
        now = self.engine.statistics()
        metrics: dict[str, Any] = {f"rollout/dynamic_filter/drop_{name}": count for name, count in self.dropped.items()}
        self.dropped.clear()
        metrics |= {
            "rollout/fully_async/queue_size": now.ready,
            "rollout/fully_async/running": now.running,
            "rollout/fully_async/waiting": now.waiting,
            "rollout/fully_async/quarantined": now.quarantined,
        }
        metrics |= {f"rollout/fully_async/requeued_{cause.value}": count for cause, count in now.requeues.items()}
        metrics |= {f"rollout/fully_async/retried_{cause.value}": count for cause, count in now.retries.items()}
        return metrics

    async def evaluate(self) -> list[Evaluated]:
        """Evaluate all datasets at once, while production goes on."""
        prompts = eval_prompts(self.args)
        generate = Generate(self.args, self.plugins, self.bridge, self.aborts, evaluation=True)
        groups = await self.engine.evaluate(IterableSource(prompts), generate, samples_per_prompt=1)
        return evaluated(self.args, groups)


def _servers_at(args: Arguments) -> dict[str, Any]:
    """Return the servers' addresses, and the tokenizer if it can be read."""
    checkpoint = args.hf_checkpoint
    readable = checkpoint is not None and (Path(checkpoint) / "tokenizer.json").is_file()
    where: dict[str, Any] = {"tokenizer": checkpoint if readable else None}
    if args.rollout_external_engine_addrs:
        where["urls"] = [url if "//" in url else f"http://{url}" for url in args.rollout_external_engine_addrs]
    else:
        where["router"] = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    return where


def host_loop(args: Arguments) -> Any:
    """Return the host's own loop, which makes it at the first call: user coroutines and their global clients belong to it."""
    return args.module("utils.async_utils").get_async_loop().loop


def settings_of(args: Arguments) -> EngineSettings:
    """Return the host's flags as the engine's settings."""
    samples = args.n_samples_per_prompt
    return EngineSettings(
        samples_per_prompt=samples,
        max_running=args.groups_at_once * samples,
        max_ready=args.rollout_batch_size,
        partial=bool(args.partial_rollout),
        deadlines=Deadlines(group=args.group_timeout, turn=None),
        staleness=args.staleness,
    )


@asynccontextmanager
async def open_host_engine(plugins: Plugins, data_source: Any, loop: Any) -> AsyncGenerator[HostEngine]:
    """Open everything that lives between the calls. Leaving drains the engine."""
    args, dropped = plugins.args, dict[str, int]()
    limits = settings_of(args)
    aborts = Aborts(limits.max_running)
    # Agent adapters start servers of their own at their first use; they must outlive the call that did.
    settings = BridgeSettings(on_leak=OnLeak.WARN)
    async with (
        open_bridge(loop=loop, settings=settings) as bridge,
        open_sglang_servers(**_servers_at(args)) as servers,
        open_rollout_engine(
            HostSource(data_source, args.n_samples_per_prompt),
            Generate(args, plugins, bridge, aborts),
            servers=HostServers(servers),
            reward=None if args.group_rm else Reward(plugins, bridge),
            group_reward=GroupReward(plugins, bridge) if args.group_rm else None,
            group_filter=Filter(plugins, bridge, dropped) if args.dynamic_sampling_filter_path else None,
            settings=limits,
        ) as engine,
    ):
        yield HostEngine(args, engine, bridge, plugins, dropped, aborts)
