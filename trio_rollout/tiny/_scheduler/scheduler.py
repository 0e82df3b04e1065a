"""Continuous batching: one step gives one token to every running request. No I/O, no clock, no Trio.

Owns: the queue, the running requests, the prefix cache, the weights in use and their version. ``Batch`` holds the columns that
one vectorised step needs of every request; it is rebuilt when its members change.

The rules are SGLang's:

- A running request that is aborted gets one more token; one in the queue ends at once. Aborts match by prefix.
- The queue is counted before a step takes from it.
- A pause in place keeps the running requests; a pause with retraction puts them back into the queue, as far as it has room.
- A paused server reports the load that it had before.
- A token outside the vocabulary kills the server, and so does such a stop token together with ``min_new_tokens``.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import final

import attrs
import numpy as np
import numpy.typing as npt

from .._model.model import Draw, Floats, Ints, Limits, TinyModel, draw, log_softmax, uniforms
from .prefix_cache import PrefixCache
from .request import ABORTED, ABORTED_IN_QUEUE, QUEUE_FULL, Ranked, Request, stop_reason


def ranked(scores: Floats, count: int) -> Ranked:
    """Return the ``count`` likeliest tokens with their log-probs, best first."""
    count = min(count, scores.size)
    best = np.argpartition(-scores, count - 1)[:count]
    best = best[np.argsort(-scores[best], kind="stable")]
    return [(float(scores[token]), int(token), None) for token in best]


def picked(scores: Floats, tokens: Sequence[int]) -> Ranked:
    """Return the log-probs of ``tokens``."""
    return [(float(scores[token]), token, None) for token in tokens]


def score_prompt(model: TinyModel, request: Request) -> None:
    """Fill in the log-probs of the prompt's tokens from ``log_probs_from`` on; the first one has none, as in SGLang."""
    wanted, start = request.wanted, request.wanted.log_probs_from
    rest = request.prompt[start:]
    if not rest.size:
        return
    scores = model.log_probs(request.prompt, start + 1)
    request.input_log_probs = [None, *scores.tolist()]
    if not wanted.top and not wanted.token_ids:
        return
    rows = model.row_indices(request.prompt, start + 1)
    if wanted.top:
        request.input_top = [None, *(ranked(log_softmax(model.table[[row]])[0], wanted.top) for row in rows)]
    if wanted.token_ids:
        request.input_chosen = [None, *(picked(log_softmax(model.table[[row]])[0], wanted.token_ids) for row in rows)]


@final
@attrs.define(eq=False, repr=False)
class Batch:
    """Requests side by side. ``step`` samples one token for each of them and appends it."""

    requests: tuple[Request, ...]
    _codes: Ints
    _temperatures: Floats
    _seeds: npt.NDArray[np.uint64]
    _positions: npt.NDArray[np.uint64]
    _limited: tuple[tuple[int, Limits], ...]
    _special: tuple[int, ...]
    """Rows that are treated one by one: logits changed, tokens forced, log-probs of other tokens wanted."""

    @classmethod
    def of(cls, requests: Sequence[Request], model: TinyModel) -> "Batch":
        """Return the columns of ``requests`` as they are now."""
        span = model.context_tokens
        return cls(
            tuple(requests),
            np.stack([model.codes([*one.prompt[-span:], *one.output_ids[-span:]]) for one in requests]),
            np.array([[one.sampling.temperature] for one in requests], np.float32),
            np.array([one.seed for one in requests], np.uint64),
            np.array([len(one.output_ids) for one in requests], np.uint64),
            tuple((row, one.sampling.limits) for row, one in enumerate(requests) if one.sampling.limits.any),
            tuple(row for row, one in enumerate(requests) if _is_special(one)),
        )

    def step(self, model: TinyModel) -> None:
        """Sample one token for every request."""
        logits = model.table.take(model.rows_of(self._codes), axis=0)
        for row in self._special:
            _adjust(logits[row], self.requests[row])
        drawn = draw(logits, self._temperatures, uniforms(self._seeds, self._positions), self._limited)
        ids, log_probs = drawn.ids, drawn.log_probs
        for row in self._special:
            self._force(row, drawn)
        self._codes[:, :-1] = self._codes[:, 1:]
        self._codes[:, -1] = ids + 1
        self._positions += np.uint64(1)
        for request, token, log_prob in zip(self.requests, ids.tolist(), log_probs.tolist(), strict=True):
            request.output_ids.append(token)
            request.log_probs.append(log_prob)

    def _force(self, row: int, drawn: Draw) -> None:
        """Return a scripted token in place of the sampled one; its log-prob is the model's."""
        request, scores = self.requests[row], drawn.row(row)
        place = len(request.output_ids)
        if place < len(request.forced):
            token = request.forced[place]
            drawn.ids[row], drawn.log_probs[row] = token, scores[token]
        if request.wanted.top:
            request.top.append(ranked(scores, request.wanted.top))
        if request.wanted.token_ids:
            request.chosen.append(picked(scores, request.wanted.token_ids))


