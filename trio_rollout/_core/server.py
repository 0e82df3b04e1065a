"""A server's life as a table. No I/O, no clock; an illegal event raises and changes nothing.

``step(standing, told) -> standing, effects`` is the only place where a server's state changes. The client tells it of each
call that it sends and of each answer, and performs the effects; it decides nothing of the sort itself.

Two rules make late answers harmless. Every call to a server opens a question with a new number, and the answer carries that
number. An answer counts only if its question is the one that is open: a newer call, the beginning of a weight-update window and
a newly required version close it. And a server to which a pause was sent gets no request before it has answered a resume, or a
look, whatever else was heard of it.

The reasons are in docs/decisions/0029-no-pause-overtakes-a-resume.md and 0033-a-servers-life-is-a-table.md.
"""

import enum
from collections.abc import Iterator, Mapping
from typing import Final

import attrs

from .lifecycle import IllegalTransition
from .weights import Past, Weights


class State(enum.Enum):
    """The state of one server. Every server is in exactly one of these."""

    OUTSIDE = "outside"
    """Not yet met, or left: not one of the client's servers."""
    READY = "ready"
    """Samples; gets requests, if it has the required weights and no window is open."""
    SUSPECT = "suspect"
    """Gets requests as if it were ready, but an answer (or a missing one) contradicts what is known: it is looked at."""
    PAUSING = "pausing"
    """A pause was sent and not answered yet."""
    PAUSED = "paused"
    """May be paused by this client, and no resume is under way."""
    RESUMING = "resuming"
    """A resume was sent and not answered yet."""
    LOST = "lost"
    """Gets no request until a look finds it ready, or a window has taken it over. It may still run what it was given."""
    DOWN = "down"
    """Lost, and no connection could be opened to it."""


class Event(enum.Enum):
    """Something that happens to a server, or that it says."""

    JOINED = "join"
    """It has named its model and weights: it is one of the client's servers."""
    LEFT = "leave"
    """The client is done with it."""
    WINDOW_BEGINS = "enter a window"
    """A weight-update window begins: nothing is sent to any server."""
    WINDOW_ENDS = "leave a window"
    """The weight-update window is over."""
    VERSION_REQUIRED = "be required to have a version"
    """From now on only servers with this weight version get requests."""
    DOUBTED = "be doubted"
    """It named another weight version than it should have, or did not let a request go."""
    FOUND_PAUSED = "be found paused"
    """It was paused when the client was opened, and the client is to resume it."""
    PAUSE_SENT = "be sent a pause"
    """The client asks it to pause."""
    PAUSE_ANSWERED = "answer a pause"
    """It says that it is paused."""
    RESUME_SENT = "be sent a resume"
    """The client asks it to continue."""
    RESUME_ANSWERED = "answer a resume"
    """It says that it continues."""
    ASKED = "be asked"
    """The client asks for its readiness, its weight version, or both."""
    PROBED = "be found ready"
    """A look: it is ready, and names its weights."""
    NOT_READY = "be found not ready"
    """A look: it says that it is not ready."""
    VERSION_NAMED = "name its version"
    """It names its weights."""
    REFUSED = "refuse"
    """It answered the open question with an error."""
    BROKEN = "break off"
    """The connection ended before the open question was answered, or the answer is not HTTP."""
    TIMED_OUT = "time out"
    """The open question was not answered in its time."""
    UNREACHABLE = "be unreachable"
    """No connection could be opened to it."""
    GIVEN_UP = "be given up"
    """It could not be resumed in time, or could not be sent a pause in time."""


_ALWAYS: Final = (Event.WINDOW_BEGINS, Event.WINDOW_ENDS, Event.VERSION_REQUIRED, Event.DOUBTED)
"""Events that leave the state as it is, unless its row says otherwise; they change only the standing's other fields."""


def _row(state: State, moves: Mapping[Event, State]) -> Mapping[Event, State]:
    return {**dict.fromkeys(_ALWAYS, state), Event.LEFT: State.OUTSIDE, **moves}


