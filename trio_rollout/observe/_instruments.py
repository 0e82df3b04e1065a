"""Two small instruments: one that logs what happens in the engine, one that counts it.

Rates and durations from the engine's events, as one frozen value at a time: for progress lines and experiment trackers.
"""

import logging
from collections import Counter, deque
from collections.abc import Mapping
from typing import final

import attrs
import trio

from .._core.enums import Cause
from .._core.values import Failure, Group, GroupId, QuarantineReport

_TROUBLE = frozenset({"group.requeued", "group.quarantined", "group.starved", "servers.stayed_paused"})


def _brief(value: object) -> str:
    """A value in a log line: ids and causes, never whole trajectories."""
    match value:
        case Group():
            return f"<{len(value.trajectories)} trajectories>"
        case QuarantineReport():
            return f"{value.id} ({value.error})"
        case Cause():
            return value.value
        case Failure() | str():
            return str(value)
        case _:
            return repr(value)


@final
@attrs.define(eq=False, repr=False)
class LogInstrument:
    """Logs every event in one line, trouble as warnings; give it to ``open_rollout_engine(instruments=[...])``."""

    logger: logging.Logger = attrs.field(factory=lambda: logging.getLogger("trio_rollout.events"))
    level: int = logging.INFO

    def event(self, name: str, fields: Mapping[str, object], /) -> None:
        """See ``trio_rollout.abc.Instrument``."""
        level = max(self.level, logging.WARNING) if name in _TROUBLE else self.level
        if self.logger.isEnabledFor(level):
            said = " ".join(f"{key}={_brief(value)}" for key, value in fields.items() if value is not None)
            self.logger.log(level, "%s %s", name, said)


@final
@attrs.define(eq=False, repr=False)
class CountingInstrument:
    """Counts events by name, and requeues by cause."""

    events: Counter[str] = attrs.field(factory=Counter, init=False)
    requeues: Counter[Cause] = attrs.field(factory=Counter, init=False)

    def __repr__(self) -> str:
        return f"<CountingInstrument {dict(self.events)}>"

    def event(self, name: str, fields: Mapping[str, object], /) -> None:
        """See ``trio_rollout.abc.Instrument``."""
        self.events[name] += 1
        cause = fields.get("cause")
        if name == "group.requeued" and isinstance(cause, Cause):
            self.requeues[cause] += 1


_MOST_DURATIONS = 1000


@final
@attrs.frozen(kw_only=True)
class Metrics:
    """One moment. Rates are averages over the instrument's window; durations are those of the last 1000 ready groups."""

    groups_ready: int
    groups_filtered: int
    groups_quarantined: int
    requeues: Mapping[Cause, int]
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
            self, filter=lambda field, value: field.name != "requeues" and value is not None
        )
        values.update({f"requeues/{cause.value}": count for cause, count in self.requeues.items()})
        return values


@final
@attrs.define(eq=False, repr=False)
class MetricsInstrument:
    """Gathers metrics; give it to ``open_rollout_engine(instruments=[...])`` and ask it for a ``snapshot`` at any time."""

    window_s: float = attrs.field(default=60.0, validator=attrs.validators.gt(0.0))
    _counts: Counter[str] = attrs.field(factory=Counter, init=False)
    _requeues: Counter[Cause] = attrs.field(factory=Counter, init=False)
    _started: dict[GroupId, float] = attrs.field(factory=dict, init=False)
    _durations: deque[float] = attrs.field(factory=lambda: deque(maxlen=_MOST_DURATIONS), init=False)
    _recent: deque[tuple[float, int]] = attrs.field(factory=deque, init=False)
    _tokens: int = attrs.field(default=0, init=False)
    _update_s: float | None = attrs.field(default=None, init=False)
    _begun: float | None = attrs.field(default=None, init=False)

    def event(self, name: str, fields: Mapping[str, object], /) -> None:
        """See ``trio_rollout.abc.Instrument``."""
        now = trio.current_time()
        if self._begun is None:
            self._begun = now
        self._counts[name] += 1
        match name, fields:
            case "group.started", {"id": GroupId() as group_id}:
                self._started[group_id] = now
            case "group.ready", {"group": Group() as group}:
                self._ready(group, now)
            case "group.requeued", {"id": GroupId() as group_id, "cause": Cause() as cause}:
                self._requeues[cause] += 1
                self._started.pop(group_id, None)
            case "group.filtered", {"id": GroupId() as group_id}:
                self._started.pop(group_id, None)
            case "group.quarantined", {"report": QuarantineReport(id=group_id)}:
                self._started.pop(group_id, None)
            case "weights.updated", {"seconds": Mapping() as seconds}:
                self._update_s = float(sum(seconds.values()))

    def _ready(self, group: Group, now: float) -> None:
        tokens = sum(int(segment.loss_mask.sum()) for row in group.trajectories for segment in row.segments)
        self._tokens += tokens
        self._recent.append((now, tokens))
        self._forget(now)  # here too: perhaps nobody ever asks
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
            groups_ready=self._counts["group.ready"],
            groups_filtered=self._counts["group.filtered"],
            groups_quarantined=self._counts["group.quarantined"],
            requeues=dict(self._requeues),
            tokens=self._tokens,
            tokens_per_s=sum(tokens for _, tokens in self._recent) / span if span > 0 else 0.0,
            groups_per_s=len(self._recent) / span if span > 0 else 0.0,
            group_s_median=_quantile(durations, 0.5),
            group_s_p95=_quantile(durations, 0.95),
            weight_updates=self._counts["weights.updated"],
            weight_update_s=self._update_s,
        )


def _quantile(ordered: list[float], share: float) -> float | None:
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else None
