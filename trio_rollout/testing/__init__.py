"""Tools for testing code that runs on the engine: seeded runs, faults at every point, fake servers, leak checks."""

from ._fakes.plan import Action as Action
from ._fakes.plan import Fault as Fault
from ._fakes.plan import Plan as Plan
from ._fakes.plan import Reply as Reply
from ._fakes.plan import Run as Run
from ._fakes.plan import Seen as Seen
from ._fakes.servers import HANG as HANG
from ._fakes.servers import Fail as Fail
from ._fakes.servers import FakeServers as FakeServers
from ._fakes.servers import Say as Say
from ._fakes.servers import prompts as prompts
from ._fakes.sglang import FakeSGLang as FakeSGLang
from ._fakes.sglang import open_fake_sglang as open_fake_sglang
from ._invariants import Invariants as Invariants
from ._invariants import is_conserved as is_conserved
from ._leaks import LeakError as LeakError
from ._leaks import LeakInstrument as LeakInstrument
from ._leaks import no_leaks as no_leaks
from ._points import Inject as Inject
from ._points import Point as Point
from ._points import PointFailure as PointFailure
from ._points import Sweep as Sweep
from ._sim.connection import Link as Link
from ._sim.connection import NetFaults as NetFaults
from ._sim.connection import SimStream as SimStream
from ._sim.disk import SimDisk as SimDisk
from ._sim.disk import disk_full_from as disk_full_from
from ._sim.disk import failing_at as failing_at
from ._sim.guard import InstrumentDropped as InstrumentDropped
from ._sim.guard import InvariantBroken as InvariantBroken
from ._sim.guard import SimDeadlock as SimDeadlock
from ._sim.guard import SimLivelock as SimLivelock
from ._sim.guard import SimStalled as SimStalled
from ._sim.guard import SimStopped as SimStopped
from ._sim.guard import SimTimeout as SimTimeout
from ._sim.guard import SystemTaskLeft as SystemTaskLeft
from ._sim.network import SimHost as SimHost
from ._sim.network import SimNet as SimNet
from ._sim.network import Trouble as Trouble
from ._sim.network import disturb as disturb
from ._sim.network import open_sim_net as open_sim_net
from ._sim.run import SimResult as SimResult
from ._sim.run import run_inline as run_inline
from ._sim.run import sim_run as sim_run
from ._sim.world import SimIO as SimIO
from ._sim.world import SimWorld as SimWorld
from ._sim.world import explore as explore
from ._sweeps.cancel import cancel_everywhere as cancel_everywhere
from ._sweeps.sweeper import Arm as Arm
from ._sweeps.throw import Faults as Faults
from ._sweeps.throw import throw_everywhere as throw_everywhere

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
