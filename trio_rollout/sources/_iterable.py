"""Prompts from any iterable: what has been taken is counted, what was given back is kept."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any, Literal, final

import attrs
import trio

from .._core.values import GroupId, Prompt
from ..errors import SourceError
from ._position import dumped, loaded, require_same


@attrs.frozen(kw_only=True)
class IterablePosition:
    """What is saved: how many prompts were taken, a digest of their ids, and which were given back."""

    kind: Literal["iterable"] = "iterable"
    taken: int
    digest: str
    returned: tuple[tuple[int, str], ...]


@final
@attrs.define(eq=False, repr=False)
class IterableSource:
    """Prompts from an iterable, an endless one too; a ``Source``.

    The iterable is advanced on the loop and must not block: a source that reads or waits implements ``Source`` itself. A
    state holds a count, so ``restore`` goes through the iterable from its beginning: it must give the same prompts again.
    """

    _prompts: Iterable[Prompt] = attrs.field(alias="prompts")
    _iterator: Iterator[Prompt] = attrs.field(init=False)
    _taken: int = attrs.field(default=0, init=False)
    _digest: Any = attrs.field(factory=lambda: blake2b(digest_size=16), init=False)
    _returned: list[Prompt] = attrs.field(factory=list, init=False)
    _failure: Exception | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        try:
            self._iterator = iter(self._prompts)
        except TypeError as error:
            raise SourceError(
                f"IterableSource needs an iterable of Prompt, got {type(self._prompts).__name__}"
            ) from error

    def __repr__(self) -> str:
        return f"<IterableSource {self._taken} taken, {len(self._returned)} returned>"

    async def take(self, count: int) -> Sequence[Prompt]:
        """Up to ``count`` prompts, those given back first; empty means that the iterable has ended.

        Does not block. Cancelled, it has taken nothing. If the iterable raises, what it gave before comes out first.

        Raises:
          SourceError: the iterable raised, or gave something that is no Prompt; from then on every call raises this.

        """
        await trio.lowlevel.checkpoint()
        taken, self._returned = self._returned[:count], self._returned[count:]
        taken += self._advanced(count - len(taken))
        if not taken and self._failure is not None:
            raise SourceError(f"{self!r}: {self._failure}") from self._failure
        return taken

    async def give_back(self, prompts: Sequence[Prompt]) -> None:
        """Take back prompts that were never finished; they come out first, in this order.

        Does not block. Cancelled, none was taken back.
        """
        await trio.lowlevel.checkpoint()
        self._returned[:0] = prompts

    def state(self) -> dict[str, object]:
        """How many were taken, a digest of their ids, and what was given back: JSON-able."""
        returned = tuple(prompt.group_id for prompt in self._returned)
        return dumped(IterablePosition(taken=self._taken, digest=self._digest.hexdigest(), returned=returned))

    def restore(self, state: Mapping[str, object]) -> None:
        """Go through the iterable again, up to the saved position.

        Raises:
          SourceError: the state is of another kind of source; the iterable gives other prompts now, or is an iterator
            that has been advanced already.

        """
        saved = loaded(state, IterablePosition, kind="iterable", source=self)
        again = iter(self._prompts)
        if again is self._iterator and self._taken:
            raise SourceError(f"{self!r}: an iterator can't be restored once it was advanced; pass an iterable")
        returned = {GroupId(*group_id): None for group_id in saved.returned}
        found: dict[GroupId, Prompt] = {}
        self._iterator, self._taken, self._failure = again, 0, None
        self._digest, self._returned = blake2b(digest_size=16), []
        while self._taken < saved.taken and (batch := self._advanced(min(saved.taken - self._taken, 1024))):
            found.update((prompt.group_id, prompt) for prompt in batch if prompt.group_id in returned)
        require_same(
            (saved.taken, saved.digest),
            (self._taken, self._digest.hexdigest()),
            what="sequence of prompts",
            source=self,
        )
        self._returned = [found[group_id] for group_id in returned]

    def _advanced(self, count: int) -> list[Prompt]:
        """Up to ``count`` more; fewer when the iterable ends, or fails, which is remembered."""
        ahead: list[Prompt] = []
        try:
            if self._failure is None:
                for item in islice(self._iterator, count):
                    self._count(item)
                    ahead.append(item)
        except Exception as error:  # ruff: ignore[blind-except]  the iterable is user code; take() raises it
            self._failure = error
        return ahead

    def _count(self, item: object) -> None:
        if not isinstance(item, Prompt):
            raise TypeError(f"item {self._taken} is of type {type(item).__name__}, not a Prompt")
        self._digest.update(f"{item.group_id}\n".encode())
        self._taken += 1
