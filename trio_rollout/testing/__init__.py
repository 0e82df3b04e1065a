"""For the tests of those who build on the engine: seeded runs, faults at every point, stand-ins, what a test left behind."""

from ._cancel_everywhere import cancel_everywhere as cancel_everywhere
from ._explore import explore as explore
from ._fake_plan import Action as Action
from ._fake_plan import Fault as Fault
from ._fake_plan import Plan as Plan
from ._fake_plan import Reply as Reply
from ._fake_plan import Run as Run
from ._fake_plan import Seen as Seen
from ._fake_servers import HANG as HANG
from ._fake_servers import Fail as Fail
from ._fake_servers import FakeServers as FakeServers
from ._fake_servers import Say as Say
from ._fake_servers import prompts as prompts
from ._fake_sglang import FakeSGLang as FakeSGLang
from ._fake_sglang import open_fake_sglang as open_fake_sglang
from ._injector import Arm as Arm
from ._invariants import Invariants as Invariants
from ._leaks import LeakError as LeakError
from ._leaks import LeakInstrument as LeakInstrument
from ._leaks import no_leaks as no_leaks
from ._points import Inject as Inject
from ._points import Point as Point
from ._points import PointFailure as PointFailure
from ._points import Sweep as Sweep
from ._sim_errors import InstrumentDropped as InstrumentDropped
from ._sim_errors import InvariantBroken as InvariantBroken
from ._sim_errors import SimDeadlock as SimDeadlock
from ._sim_errors import SimLivelock as SimLivelock
from ._sim_errors import SimStalled as SimStalled
from ._sim_errors import SimStopped as SimStopped
from ._sim_errors import SimTimeout as SimTimeout
from ._sim_errors import SystemTaskLeft as SystemTaskLeft
from ._simconn import SimStream as SimStream
from ._simdisk import SimDisk as SimDisk
from ._simdisk import disk_full_from as disk_full_from
from ._simdisk import failing_at as failing_at
from ._simio import SimIO as SimIO
from ._simlink import Link as Link
from ._simlink import NetFaults as NetFaults
from ._simnet import SimHost as SimHost
from ._simnet import SimNet as SimNet
from ._simnet import open_sim_net as open_sim_net
from ._simrun import SimResult as SimResult
from ._simrun import sim_run as sim_run
from ._simworld import SimWorld as SimWorld
from ._throw_everywhere import Faults as Faults
from ._throw_everywhere import throw_everywhere as throw_everywhere
from ._trouble import Trouble as Trouble
from ._trouble import disturb as disturb

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
    "no_leaks",
    "open_fake_sglang",
    "open_sim_net",
    "prompts",
    "sim_run",
    "throw_everywhere",
]
