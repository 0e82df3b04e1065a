"""The cleanup budget of a rollout: the total time for its cleanups once the rollout is cancelled.

A cleanup (kill a process tree, destroy a sandbox) must finish although its rollout is cancelled, so it runs in a shield. A
shield needs a bound, and each cleanup has its own: ten seconds to destroy a sandbox, ten to reap processes, 120 to learn
whether a sandbox was created. These bounds are right while the rollout runs. After a cancellation they would add up, one
after another, and the engine has promised that leaving takes at most ``Deadlines.drain``.

So there are two clocks. While the scope around a cleanup is live, the cleanup has its own limit. When that scope is cancelled,
before or during the cleanup, the budget starts: from this moment all cleanups of the rollout together have ``seconds``, which
is ``Deadlines.abort``, the part of the drain that the engine reserves for them. A cleanup that is followed by others takes
only a ``share`` of what remains. A rollout that is never cancelled never starts its budget, and a sandbox that was used for
an hour still has its whole budget when the cancellation comes.

The start is noticed without polling: a task beside the cleanup sleeps *outside* of the shield. The cancellation reaches that
task, which then shortens the shield's deadline. See docs/decisions/0009-each-command-has-a-keeper.md.
"""

import math
from collections.abc import Awaitable, Callable
from typing import final

import attrs
import trio

from .._util.exception_groups import bare_errors


@final
@attrs.define(eq=False)
class CleanupBudget:
    """The budget of one rollout in seconds. Starts with the first cleanup that is cancelled from outside."""

    seconds: float = math.inf
    _until: float = attrs.field(default=math.inf, init=False)

    async def shielded(self, call: Callable[[], Awaitable[object]], seconds: float, *, share: float = 1.0) -> bool:
        """Run ``call`` in a shield of at most ``seconds``; return True if the call finished.

        Once the budget has started, the call gets at most this ``share`` of the time that remains. An outer cancellation is not
        raised here but at the caller's next checkpoint.
        """
        scope = trio.CancelScope(shield=True, deadline=trio.current_time() + seconds)
        with bare_errors():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._start_when_cancelled, nursery, scope, share)
                with scope:
                    await call()
                nursery.cancel_scope.cancel("the cleanup has ended")
        return not scope.cancelled_caught

    async def _start_when_cancelled(self, nursery: trio.Nursery, scope: trio.CancelScope, share: float) -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:  # noqa: ASYNC103  the caller's next checkpoint raises it again
            if nursery.cancel_scope.cancel_called:
                return  # noqa: ASYNC104  the cleanup has ended: there is no outer cancellation
            now = trio.current_time()
            self._until = min(self._until, now + self.seconds)
            scope.deadline = min(scope.deadline, now + share * (self._until - now))
