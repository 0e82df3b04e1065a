"""A whole engine with its servers in one seeded run: one seed, one interleaving, the same digest every time.

The world simulates the surroundings of the engine: a network, hosts, threads, a disk, randomness, time. The scenario opens
what it needs through the world::

    async def scenario(world):
        fake = FakeSGLang()
        world.net.add_host("http://a:1", fake.serve)
        async with world.open_servers(["http://a:1"]) as servers:
            async with world.open_engine(source, SingleTurn(sampling), servers=servers) as engine:
                async for batch in engine.batches(4):
                    await batch.ack()

    SimWorld(seed=7).run(scenario)

``explore`` runs one scenario under many seeds.
"""

import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar, TypeVarTuple, final

import attrs
import trio

from ..._core.settings import EngineSettings
from ..._util.ports import Ports
from ...abc import Generate, InferenceServers, Source
from ...engine._engine import RolloutEngine, open_rollout_engine
from ...ledger import DiskLedger, open_ledger
from ...sglang import ServerSettings, SGLangServers, open_sglang_servers
from .._invariants import Invariants
from .._points import Inject, Point, PointFailure, Sweep
from .connection import Link, NetFaults
from .conservation import Conservation
from .disk import SimDisk
from .files import SimFiles, shuffled
from .network import SimNet, open_sim_net
from .run import WEEK, SimResult, sim_run

T = TypeVar("T")


@final
@attrs.frozen(kw_only=True)
class SimIO:
    """Blocking calls without threads, for ``open_ledger(..., io=SimIO())``: a real thread would make a virtual clock run away.

    A call is made in place after up to ``longest_s`` virtual seconds, drawn from ``rng``. Like a real call it can be cancelled
    while it waits for its token, and not once it has begun.
    """

    longest_s: float = 0.005
    rng: random.Random = attrs.field(factory=lambda: random.Random(0))

    async def __call__(self, call: Callable[[], T], *, limiter: trio.CapacityLimiter) -> T:
        async with limiter:
            with trio.CancelScope(shield=True):
                await trio.sleep(self.longest_s * self.rng.random())
            return call()


Args = TypeVarTuple("Args")


