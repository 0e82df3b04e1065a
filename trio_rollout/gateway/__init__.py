"""A gateway for agents that speak OpenAI's or Anthropic's API over HTTP: each becomes a rollout.

``open_gateway`` serves sessions over HTTP and is given to ``open_rollout_engine(gateway=...)``. ``rollout.session()`` opens
a session, and ``run_agent`` runs a command-line agent against it. The gateway records every turn token for token, as the
inference servers sampled it. Needs the extra ``gateway``.
"""

from .._core.token_tree import Drift
from ._gateway import AgentGateway, AgentSandbox, GatewayStatistics, agent_environment, open_gateway, run_agent
from ._parsers import Call, Parsed, Parser
from ._session import GatewaySession, SessionStatistics
from ._settings import GatewaySettings

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