def _is_special(request: Request) -> bool:
    wanted = request.wanted
    return bool(request.sampling.penalties.any or request.forced or wanted.top or wanted.token_ids)


def _adjust(logits: Floats, request: Request) -> None:
    """Apply penalties and biases to the logits in place, before the temperature."""
    penalties = request.sampling.penalties
    if not penalties.any:
        return
    for token, bias in penalties.logit_bias.items():
        logits[token] += np.float32(bias)
    if request.output_ids:
        seen, counts = np.unique(np.asarray(request.output_ids), return_counts=True)
        logits[seen] -= (penalties.frequency * counts + penalties.presence).astype(np.float32)
        repeated, factor = logits[seen], np.float32(penalties.repetition)
        logits[seen] = np.where(repeated > 0, repeated / factor, repeated * factor)
    if len(request.output_ids) < penalties.min_new_tokens:
        logits[list(request.sampling.stop_ids)] = -np.inf


class OutOfVocabulary(Exception):
    """A token id outside the vocabulary reached the model; a real server dies of that."""


@attrs.frozen(eq=False)
class Step:
    """The result of one step."""

    ended: tuple[Request, ...] = ()
    """Requests that have ended; their slots are free."""
    advanced: tuple[Request, ...] = ()
    """Requests that got a token and go on."""


@attrs.frozen(kw_only=True)
class Load:
    """The load of a scheduler."""

    running: int = 0
    waiting: int = 0
    retracted: int = 0
    used_tokens: int = 0