_FAILURES: Final = (Event.REFUSED, Event.BROKEN, Event.TIMED_OUT, Event.UNREACHABLE)
"""The open question fails."""


def _failing(then: State) -> dict[Event, State]:
    """The open question fails: ``then``, or down."""
    return {**dict.fromkeys(_FAILURES, then), Event.UNREACHABLE: State.DOWN}


_AWAY: Final = {
    Event.ASKED: State.LOST,
    Event.PROBED: State.READY,
    Event.NOT_READY: State.LOST,
    Event.VERSION_NAMED: State.LOST,
    Event.PAUSE_ANSWERED: State.LOST,
    Event.RESUME_ANSWERED: State.LOST,
    Event.GIVEN_UP: State.LOST,
    **_failing(State.LOST),
}

TRANSITIONS: Final[Mapping[State, Mapping[Event, State]]] = {
    State.OUTSIDE: _row(
        State.OUTSIDE,
        {Event.JOINED: State.READY, Event.UNREACHABLE: State.OUTSIDE, Event.GIVEN_UP: State.OUTSIDE},
    ),
    State.READY: _row(
        State.READY,
        {
            Event.DOUBTED: State.SUSPECT,
            Event.FOUND_PAUSED: State.PAUSED,
            Event.NOT_READY: State.LOST,
            Event.PAUSE_SENT: State.PAUSING,
            Event.ASKED: State.READY,
            Event.VERSION_NAMED: State.READY,
            Event.GIVEN_UP: State.LOST,
            **_failing(State.LOST),
        },
    ),
    State.SUSPECT: _row(
        State.SUSPECT,
        {
            Event.PAUSE_SENT: State.PAUSING,
            Event.ASKED: State.SUSPECT,
            Event.PROBED: State.READY,
            Event.NOT_READY: State.LOST,
            Event.VERSION_NAMED: State.SUSPECT,
            Event.GIVEN_UP: State.LOST,
            **_failing(State.LOST),
        },
    ),
    State.PAUSING: _row(
        State.PAUSING,
        {Event.PAUSE_ANSWERED: State.PAUSED, Event.GIVEN_UP: State.LOST, **_failing(State.LOST)},
    ),
    State.PAUSED: _row(
        State.PAUSED,
        {
            Event.PAUSE_SENT: State.PAUSING,
            Event.RESUME_SENT: State.RESUMING,
            Event.ASKED: State.PAUSED,
            Event.VERSION_NAMED: State.PAUSED,
            Event.GIVEN_UP: State.LOST,
            **_failing(State.LOST),
        },
    ),
    State.RESUMING: _row(
        State.RESUMING,
        {
            Event.RESUME_ANSWERED: State.READY,
            Event.GIVEN_UP: State.LOST,
            **_failing(State.LOST),
            Event.REFUSED: State.PAUSED,
            Event.BROKEN: State.PAUSED,
        },
    ),
    State.LOST: _row(State.LOST, {**_AWAY, Event.RESUME_SENT: State.LOST, Event.PAUSE_SENT: State.PAUSING}),
    State.DOWN: _row(State.DOWN, {**_AWAY, Event.RESUME_SENT: State.DOWN, Event.ASKED: State.DOWN}),
}
"""The state after each event that a server in a state can have. ``step`` adds one thing: a server that is doubted and becomes
ready goes on to the state after DOUBTED."""


