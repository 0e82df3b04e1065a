"""How long things may take to end: each its own time, and all together an allowance once they are hurried.

A cleanup must not be torn off by a cancellation, so it is shielded. But whoever cancelled a rollout waits for it, and has
promised somebody else when it will be over (``Deadlines.drain``). So from the moment when what surrounds a cleanup is
cancelled, it and all that follow it share what is left of one allowance.
"""

import math
from collections.abc import Awaitable, Callable
from typing import final

import attrs
import trio

from ..._util.exception_groups import bare_errors


@final
@attrs.define(eq=False)
class WrapUp:
    """The allowance of one rollout, in seconds: ``Deadlines.abort``, which is what an engine leaves to it."""

    seconds: float = math.inf
    _until: float = attrs.field(default=math.inf, init=False)

    async def shielded(self, call: Callable[[], Awaitable[object]], seconds: float, *, share: float = 1.0) -> bool:
        """Run ``call`` in a shield of at most ``seconds``; whether it came to its end by itself.

        Hurried, it gets no more than this ``share`` of the allowance, so that something is left for what follows.
        """
        scope = trio.CancelScope(shield=True, deadline=trio.current_time() + seconds)
        with bare_errors():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._hurry, nursery, scope, share)
                with scope:
                    await call()
                nursery.cancel_scope.cancel("it has ended")
        return not scope.cancelled_caught

    async def _hurry(self, nursery: trio.Nursery, scope: trio.CancelScope, share: float) -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:  # noqa: ASYNC103  not ours to raise: the caller's next checkpoint does
            if nursery.cancel_scope.cancel_called:
                return  # noqa: ASYNC104  the call is over: nobody is in a hurry
            now = trio.current_time()
            self._until = min(self._until, now + self.seconds)
            scope.deadline = min(scope.deadline, now + share * (self._until - now))