@final
@attrs.define(eq=False, repr=False, kw_only=True)
class SimWorld:
    """One world for one run. ``rng`` is the scenario's randomness; each part of the world has another one of the same seed.

    ``sometimes`` counts the interesting states of the run, with those of the network. ``invariants`` hold between any two
    steps; ``open_engine`` adds conservation.
    """

    seed: int
    link: Link = attrs.field(factory=Link)
    faults: NetFaults = attrs.field(factory=NetFaults)
    blocking_s: float = 0.005
    """The longest time of a call that would block a thread, such as a write, in seconds."""
    invariants: Invariants = attrs.field(factory=Invariants)
    seen: Counter[str] = attrs.field(factory=Counter, init=False)
    disk: SimDisk = attrs.field(factory=SimDisk, init=False)
    _net: SimNet | None = attrs.field(default=None, init=False)
    rng: random.Random = attrs.field(init=False)
    ports: Ports = attrs.field(init=False)
    io: SimIO = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.rng = self._random("scenario")
        self.ports = Ports(self._random("ports"))
        self.io = SimIO(longest_s=self.blocking_s, rng=self._random("io"))

    def _random(self, part: str) -> random.Random:
        return random.Random(f"{part} of world {self.seed}")

    @property
    def net(self) -> SimNet:
        """The network, while the world runs."""
        if self._net is None:
            raise RuntimeError("this world does not run: the network exists inside SimWorld.run only")
        return self._net

    def run(
        self,
        scenario: Callable[["SimWorld"], Awaitable[T]],
        *,
        limit: float = WEEK,
        max_steps: int = 5_000_000,
        instruments: Sequence[trio.abc.Instrument] = (),
    ) -> SimResult[T]:
        """Run ``scenario(world)``; raises as ``sim_run`` does. A world runs once."""
        return sim_run(
            self.inside,
            scenario,
            seed=self.seed,
            limit=limit,
            max_steps=max_steps,
            invariants=self.invariants,
            instruments=instruments,
        )

    async def inside(self, scenario: Callable[["SimWorld"], Awaitable[T]]) -> T:
        """Run ``scenario(world)`` in a run that is already simulated, by ``cancel_everywhere`` or ``throw_everywhere``.

        Give such a world ``invariants=arm.invariants``: only those are checked.
        """
        if self._net is not None:
            raise RuntimeError("a world runs once: its disk and its randomness are used up")
        rng = self._random("net")
        async with open_sim_net(rng=rng, link=self.link, faults=self.faults, events=self.seen) as net:
            self._net = net
            return await scenario(self)

    def sometimes(self, name: str, happened: object = True) -> None:  # ruff: ignore[boolean-default-value-positional-argument]
        """Count an interesting state."""
        self.seen[name] += bool(happened)

    async def run_sync(self, fn: Callable[[*Args], T], /, *args: *Args) -> T:
        """Call ``fn`` in place after a virtual delay, instead of in a thread. For ``open_sglang_servers(run_sync=...)``."""
        return await self.io(partial(fn, *args), limiter=trio.CapacityLimiter(1))

    @asynccontextmanager
    async def open_servers(
        self, urls: Iterable[str], *, settings: ServerSettings | None = None, **more: Any
    ) -> AsyncGenerator[SGLangServers]:
        """Open ``open_sglang_servers`` over this world's network."""
        async with open_sglang_servers(
            list(urls),
            settings=settings or ServerSettings(vocab_size=2**31 - 1),
            ports=self.ports,
            connect=self.net.connect,
            run_sync=self.run_sync,
            **more,
        ) as servers:
            yield servers

    @asynccontextmanager
    async def open_ledger(self, path: str = "ledger", **more: Any) -> AsyncGenerator[DiskLedger]:
        """Open ``open_ledger`` on this world's disk; leave it and open it again for a restart."""
        async with open_ledger(path, disk=self.disk, io=self.io, **more) as ledger:
            yield ledger

    def cut_power(self) -> None:
        """Replace the disk by one of those that a power cut may leave: some unsynced writes survive, torn or in disorder.

        Later writes of an open ledger are lost: cancel it, then open one again.
        """
        left = self.disk.files.after_power_cut(shuffled(self.rng), names=bool(self.rng.getrandbits(1)))
        self.disk = SimDisk(SimFiles.holding(left))
        self.seen["power cut"] += 1

    @asynccontextmanager
    async def open_engine(
        self,
        source: Source,
        generate: Generate,
        *,
        servers: InferenceServers,
        settings: EngineSettings | None = None,
        **more: Any,
    ) -> AsyncGenerator[RolloutEngine]:
        """Open ``open_rollout_engine`` with this world's randomness; conservation is checked before every step."""
        async with open_rollout_engine(
            source, generate, servers=servers, settings=settings, ports=self.ports, **more
        ) as engine:
            with self.invariants.hold(Conservation(engine), "conservation"):
                yield engine


def explore(
    scenario: Callable[[SimWorld], Awaitable[T]],
    seeds: Iterable[int],
    *,
    check: Callable[[T], object] | None = None,
    world: Callable[..., SimWorld] = SimWorld,
    **run: Any,
) -> Sweep:
    """Run ``scenario`` in a world of each seed. A seed that fails is a failure of the sweep and does not end it.

    ``world(seed=...)`` makes the world, ``check`` judges the scenario's return value, and ``run`` goes to ``SimWorld.run``.
    ``Sweep.require("reset", ...)`` then insists that nothing failed and that those states were seen. Keep each seed that
    failed as a separate test: ``SimWorld(seed=...).run(scenario)`` repeats it exactly.
    """
    started, points = time.perf_counter(), 0
    failures: list[PointFailure] = []
    seen: Counter[str] = Counter()
    for seed in seeds:
        points += 1
        made = world(seed=seed)
        try:
            value = made.run(scenario, **run).value
            if check is not None and check(value) is False:
                failures.append(PointFailure.of(_point(seed), AssertionError("the check returned False")))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # ruff: ignore[blind-except]  # noqa: ASYNC103 - pytest.fail() raises no Exception
            failures.append(PointFailure.of(_point(seed), error))
        seen.update(made.seen)
    return Sweep(
        points=points,
        failures=tuple(failures),
        seconds=time.perf_counter() - started,
        sometimes=seen,
        seed="one each",
    )


def _point(seed: int) -> Point:
    return Point(how=Inject.SEED, step=seed, where=f"SimWorld(seed={seed})")
