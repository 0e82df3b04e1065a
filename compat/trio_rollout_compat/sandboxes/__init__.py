"""Sandboxes that follow slime's asyncio protocol, for ``rollout.tools.open_sandbox(provider)``."""

from ._bridged import SlimeSandbox as SlimeSandbox
from ._provider import SlimeSandboxes as SlimeSandboxes
from ._provider import open_slime_sandboxes as open_slime_sandboxes

__all__ = ["SlimeSandbox", "SlimeSandboxes", "open_slime_sandboxes"]
