"""Putting an engine together: its parts, wired, with what the ledger remembers."""

from collections import deque
from collections.abc import Sequence

import attrs

from ._core.book import Book, Entry
from ._core.events import Recovered, RunIdentity
from ._core.lifecycle import State
from ._core.retry import FailureBudget
from ._core.settings import EngineSettings
from ._core.values import Group
from ._delivery import Delivery
from ._fate import Fate
from ._freshness import Freshness
from ._instruments import Instruments
from ._live import LiveAttempts
from ._pool import Pool
from ._ready import ReadyBuffer
from ._recipe import Recipe
from ._record import Record
from ._signal import StateChange
from ._slots import Slots
from ._weights import Weights
from .abc import Instrument, Ledger, Source


@attrs.frozen(eq=False)
class Parts:
    """Everything an engine is made of."""

    recipe: Recipe
    book: Book
    delivery: Delivery
    pool: Pool
    weights: Weights
    record: Record
    fate: Fate
    slots: Slots


async def assemble(source: Source, recipe: Recipe, ledger: Ledger | None, instruments: Sequence[Instrument]) -> Parts:
    """Wire an engine's parts and restore them to where the ledger's last run was. Starts nothing.

    A source that can check its prompts (``check()``) does so before anything else: bad input must not cost a run's work.
    """
    check = getattr(source, "check", None)
    if check is not None:
        await check()
    past = Recovered() if ledger is None else await ledger.begin(_identity(source, recipe.settings))
    parts = _wire(source, recipe, ledger, Instruments(instruments))
    if past.source_state is not None:
        source.restore(past.source_state)
    _remember(parts, past)
    named = [version for version in (await recipe.servers.versions()).values() if version is not None]
    recipe.gate.version = max(named, default=0) if past.weight_version is None else past.weight_version
    recipe.servers.require_version(recipe.gate.version)
    return parts


def _wire(source: Source, recipe: Recipe, ledger: Ledger | None, instruments: Instruments) -> Parts:
    changed, came, settings = StateChange(), StateChange(), recipe.settings
    fate, book, live, queue = Fate(came), Book(), LiveAttempts(), deque[Entry]()
    record = Record(ledger, fate)
    freshness = Freshness(staleness=settings.staleness, gate=recipe.gate, live=live, instruments=instruments, came=came)
    ready = ReadyBuffer(book=book, max_ready=settings.max_ready, came=came, changed=changed, due=freshness.due)
    slots = Slots(settings.max_running, changed)
    pool = Pool(
        source=source,
        recipe=recipe,
        book=book,
        ready=ready,
        record=record,
        fate=fate,
        live=live,
        slots=slots,
        changed=changed,
        instruments=instruments,
        budget=FailureBudget(settings.failure_budget),
        freshness=freshness,
        queue=queue,
    )
    new_id = recipe.ports.new_rid
    delivery = Delivery(
        book=book, ready=ready, record=record, fate=fate, freshness=freshness, queue=queue, new_id=new_id
    )
    weights = _weights(pool)
    return Parts(recipe, book, delivery, pool, weights, record, fate, slots)


def _weights(pool: Pool) -> Weights:
    return Weights(
        recipe=pool.recipe,
        live=pool.live,
        evaluations=LiveAttempts(),
        record=pool.record,
        fate=pool.fate,
        changed=pool.changed,
        freshness=pool.freshness,
        instruments=pool.instruments,
    )


def _remember(parts: Parts, past: Recovered) -> None:
    book = parts.book
    book.count_earlier(acked=past.acked, filtered=past.filtered, reports=past.quarantined)
    parts.pool.remember([
        book.enter(
            Entry(
                id=item.prompt.group_id,
                prompt=item.prompt,
                attempt=item.attempt,
                attempts=item.attempts,
                free=item.free,
            )
        )
        for item in past.unfinished
    ])
    handed_out = [book.enter(_ready_entry(group)) for _, groups in past.delivered for group in groups]
    fresh = [book.enter(_ready_entry(group)) for group in past.ready]
    parts.delivery.remember(handed_out, fresh, acked_step=past.acked_step)
    parts.delivery.next_step = past.next_step


def _ready_entry(group: Group) -> Entry:
    return Entry(id=group.id, prompt=group.prompt, state=State.READY, attempt=group.attempt, group=group)


def _identity(source: Source, settings: EngineSettings) -> RunIdentity:
    """A source names itself by an attribute ``identity``; one without is known by its type."""
    name = getattr(source, "identity", None)
    text = str(name) if name is not None else f"{type(source).__module__}.{type(source).__qualname__}"
    return RunIdentity(source=text, samples_per_prompt=settings.samples_per_prompt)
