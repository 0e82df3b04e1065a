"""The task of one arm in one process: values that cross a process boundary as JSON."""

import functools
from typing import Any

import attrs

from .bodies import VOCABULARY


@attrs.frozen(kw_only=True)
class Spec:
    """One run of one arm. ``slots`` counts rollouts; times are seconds.

    ``groups``: how many there are; None: no end. ``warm``: answers before a window begins (default: as many as slots);
    ``window``: how long it lasts at least, until ``answers`` have come
    (default: as many as slots). ``limit``: when a job that has not ended is given up. ``reward_fails_mod``: the reward of
    the first try of every prompt whose number is 3 modulo this raises. ``native``: answers may be decoded by the C extension.

    ``turns`` of each rollout, one after the other; ``loses``: the chance that a rollout loses its sandbox, before a random turn.
    ``judge_fails``, ``reward_exits``: so many first calls of the scorer for the first sample of every fourth prompt raise
    ConnectionError, or SystemExit. ``ledger``: the path of the engine's, if it has one; empty for none.
    """

    url: str
    slots: int
    tokens: int = 16
    per_group: int = 8
    prompt: int = 512
    groups: int | None = None
    batch: int = 8
    warm: int | None = None
    window: float = 3.0
    answers: int | None = None
    limit: float = 120.0
    group_s: float | None = 1800.0
    attempts: int = 3
    backoff_s: float = 0.5
    reward_fails_mod: int = 0
    turns: int = 1
    loses: float = 0.0
    judge_fails: int = 0
    reward_exits: int = 0
    ledger: str = ""
    mode: str = "abort"
    native: bool = True

    @property
    def port(self) -> int:
        """The server's."""
        return int(self.url.rpartition(":")[2])

    @property
    def warm_answers(self) -> int:
        """Answers before the window begins."""
        return self.slots if self.warm is None else self.warm

    def to_json(self) -> dict[str, Any]:
        """For the child's command line."""
        return attrs.asdict(self)


def prompt_ids(number: int, length: int) -> list[int]:
    """A prompt: its number first, by which the fake server knows it, then the same ids for everybody."""
    return [number % 65_536, *_same_for_all(length)]


@functools.cache  # made anew for each prompt it was a thirtieth of what a rollout cost, and no engine's work
def _same_for_all(length: int) -> tuple[int, ...]:
    return tuple(place * 7919 % VOCABULARY for place in range(1, length))


def fixed_body(spec: Spec) -> bytes:
    """A request's body, the same every time."""
    ids = ",".join(map(str, prompt_ids(1, spec.prompt)))
    text = f'{{"rid":"{"0" * 32}","input_ids":[{ids}],"sampling_params":{{"max_new_tokens":{spec.tokens}}},"return_logprob":true}}'
    return text.encode()
