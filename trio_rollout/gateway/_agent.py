"""Run a command-line agent against its session, in any sandbox.

Separate because the agent may run in a sandbox of any kind, and nothing else in the gateway knows sandboxes.
"""

from collections.abc import Mapping
from typing import Protocol, TypeVar

from ..abc import Session

R_co = TypeVar("R_co", covariant=True)


class AgentSandbox(Protocol[R_co]):
    """The part of a sandbox that ``run_agent`` uses; ``trio_rollout.tools.Sandbox`` has it."""

    async def exec(
        self,
        argv: list[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  expiry is a result here, unlike a cancelled scope
    ) -> R_co:
        """Run a command until it exits. After ``timeout`` seconds it is killed with all it started; that is a result."""
        ...


def agent_environment(session: Session) -> dict[str, str]:
    """Return the environment in which OpenAI's and Anthropic's clients, and agents built on them, find this session."""
    return {
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_BASE": session.base_url,
        "OPENAI_API_KEY": session.api_key,
        "ANTHROPIC_BASE_URL": session.base_url,
        "ANTHROPIC_API_KEY": session.api_key,
        "NO_PROXY": "*",
    }


async def run_agent(
    command: list[str],
    session: Session,
    sandbox: AgentSandbox[R_co],
    *,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    seconds: float | None = None,
) -> R_co:
    """Run a command-line agent in the sandbox, in the environment ``agent_environment(session)``, then ``env``.

    Blocks until the agent has exited, or for ``seconds``, and never longer than the rollout has left. The agent's process
    tree is dead when this returns; cancelled, it is killed first. Call this inside the session's block, so that the agent
    is gone before its session closes. The result says how the agent exited; the reward may judge it.

    Raises:
      ToolError: the sandbox failed.

    """
    return await sandbox.exec(command, cwd=cwd, env={**agent_environment(session), **(env or {})}, timeout=seconds)
