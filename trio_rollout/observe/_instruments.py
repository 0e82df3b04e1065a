"""Two small instruments: one that logs what happens in the engine, one that counts it."""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import final

import attrs

from .._core.enums import Cause
from .._core.values import Failure, Group, QuarantineReport

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
