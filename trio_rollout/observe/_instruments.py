"""Instruments: one that logs what happens in an engine, one that counts it, and one that turns it into metrics.

Give them to ``open_rollout_engine(instruments=[...])``. Metrics are rates and durations as one frozen value at a time: for
progress lines and experiment trackers.
"""

import logging
from collections import Counter, deque
from collections.abc import Mapping
from typing import final

import attrs
import trio

from .._core.enums import Cause, PauseMode
from .._core.events import (
    Event,
    GroupFiltered,
    GroupQuarantined,
    GroupReady,
    GroupRequeued,
    GroupStarted,
    GroupStarved,
    SampleFinished,
    SampleRetried,
    ServersStayedPaused,
    TurnFinished,
    WindowClosed,
)
from .._core.values import Failure, Group, GroupId, QuarantineReport, Trajectory, Turn

_TROUBLE = (SampleRetried, GroupRequeued, GroupQuarantined, GroupStarved, ServersStayedPaused)
_DETAILS = (TurnFinished, SampleFinished)


def _brief(value: object) -> str:
    """Return a value as a log line shows it: ids and causes, never whole trajectories."""
    match value:
        case Group():
            text = f"<{len(value.trajectories)} trajectories>"
        case Trajectory():
            text = f"<index {value.index}, {value.turns} turns, reward {value.reward}>"
        case Turn():
            text = f"<{len(value.output_ids)} tokens, {value.stop.value}>"
        case QuarantineReport():
            text = f"{value.id} ({value.error})"
        case Cause() | PauseMode():
            text = str(value.value)
        case GroupId() | Failure() | str():
            text = str(value)
        case tuple():
            text = f"[{', '.join(map(_brief, value))}]"
        case _:
            text = repr(value)
    return text


@final
@attrs.define(eq=False, repr=False)
class LogInstrument:
    """Logs each event in one line: trouble as warnings, turns and samples at DEBUG, all others at ``level``."""

    logger: logging.Logger = attrs.field(factory=lambda: logging.getLogger("trio_rollout.events"))
    level: int = logging.INFO

    def event(self, event: Event, /) -> None:
        """Log the event; see ``trio_rollout.abc.Instrument``."""
        level = self.level
        if isinstance(event, _TROUBLE):
            level = max(level, logging.WARNING)
        elif isinstance(event, _DETAILS):
            level = min(level, logging.DEBUG)
        if self.logger.isEnabledFor(level):
            fields = attrs.asdict(event, recurse=False)
            said = " ".join(f"{key}={_brief(value)}" for key, value in fields.items() if value is not None)
            self.logger.log(level, "%s %s", type(event).__name__, said)


@final
@attrs.define(eq=False, repr=False)
class CountingInstrument:
    """Counts events by their class, requeues of groups and retries of samples by cause."""

    events: Counter[type[Event]] = attrs.field(factory=Counter, init=False)
    requeues: Counter[Cause] = attrs.field(factory=Counter, init=False)
    retries: Counter[Cause] = attrs.field(factory=Counter, init=False)

    def __repr__(self) -> str:
        return f"<CountingInstrument { {kind.__name__: count for kind, count in self.events.items()} }>"

    def event(self, event: Event, /) -> None:
        """Count the event; see ``trio_rollout.abc.Instrument``."""
        self.events[type(event)] += 1
        if isinstance(event, GroupRequeued):
            self.requeues[event.cause] += 1
        elif isinstance(event, SampleRetried):
            self.retries[event.cause] += 1


_MOST_DURATIONS = 1000


