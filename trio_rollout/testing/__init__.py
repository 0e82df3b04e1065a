"""Tools for testing code that runs on the engine: seeded runs, faults at every point, fake servers, leak checks."""

from ._fakes.plan import Action, Fault, Plan, Reply, Run, Seen
from ._fakes.servers import HANG, Fail, FakeServers, Say, prompts
from ._fakes.sglang import FakeSGLang, open_fake_sglang
from ._invariants import Invariants, is_conserved
from ._leaks import LeakError, LeakInstrument, no_leaks
from ._points import Inject, Point, PointFailure, Sweep
from ._sim.connection import Link, NetFaults, SimStream
from ._sim.disk import SimDisk, disk_full_from, failing_at
from ._sim.network import SimHost, SimNet, Trouble, disturb, open_sim_net
from ._sim.run import (
    InstrumentDropped,
    InvariantBroken,
    SimDeadlock,
    SimLivelock,
    SimResult,
    SimStalled,
    SimStopped,
    SimTimeout,
    SystemTaskLeft,
    run_inline,
    sim_run,
)
from ._sim.world import SimIO, SimWorld, explore
from ._sweeps import Arm, Faults, cancel_everywhere, throw_everywhere

__all__ = [
    "HANG",
    "Action",
    "Arm",
    "Fail",
    "FakeSGLang",
    "FakeServers",
    "Fault",
    "Faults",
    "Inject",
    "InstrumentDropped",
    "InvariantBroken",
    "Invariants",
    "LeakError",
    "LeakInstrument",
    "Link",
    "NetFaults",
    "Plan",
    "Point",
    "PointFailure",
    "Reply",
    "Run",
    "Say",
    "Seen",
    "SimDeadlock",
    "SimDisk",
    "SimHost",
    "SimIO",
    "SimLivelock",
    "SimNet",
    "SimResult",
    "SimStalled",
    "SimStopped",
    "SimStream",
    "SimTimeout",
    "SimWorld",
    "Sweep",
    "SystemTaskLeft",
    "Trouble",
    "cancel_everywhere",
    "disk_full_from",
    "disturb",
    "explore",
    "failing_at",
    "is_conserved",
    "no_leaks",
    "open_fake_sglang",
    "open_sim_net",
    "prompts",
    "run_inline",
    "sim_run",
    "throw_everywhere",
]
