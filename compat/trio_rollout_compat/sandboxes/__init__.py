"""Sandboxes that follow slime's asyncio protocol, for ``rollout.tools.open_sandbox(provider)``."""

from ._bridged import SlimeSandbox
from ._provider import SlimeSandboxes, open_slime_sandboxes

__all__ = ["SlimeSandbox", "SlimeSandboxes", "open_slime_sandboxes"]
