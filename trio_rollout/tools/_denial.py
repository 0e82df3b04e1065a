"""Denials: a policy that watches a session from outside, such as a network proxy, says no. The first message counts."""

import logging
from collections.abc import Callable
from typing import final

import attrs
import trio

_log = logging.getLogger("trio_rollout.tools")

FALLBACK_MESSAGE = "Network access was denied by the sandbox network proxy."


@final
@attrs.define(eq=False, repr=False)
class DenialHandle:
    """The denial of one session, if it comes. Held by the session and by whoever may deny it.

    ``on_finish`` is called once, when the session is over or was denied: the policy can forget the session then.
    """

    fallback: str = FALLBACK_MESSAGE
    on_finish: Callable[[], None] | None = attrs.field(default=None, kw_only=True)
    message: str | None = attrs.field(default=None, init=False)
    _event: trio.Event = attrs.field(factory=trio.Event, init=False)
    _finished: bool = attrs.field(default=False, init=False)

    @property
    def denied(self) -> bool:
        """Whether it was denied."""
        return self._event.is_set()

    def deny(self, message: str | None = None) -> None:
        """Deny the session. Idempotent: the first message stays."""
        if not self.denied:
            self.message = message or self.fallback
            self._event.set()

    async def wait(self) -> None:
        """Wait until it is denied."""
        await self._event.wait()

    def finish(self) -> str | None:
        """The session is over: the message if it was denied. Repeated, it changes nothing."""
        if not self._finished:
            self._finished = True
            if self.on_finish is not None:
                try:
                    self.on_finish()
                except Exception:  # ruff: ignore[blind-except]  a policy's error must not change how a session ended
                    _log.exception("a network policy failed to forget a session")
        return self.message