@final
@attrs.define(eq=False, repr=False, kw_only=True)
class Scheduler:
    """The queue and the running batch."""

    model: TinyModel
    piece: Callable[[int], bytes]
    max_running: int
    max_queued: int | None
    cache: PrefixCache
    version: str = "default"
    paused: bool = attrs.field(default=False, init=False)
    load: Load = attrs.field(factory=Load, init=False)
    """The load before the last pause."""
    waiting: deque[Request] = attrs.field(factory=deque, init=False)
    running: list[Request] = attrs.field(factory=list, init=False)
    _batch: Batch | None = attrs.field(default=None, init=False)
    """The columns of ``running``; None when its members or the weights have changed."""

    def __repr__(self) -> str:
        paused = ", paused" if self.paused else ""
        return f"<Scheduler {len(self.running)} running, {len(self.waiting)} waiting{paused} | weights {self.version}>"

    @property
    def has_work(self) -> bool:
        """True if a step would do anything."""
        return not self.paused and bool(self.running or self.waiting)

    @property
    def idle(self) -> bool:
        """True if the cache may be flushed: nothing runs, and nothing waits except for the resume."""
        return not self.running and (self.paused or not self.waiting)

    def load_now(self) -> Load:
        """Return the load of this moment. A paused server reports ``load`` instead, the load before the pause."""
        used = sum(one.prompt.size + len(one.output_ids) for one in self.running)
        return Load(
            running=len(self.running),
            waiting=len(self.waiting),
            retracted=sum(one.retractions > 0 for one in self.waiting),
            used_tokens=int(used),
        )

    def add(self, request: Request) -> bool:
        """Queue a request. Return False if the queue is full: the request has ended then."""
        if self.max_queued is not None and len(self.waiting) >= self.max_queued:
            request.end(QUEUE_FULL, self.version, in_queue=True)
            return False
        self.waiting.append(request)
        return True

    def abort(self, prefix: str | None) -> tuple[Request, ...]:
        """Abort the requests whose rid begins with ``prefix`` (None: all). Return those of the queue, which have ended now."""
        queued = tuple(request for request in self.waiting if prefix is None or request.rid.startswith(prefix))
        for request in queued:
            request.end(ABORTED_IN_QUEUE, self.version, in_queue=True)
        if queued:
            self.waiting = deque(request for request in self.waiting if request.finish is None)
        for request in self.running:
            if prefix is None or request.rid.startswith(prefix):
                request.aborting = True
        return queued

    def pause(self, *, retract: bool) -> tuple[Request, ...]:
        """Stop stepping. With ``retract`` the running requests go back to the queue and lose their cache.

        Returns those that the queue has no room for: SGLang gives them up, with what they have sampled.
        """
        self.load = self.load_now()
        self.paused = True
        if not retract:
            return ()
        retracted, self.running, self._batch = self.running, [], None
        for request in retracted:
            request.retractions += 1
        return tuple(request for request in retracted if not self.add(request))

    def resume(self) -> None:
        """Resume stepping."""
        self.paused = False

    def set_version(self, version: str) -> None:
        """Name the weights: tokens sampled from now on carry ``version``."""
        if version == self.version:
            return
        for request in (*self.running, *self.waiting):
            if request.output_ids:
                request.version_changes.append((self.version, len(request.output_ids)))
        self.version = version

    def set_model(self, model: TinyModel) -> None:
        """Sample with other weights from now on; running requests go on."""
        self.model, self._batch = model, None

    def flush(self) -> bool:
        """Empty the prefix cache, unless a request runs or waits; return True if it was emptied."""
        if self.idle:
            self.cache.clear()
        return self.idle

    def step(self) -> Step:
        """Admit the requests that fit, then sample one token for every running request.

        Raises:
          OutOfVocabulary: a prompt holds an id that the model does not have.
        """
        if self.paused:
            return Step()
        ended = self._admit()
        if not self.running:
            return Step(tuple(ended))
        batch = self._batch = self._batch or Batch.of(self.running, self.model)
        batch.step(self.model)
        advanced = []
        for request in self.running:
            finish = ABORTED if request.aborting else stop_reason(request, self.piece)
            if finish is None:
                advanced.append(request)
            else:
                request.end(finish, self.version)
                self._remember(request)
                ended.append(request)
        if len(advanced) < len(self.running):
            self.running, self._batch = advanced, None
        return Step(tuple(ended), tuple(advanced))

    def _admit(self) -> list[Request]:
        """Move the requests that fit from the queue to the batch; return those that only wanted their prompt scored."""
        ended, admitted = [], []
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting.popleft()
            self._prefill(request)
            admitted.append(request)
            if request.sampling.max_new_tokens == 0:
                request.end({"type": "length", "length": 0}, self.version)
                ended.append(request)
            else:
                self.running.append(request)
                self._batch = None
        # Not earlier: requests that are prefilled together do not see each other's prefix.
        self._remember(*admitted)
        return ended

    def _prefill(self, request: Request) -> None:
        prompt = request.prompt
        if prompt.size and (int(prompt.min()) < 0 or int(prompt.max()) >= self.model.vocab):
            raise OutOfVocabulary(
                f"request {request.rid}: token ids must lie in 0..{self.model.vocab - 1}, "
                f"got {int(prompt.min())}..{int(prompt.max())}"
            )
        stops = request.sampling.stop_ids if request.sampling.penalties.min_new_tokens else ()
        if any(not 0 <= token < self.model.vocab for token in stops):
            raise OutOfVocabulary(
                f"request {request.rid}: min_new_tokens, and a stop token outside 0..{self.model.vocab - 1}: {sorted(stops)}"
            )
        if request.retractions:
            return  # it has its log-probs, and counts only the tokens that were cached at its first start
        longest = prompt.size - 1  # the last token is always computed: its logits are what is sampled from
        if request.wanted.log_probs and request.wanted.log_probs_from >= 0:
            longest = min(longest, request.wanted.log_probs_from)
            score_prompt(self.model, request)
        request.cached_tokens = self.cache.match(prompt[: max(longest, 0)])

    def _remember(self, *requests: Request) -> None:
        for request in requests:
            # The last token sampled has never been fed to the model.
            fed = np.asarray(request.output_ids[:-1], np.int64)
            self.cache.insert(np.concatenate([request.prompt, fed]) if fed.size else request.prompt)
