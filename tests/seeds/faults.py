"""The faults in a world of ``whole_world``: faults of hosts, of single requests, of the user's code."""

import random
from collections.abc import Callable, Sequence

import attrs
import trio

from trio_rollout.errors import SandboxLost
from trio_rollout.testing import Action, FakeSGLang, Fault, Reply, Run, Seen, SimWorld, Trouble

HOSTS = {f"host: {kind.value}": kind for kind in Trouble}
ANSWERS: dict[str, Callable[[], Fault | Reply]] = {
    **{
        f"answer: {fault.value}": lambda fault=fault: fault
        for fault in (
            Fault.HANG,
            Fault.HANG_IN_BODY,
            Fault.DRIP,
            Fault.RESET,
            Fault.CLOSE,
            Fault.RESET_IN_BODY,
            Fault.SHORT_BODY,
            Fault.SHORT_CHUNKED,
            Fault.NO_DONE,
            Fault.MALFORMED_JSON,
            Fault.FEWER_LOG_PROBS,
            Fault.NOT_HTTP,
        )
    },
    "answer: 500": lambda: Reply(status=500, body={"error": {"message": "cuda"}}),
    "answer: 503": lambda: Reply(status=503, body={"error": {"message": "queue full"}}, headers={"retry-after": "2"}),
    "answer: 429": lambda: Reply(status=429, body={"error": {"message": "slow down"}}),
    "answer: 400": lambda: Reply(status=400, body={"error": {"message": "drawn refusal"}}),
    "answer: aborted by another client": Reply,
}
CONTROL = {
    "abort lost": ("/abort_request", Fault.IGNORE),
    "abort hangs": ("/abort_request", Fault.HANG),
    "pause fails": ("/pause_generation", Reply(status=500, body={"error": {"message": "no"}})),
    "version call hangs": ("/model_info", Fault.HANG),
}
USER = ("reward raises", "reward hangs", "generate raises", "generate hangs")
ALL = (*HOSTS, *ANSWERS, *CONTROL, *USER)


@attrs.define(eq=False)
class Faulty:
    """The plan of every fake server of one world, and what strikes its user code. Each fault strikes now and then."""

    world: SimWorld
    names: Sequence[str]
    rate: float
    fakes: dict[str, FakeSGLang] = attrs.field(factory=dict)
    active: bool = True

    @property
    def troubles(self) -> list[Trouble]:
        """Those of the hosts."""
        return [HOSTS[name] for name in self.names if name in HOSTS]

    def strikes(self, *candidates: str) -> str | None:
        """One of these faults, if it is drawn now."""
        mine = [name for name in self.names if name in candidates]
        if not self.active or not mine or self.world.rng.random() > self.rate:
            return None
        name = self.world.rng.choice(mine)
        self.world.sometimes(name)
        return name

    async def user(self, what: str) -> None:
        """Strike user code: raise, or hang until cancelled."""
        name = self.strikes(f"{what} raises", f"{what} hangs")
        if name == f"{what} raises":
            raise self.world.rng.choice([RuntimeError, SandboxLost])(f"drawn: {name}")
        if name is not None:
            await trio.sleep_forever()

    def plan(self, url: str, nursery: trio.Nursery) -> Callable[[Seen], Action]:
        """The plan of one server; ``nursery`` ends its answers after a while."""

        def of(seen: Seen) -> Action:
            if seen.path != "/generate":
                name = self.strikes(*(name for name, (path, _) in CONTROL.items() if path == seen.path))
                return CONTROL[name][1] if name else None
            name = self.strikes(*ANSWERS)
            if name == "answer: aborted by another client":
                self.fakes[url].abort("", everything=True)
                name = None
            made = ANSWERS[name]() if name else None
            if isinstance(made, Reply) or made in {Fault.HANG, Fault.RESET, Fault.CLOSE}:
                return made
            return Run(
                until=_after(_seconds(self.world.rng), nursery), partial=self.world.rng.randint(0, 4), fault=made
            )

        return of


def _seconds(rng: random.Random) -> float:
    return min(rng.lognormvariate(0.5, 0.8), 20.0)


def _after(seconds: float, nursery: trio.Nursery) -> trio.Event:
    over = trio.Event()

    async def end() -> None:
        await trio.sleep(seconds)
        over.set()

    nursery.start_soon(end)
    return over
