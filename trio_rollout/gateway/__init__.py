"""The gateway for agents: what speaks OpenAI or Anthropic over HTTP becomes a rollout. Needs the extra ``gateway``.

``open_gateway`` gives the engine's ``gateway``; ``rollout.session()`` opens a session; its turns are recorded as the servers
gave them, token for token.
"""

from .._core.token_tree import Drift
from ._agent import AgentSandbox, agent_environment, run_agent
from ._gateway import AgentGateway, GatewayStatistics, open_gateway
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
