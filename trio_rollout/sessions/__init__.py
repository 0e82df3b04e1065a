"""The former name of ``trio_rollout.gateway``. Every name here is the same object as there."""

from ..gateway import (
    AgentGateway,
    AgentSandbox,
    Call,
    Drift,
    GatewaySession,
    GatewaySettings,
    GatewayStatistics,
    Parsed,
    Parser,
    SessionStatistics,
    agent_environment,
    open_gateway,
    run_agent,
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
