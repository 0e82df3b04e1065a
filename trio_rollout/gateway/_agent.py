"""Running a command-line agent against its session, in any sandbox.

Separate because the agent may run in a sandbox of any kind, and nothing else in the gateway knows sandboxes.
"""

from collections.abc import Mapping
from typing import Protocol, TypeVar

from ..abc import Session

R_co = TypeVar("R_co", covariant=True)


class AgentSandbox(Protocol[R_co]):
    """What an agent needs of a sandbox; ``trio_rollout.tools.Sandbox`` has it."""

    async def exec(
        self,
        argv: list[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  expiry is a result here, unlike a cancelled scope
    ) -> R_co:
        """Run a command to its end; over its time it is killed with all it started, which is a result."""
        ...


def agent_environment(session: Session) -> dict[str, str]:
    """The variables by which OpenAI's and Anthropic's clients, and what is built on them, find this session."""
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
    """Run a command-line agent in the sandbox, with ``agent_environment(session)`` and ``env`` on top of it.

    Blocks until it has exited, or its time is over: ``seconds``, and never more than what remains of the rollout. Its
    process tree is dead when this returns; cancelled, it is killed first. So call it inside the session's block: the
    agent is gone before its session closes. How it exited is in the result, for the reward to judge.

    Raises:
      ToolError: the sandbox failed.

    """
    return await sandbox.exec(command, cwd=cwd, env={**agent_environment(session), **(env or {})}, timeout=seconds)