@attrs.frozen(kw_only=True)
class Standing:
    """Everything that is known about one server: its state, and the data that the state alone does not say."""

    state: State = State.OUTSIDE
    weights: Weights = Weights()  # noqa: RUF009  frozen
    window: bool = False
    """A weight-update window is open."""
    doubted: bool = False
    """A look has to confirm that it samples, and with which weights, once it is resumed."""
    must_resume: bool = False
    """It is lost or down, and may be paused by this client: a resume has to be answered before a look can help."""
    late_pause: bool = False
    """A pause was sent that it has not answered: the pause may be carried out even after a resume."""
    found_paused: bool = False
    """It is lost because it was not ready when the client met it. A weight-update window takes it over."""
    why: str | None = None
    """The reason for which it is lost or down."""
    asked: int = 0
    """The number of the newest question."""
    open: int | None = None
    """The number of the question whose answer counts; None if the answer to no question counts."""

    @property
    def lost(self) -> bool:
        """True if it is lost or down."""
        return self.state in {State.LOST, State.DOWN}

    @property
    def joins_windows(self) -> bool:
        """True if a window pauses it: it is not lost, or was found paused; and it did not refuse the last window."""
        return (self.found_paused or not self.lost) and not self.weights.barred

    @property
    def may_be_paused(self) -> bool:
        """True if a pause of this client may be in force: it acknowledges no abort, and has to be resumed."""
        return self.must_resume or self.state in {State.PAUSING, State.PAUSED, State.RESUMING}

    @property
    def samples(self) -> bool:
        """True if it answers and is not paused: it can be told to abort requests."""
        return self.state in {State.READY, State.SUSPECT}

    @property
    def usable(self) -> bool:
        """True if a request may be sent to it now."""
        return self.samples and not self.window and self.weights.fit


@attrs.frozen
class Told:
    """An event with its data. ``question``: the number of the question that it answers; None if it answers none."""

    event: Event
    question: int | None = None
    why: str | None = None
    name: object = None
    """Of its weights, if it named them."""
    version: int = 0
    """The one that is required."""
    past: Past = Past.NONE
    """What an earlier run knew of the server, if a version is required for the first time."""


class Effect(enum.Enum):
    """Something that the client has to do because of an event."""

    WAKE = "wake"
    """Wake the requests that wait for a server, and those who watch for what blocks all requests."""
    LET_GO = "let go"
    """Read on for no request that is being left: the server acknowledges no abort from now on."""
    RESUME = "resume"
    """The probe is to resume it."""
    LOOK = "look"
    """The probe is to ask if it is ready, and for its weights."""
    PAY = "pay"
    """Aborts that are owed to it can be sent again."""
    REPORT_LOST = "report lost"
    """Log that it is lost, and why."""
    REPORT_BACK = "report back"
    """Log that it is back."""
    REPORT_OUTDATED = "report outdated"
    """Log that it answers, but has other weights than the required ones."""


def step(standing: Standing, told: Told) -> tuple[Standing, tuple[Effect, ...]]:
    """Return the standing after the event, and what has to be done.

    An answer that does not count (see ``counts``) changes nothing and has no effects.

    Raises:
      IllegalTransition: the table has no such entry.
    """
    if not counts(standing, told):
        return standing, ()
    try:
        state = TRANSITIONS[standing.state][told.event]
    except KeyError:
        raise IllegalTransition(f"a server that is {standing.state.value} cannot {told.event.value}") from None
    after = _after(standing, told, state)
    if after.state is State.READY and after.doubted:
        after = attrs.evolve(after, state=TRANSITIONS[State.READY][Event.DOUBTED])
    return after, tuple(_effects(standing, told, after))


def counts(standing: Standing, told: Told) -> bool:
    """Return True if the event says something about now: this is the only place that asks.

    The answer to a question that is not open any more is late. In a window, the answer to a look does not say what the
    server will be after the window.
    """
    if told.question is None:
        return True
    about_after = told.event in {Event.PROBED, Event.NOT_READY}
    return told.question == standing.open and not (standing.window and about_after)


def due(standing: Standing) -> Effect | None:
    """Return what the probe has to do for a server: RESUME, LOOK, or None. In a window there is nothing to do."""
    if standing.window:
        return None
    if standing.must_resume or standing.state is State.PAUSED:
        return Effect.RESUME
    return Effect.LOOK if standing.lost or standing.state is State.SUSPECT else None


