"""The public name of ``trio_rollout.gateway`` before it had that name; everything in it is the same object."""

from ..gateway import (
    AgentGateway as AgentGateway,
)
from ..gateway import (
    AgentSandbox as AgentSandbox,
)
from ..gateway import (
    Call as Call,
)
from ..gateway import (
    Drift as Drift,
)
from ..gateway import (
    GatewaySession as GatewaySession,
)
from ..gateway import (
    GatewaySettings as GatewaySettings,
)
from ..gateway import (
    GatewayStatistics as GatewayStatistics,
)
from ..gateway import (
    Parsed as Parsed,
)
from ..gateway import (
    Parser as Parser,
)
from ..gateway import (
    SessionStatistics as SessionStatistics,
)
from ..gateway import (
    agent_environment as agent_environment,
)
from ..gateway import (
    open_gateway as open_gateway,
)
from ..gateway import (
    run_agent as run_agent,
)

__all__ = [
    "AgentGateway",
    "AgentSandbox",
    "Call",
    "Drift",
    "GatewaySession",
    "GatewaySettings",
    "GatewayStatistics",
    "Parsed",
    "Parser",
    "SessionStatistics",
    "agent_environment",
    "open_gateway",
    "run_agent",
]
