"""Statistics of the engine and of the servers, as frozen values."""

from collections.abc import Mapping

import attrs

from .enums import Cause


@attrs.frozen(kw_only=True)
class EngineStatistics:
    """Counts since the engine was opened (with a ledger: since the ledger was begun). Groups, except where named otherwise.

    ``pulled == waiting + running + ready + delivered + acked + filtered + quarantined + returned`` at every moment.
    """

    pulled: int
    waiting: int
    running: int
    ready: int
    delivered: int
    acked: int
    filtered: int
    quarantined: int
    returned: int
    requeues: Mapping[Cause, int]
    """Requeues by cause, not groups: one group may be requeued several times."""
    late: int
    """Complete answers that came after their attempt had ended."""
    orphans: int
    """Requests that a server was still running when the time for their abort was over."""
    running_rollouts: int
    max_running: int
    generated_tokens: int
    """Tokens sampled by finished turns, of delivered and of requeued attempts."""
    weight_version: int


@attrs.frozen(kw_only=True)
class ServerCounts:
    """One server: its URL, whether it gets work, what it has of ours."""

    url: str
    usable: bool
    paused: bool
    version: int | None
    in_flight: int
    requests: int


@attrs.frozen(kw_only=True)
class ServerStatistics:
    """All servers: each one's counts, open connections, aborts owed to paused servers, and orphans so far."""

    servers: tuple[ServerCounts, ...]
    connections: int
    owed_aborts: int
    orphans: int
    late: int