def _after(standing: Standing, told: Told, state: State) -> Standing:
    lost = state in {State.LOST, State.DOWN}
    return Standing(
        state=state,
        weights=_weights_after(standing, told),
        window=_window_after(standing.window, told.event),
        doubted=not lost and _doubted_after(standing, told),
        must_resume=lost and _must_resume_after(standing, told.event),
        late_pause=_late_pause_after(standing, told.event),
        found_paused=state is State.LOST
        and (standing.found_paused or (told.event is Event.NOT_READY and told.question is None)),
        why=None if not lost else standing.why if standing.lost else told.why,
        asked=standing.asked + (told.event in _QUESTIONS),
        open=_open_after(standing, told),
    )


_QUESTIONS: Final = frozenset({Event.PAUSE_SENT, Event.RESUME_SENT, Event.ASKED})


def _open_after(standing: Standing, told: Told) -> int | None:
    """Return the number of the open question. A pause or a resume has its effect, and so its answer counts, whatever happens."""
    if told.event in _QUESTIONS:
        return standing.asked + 1
    if told.question is not None or told.event in {Event.JOINED, Event.LEFT}:
        return None
    outdates = told.event in {Event.WINDOW_BEGINS, Event.VERSION_REQUIRED}
    is_command = standing.state in {State.PAUSING, State.RESUMING}
    return None if outdates and not is_command else standing.open


def _weights_after(standing: Standing, told: Told) -> Weights:
    weights = standing.weights
    if told.event in {Event.JOINED, Event.PROBED, Event.VERSION_NAMED}:
        return weights.named(told.name)
    if told.event is Event.VERSION_REQUIRED:
        return weights.require(told.version, told.past)
    if told.event is Event.PAUSE_ANSWERED:
        return attrs.evolve(weights, refused_under=None)
    return weights.refuse() if standing.state is State.PAUSING and told.event in _FAILURES else weights


def _window_after(window: bool, event: Event) -> bool:  # noqa: FBT001  a field's old value
    return event is Event.WINDOW_BEGINS or (window and event not in {Event.WINDOW_ENDS, Event.LEFT})


def _doubted_after(standing: Standing, told: Told) -> bool:
    if told.event in {Event.DOUBTED, Event.FOUND_PAUSED}:
        return True
    if told.event is Event.VERSION_REQUIRED:
        return standing.doubted or _weights_after(standing, told).now.version != told.version
    if told.event is Event.WINDOW_ENDS:  # its resume was cut short: the probe resumes it, and looks
        return standing.doubted or standing.may_be_paused
    return standing.doubted and told.event not in {Event.PROBED, Event.JOINED, Event.LEFT}


def _must_resume_after(standing: Standing, event: Event) -> bool:
    if event is Event.RESUME_ANSWERED:
        return False
    if event is Event.NOT_READY:  # it owed an answer to a pause, which was carried out only now
        return standing.must_resume or standing.late_pause
    return event is Event.PAUSE_ANSWERED or standing.may_be_paused


def _late_pause_after(standing: Standing, event: Event) -> bool:
    if event is Event.PAUSE_SENT:
        return True
    if event is Event.REFUSED:
        return standing.late_pause and standing.state is not State.PAUSING
    return standing.late_pause and event not in {Event.PAUSE_ANSWERED, Event.PROBED, Event.JOINED, Event.LEFT}


def _effects(before: Standing, told: Told, after: Standing) -> Iterator[Effect]:
    if (before.state, before.window, before.weights) != (after.state, after.window, after.weights):
        yield Effect.WAKE
    if told.event is Event.PAUSE_SENT:
        yield Effect.LET_GO
    if (duty := due(after)) is not None:
        yield duty
    if after.samples and not before.samples:
        yield Effect.PAY
    if after.lost and not before.lost:
        yield Effect.REPORT_LOST
    if told.event is Event.PROBED:
        if before.lost:
            yield Effect.REPORT_BACK
        if not after.weights.fit:
            yield Effect.REPORT_OUTDATED
