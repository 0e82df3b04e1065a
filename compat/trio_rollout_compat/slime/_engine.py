"""slime's rollout function, and the engines that live between its calls: one a process for each data source.

slime calls a synchronous function, found by its dotted path, on its rollout manager's thread. It passes nothing between two
calls that could hold an engine, so the engines are kept in this module: the one place of the project with module state.
"""

import functools
import os
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, final

import attrs
import trio

from trio_rollout import Deadlines, EngineSettings, RolloutEngine, open_rollout_engine, open_sglang_servers
from trio_rollout.errors import SettingsError
from trio_rollout.sources import IterableSource

from .._host_servers import HostServers
from ..bridge import BridgeSettings, OnLeak, open_bridge
from ..thread import EngineThread
from ._adapters import Aborts, HostFunctions, HostSource, Plugins, load
from ._arguments import Arguments
from ._evaluation import eval_prompts, evaluated
from ._samples import index_of, made_of


@final
@attrs.define(eq=False)
class HostEngine:
    """On the engine's thread: an open engine, and the answers to the host's calls."""

    engine: RolloutEngine
    functions: HostFunctions

    async def train(self, weight_version: int | None = None) -> tuple[list[list[Any]], dict[str, Any]]:
        """Return the next ``rollout_batch_size`` groups in the host's order, and metrics. Cancelled, it has taken nothing.

        ``weight_version``: the version that the servers have, if the host says so.
        """
        if weight_version is not None:
            await self.engine.note_weight_version(weight_version)
        batch = await self.engine.next_batch(self.functions.args.rollout_batch_size)
        with trio.CancelScope(shield=True):  # what was taken is handed out
            await batch.ack()  # at once: there is no ledger
        groups = sorted((made_of(group) for group in batch.groups), key=index_of)
        return groups, self._metrics()

    def _metrics(self) -> dict[str, Any]:
        now, dropped = self.engine.statistics(), self.functions.dropped
        metrics: dict[str, Any] = {f"rollout/dynamic_filter/drop_{name}": count for name, count in dropped.items()}
        dropped.clear()
        metrics |= {
            "rollout/fully_async/queue_size": now.ready,
            "rollout/fully_async/running": now.running,
            "rollout/fully_async/waiting": now.waiting,
            "rollout/fully_async/quarantined": now.quarantined,
        }
        metrics |= {f"rollout/fully_async/requeued_{cause.value}": count for cause, count in now.requeues.items()}
        metrics |= {
            f"rollout/fully_async/wasted_tokens_{cause.value}": count for cause, count in now.tokens.wasted.items()
        }
        metrics |= {f"rollout/fully_async/retried_{cause.value}": count for cause, count in now.retries.items()}
        return metrics

    async def evaluate(self) -> tuple[dict[str, Any], dict[str, int]]:
        """Evaluate all datasets at once, while production goes on; return the results and metrics."""
        source = IterableSource(eval_prompts(self.functions.args))
        generate = functools.partial(self.functions.generate, evaluation=True)
        return evaluated(self.functions.args, await self.engine.evaluate(source, generate, samples_per_prompt=1))


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
        retry=args.retry,
    )


@asynccontextmanager
async def open_host_engine(plugins: Plugins, data_source: Any, loop: Any) -> AsyncGenerator[HostEngine]:
    """Open everything that lives between the calls. Leaving drains the engine."""
    args, limits = plugins.args, settings_of(plugins.args)
    # Agent adapters start servers of their own at their first use; they must outlive the call that did.
    settings = BridgeSettings(on_leak=OnLeak.WARN)
    async with (
        open_bridge(loop=loop, settings=settings) as bridge,
        open_sglang_servers(**_servers_at(args)) as servers,
    ):
        functions = HostFunctions(plugins, bridge, Aborts(limits.max_running))
        async with open_rollout_engine(
            HostSource(data_source, args.n_samples_per_prompt),
            functions.generate,
            servers=HostServers(servers),
            reward=None if args.group_rm else functions.reward,
            group_reward=functions.group_reward if args.group_rm else None,
            group_filter=functions.verdict if args.dynamic_sampling_filter_path else None,
            settings=limits,
        ) as engine:
            yield HostEngine(engine, functions)


_LOCK: Final = threading.Lock()
_ENGINES: Final[dict[tuple[int, int], tuple[Any, Any, EngineThread[HostEngine]]]] = {}


def engine_for(plugins: Plugins, data_source: Any) -> EngineThread[HostEngine]:
    """Return the engine of this data source; open it at the first call. From any thread; other calls wait meanwhile.

    Raises:
      SettingsError: a flag is out of its range or would be ignored, or the data source's engine runs with other ``args``.
    """
    key, args = (os.getpid(), id(data_source)), plugins.args
    with _LOCK:
        if key not in _ENGINES:
            args.refuse_unsupported()
            lifespan = functools.partial(open_host_engine, plugins, data_source, host_loop(args))
            thread = EngineThread(lifespan, name=f"trio-rollout {args.host}")
            # Entered only when it runs: a failed start may be tried again. The data source is kept, so that its id is not reused.
            _ENGINES[key] = (data_source, args.given, thread.start())
        _, known, thread = _ENGINES[key]
    if known is not args.given and vars(known) != vars(args.given):
        raise SettingsError("this data source's engine runs with other args; call close_engines() first")
    return thread


def close_engines(data_source: Any = None) -> None:
    """Drain and close every engine of this process, or that of one data source; unfinished groups go back to their source.

    Raises:
      BaseException: an engine's failure that was not raised to a caller before.
    """
    with _LOCK:
        wanted = [
            key for key in _ENGINES if key[0] == os.getpid() and (data_source is None or key[1] == id(data_source))
        ]
        threads = [_ENGINES.pop(key)[2] for key in wanted]
    for thread in threads:
        thread.close(thread.grace)


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:  # ruff: ignore[boolean-type-hint-positional-argument, boolean-default-value-positional-argument]  slime's signature
    """``--rollout-function-path trio_rollout_compat.slime.generate_rollout``; for ``--eval-function-path`` as well.

    The first call opens the engine, which goes on producing between the calls, until the process ends or ``close_engines``.
    Blocks until ``rollout_batch_size`` groups are there, or everything is evaluated.

    Raises:
      SettingsError: a flag is out of its range or would be ignored, or this data source was used with other ``args`` before.
      EngineClosed: the engine has failed; the cause is its failure.
      Exception: the engine's own failure, such as an exhausted failure budget.
    """
    del rollout_id
    read = Arguments(args)
    thread = engine_for(Plugins(read), data_source)
    return evaluated_by(thread, read) if evaluation else trained_by(thread, read)


def trained_by(thread: EngineThread[HostEngine], args: Arguments, weight_version: int | None = None) -> Any:
    """Return the next batch as the host's ``RolloutFnTrainOutput``."""
    samples, metrics = thread.call(thread.value.train, weight_version)
    if (path := args.rollout_sample_filter_path) is not None:
        load(path)(args.given, samples)
    return args.module("rollout.base_types").RolloutFnTrainOutput(samples=samples, metrics=metrics)


def evaluated_by(thread: EngineThread[HostEngine], args: Arguments) -> Any:
    """Evaluate all datasets and return the host's ``RolloutFnEvalOutput``.

    Raises:
      SettingsError: ``--group-rm`` was given.
    """
    if args.group_rm:
        raise SettingsError("--group-rm: evaluation has no groups")
    data, metrics = thread.call(thread.value.evaluate)
    return args.module("rollout.base_types").RolloutFnEvalOutput(data=data, metrics=metrics)