@final
@attrs.frozen(kw_only=True)
class Metrics:
    """One moment. Rates are averages over the instrument's window; durations are those of the last 1000 ready groups."""

    groups_ready: int
    groups_filtered: int
    groups_quarantined: int
    requeues: Mapping[Cause, int]
    """Requeues of groups, by cause."""
    retries: Mapping[Cause, int]
    """Tries of samples that were followed by another try, by cause."""
    tokens: int
    """Tokens that the model sampled for ready groups."""
    tokens_per_s: float
    groups_per_s: float
    group_s_median: float | None
    """Seconds from the start of a group's last attempt until it was ready."""
    group_s_p95: float | None
    weight_updates: int
    weight_update_s: float | None
    """Duration of the last weight update."""

    def flat(self) -> dict[str, float]:
        """The same as one flat mapping of numbers, as experiment trackers want it; what is unknown is left out."""
        values: dict[str, float] = attrs.asdict(
            self, filter=lambda field, value: field.name not in {"requeues", "retries"} and value is not None
        )
        for name, counts in (("requeues", self.requeues), ("retries", self.retries)):
            values.update({f"{name}/{cause.value}": count for cause, count in counts.items()})
        return values


@final
@attrs.define(eq=False, repr=False)
class MetricsInstrument:
    """Gathers metrics; give it to ``open_rollout_engine(instruments=[...])`` and ask it for a ``snapshot`` at any time."""

    window_s: float = attrs.field(default=60.0, validator=attrs.validators.gt(0.0))
    _counts: Counter[type[Event]] = attrs.field(factory=Counter, init=False)
    _requeues: Counter[Cause] = attrs.field(factory=Counter, init=False)
    _retries: Counter[Cause] = attrs.field(factory=Counter, init=False)
    _started: dict[GroupId, float] = attrs.field(factory=dict, init=False)
    _durations: deque[float] = attrs.field(factory=lambda: deque(maxlen=_MOST_DURATIONS), init=False)
    _recent: deque[tuple[float, int]] = attrs.field(factory=deque, init=False)
    _tokens: int = attrs.field(default=0, init=False)
    _updates: int = attrs.field(default=0, init=False)
    _update_s: float | None = attrs.field(default=None, init=False)
    _begun: float | None = attrs.field(default=None, init=False)

    def event(self, event: Event, /) -> None:
        """Take note of the event; see ``trio_rollout.abc.Instrument``."""
        now = trio.current_time()
        if self._begun is None:
            self._begun = now
        self._counts[type(event)] += 1
        match event:
            case GroupStarted():
                self._started[event.id] = now
            case GroupReady():
                self._ready(event.group, now)
            case GroupRequeued():
                self._requeues[event.cause] += 1
                self._started.pop(event.id, None)
            case SampleRetried():
                self._retries[event.cause] += 1
            case GroupFiltered() | GroupQuarantined():
                self._started.pop(event.id, None)
            case WindowClosed(adopted=True):
                self._updates += 1
                self._update_s = float(sum(event.seconds.values()))

    def _ready(self, group: Group, now: float) -> None:
        tokens = sum(int(segment.loss_mask.sum()) for row in group.trajectories for segment in row.segments)
        self._tokens += tokens
        self._recent.append((now, tokens))
        self._forget(now)  # here too: perhaps no snapshot is ever asked for
        started = self._started.pop(group.id, None)
        if started is not None:
            self._durations.append(now - started)

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] <= now - self.window_s:
            self._recent.popleft()

    def snapshot(self) -> Metrics:
        """The metrics of this moment; to be called inside the Trio run."""
        now = trio.current_time()
        self._forget(now)
        span = min(self.window_s, now - self._begun) if self._begun is not None else 0.0
        durations = sorted(self._durations)
        return Metrics(
            groups_ready=self._counts[GroupReady],
            groups_filtered=self._counts[GroupFiltered],
            groups_quarantined=self._counts[GroupQuarantined],
            requeues=dict(self._requeues),
            retries=dict(self._retries),
            tokens=self._tokens,
            tokens_per_s=sum(tokens for _, tokens in self._recent) / span if span > 0 else 0.0,
            groups_per_s=len(self._recent) / span if span > 0 else 0.0,
            group_s_median=_quantile(durations, 0.5),
            group_s_p95=_quantile(durations, 0.95),
            weight_updates=self._updates,
            weight_update_s=self._update_s,
        )


def _quantile(ordered: list[float], share: float) -> float | None:
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else None
