"""The events of an engine, as values: what its instruments are told.

An instrument gets every event of production, in the order in which things happened, each right after it has happened.
Evaluations have none. ``id`` is always the group's.
"""

from collections.abc import Mapping

import attrs

from .enums import Cause, PauseMode
from .values import Failure, Group, GroupId, QuarantineReport, Trajectory, Turn


@attrs.frozen(kw_only=True)
class Event:
    """Base of all events: something has happened in an engine."""


@attrs.frozen(kw_only=True)
class GroupStarted(Event):
    """An attempt at a group began: its rollouts have their slots. ``attempt`` counts from 1."""

    id: GroupId
    attempt: int


@attrs.frozen(kw_only=True)
class TurnFinished(Event):
    """A server's answer was returned to a generate function, by ``rollout.generate`` or a session.

    ``index`` is the rollout's place in its group, from 0. The turn may have been interrupted and gone on; a turn that was
    given up, because its attempt ended, is no event.
    """

    id: GroupId
    attempt: int
    index: int
    turn: Turn


@attrs.frozen(kw_only=True)
class SampleFinished(Event):
    """A rollout returned a trajectory and its reward is known; a group reward, if there is one, is still to come.

    It is kept until its group is settled, or until it is too old.
    """

    id: GroupId
    attempt: int
    trajectory: Trajectory


@attrs.frozen(kw_only=True)
class SampleRetried(Event):
    """A try at a sample ended without a result, and the sample will be tried again, alone.

    ``attempt`` is the group's; ``index`` the sample's place in its group, from 0; ``tries`` counts its tries, this one
    included.
    """

    id: GroupId
    attempt: int
    index: int
    tries: int
    cause: Cause
    error: Failure


@attrs.frozen(kw_only=True)
class GroupReady(Event):
    """A finished group was written to the ledger, if there is one, and waits for delivery."""

    id: GroupId
    attempt: int
    group: Group


@attrs.frozen(kw_only=True)
class GroupRequeued(Event):
    """An attempt ended without a result, or a ready group grew too old (cause STALE): the group will be tried again.

    ``error`` says why the attempt ended; None for STALE.
    """

    id: GroupId
    attempt: int
    cause: Cause
    error: Failure | None


@attrs.frozen(kw_only=True)
class GroupFiltered(Event):
    """A finished group was dropped by the group filter, for ``reason``."""

    id: GroupId
    attempt: int
    reason: str


@attrs.frozen(kw_only=True)
class GroupQuarantined(Event):
    """A group was given up. ``report`` has its cause, the number of attempts and the last error."""

    id: GroupId
    report: QuarantineReport


@attrs.frozen(kw_only=True)
class GroupStarved(Event):
    """A group was requeued for being too old ``recycles`` times, the number of ``Discard.max_recycles``. It goes on."""

    id: GroupId
    recycles: int


@attrs.frozen(kw_only=True)
class BatchDelivered(Event):
    """``next_batch`` returns a batch: its id, its step, its groups, and if one of them had been delivered before."""

    id: str
    step: int
    groups: tuple[GroupId, ...]
    redelivered: bool


@attrs.frozen(kw_only=True)
class BatchAcked(Event):
    """A batch was acked: no restore will go back before its step."""

    id: str
    step: int


@attrs.frozen(kw_only=True)
class WindowOpened(Event):
    """Every server is paused for a weight update, and the body of ``weight_update`` begins.

    ``seconds`` is how long each step took, by name: ``pause``, and with ABORT ``quiet``, until no request of this engine
    was under way any more.
    """

    version: int
    mode: PauseMode
    seconds: Mapping[str, float]


@attrs.frozen(kw_only=True)
class WindowClosed(Event):
    """A weight update has ended, and requests are let through again.

    ``adopted``: the engine has the new version; False if a server could not be paused, the body raised, or a server named
    another version. ``seconds`` is how long each step took, by name, as far as it was reached: ``pause``, ``quiet`` (ABORT
    only), ``body``, ``confirm`` (reading the servers' versions), ``resume``, ``open`` (waking what waited at the gate).
    """

    version: int
    mode: PauseMode
    adopted: bool
    seconds: Mapping[str, float]


@attrs.frozen(kw_only=True)
class VersionNoted(Event):
    """``note_weight_version`` said that the servers have this weight version; there was no window."""

    version: int


@attrs.frozen(kw_only=True)
class ServersStayedPaused(Event):
    """At the end of a weight update to ``version``, servers could not be resumed; ``error`` names them."""

    version: int
    error: str
