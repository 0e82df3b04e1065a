"""Prompts from any iterable: what has been taken is counted, what was given back is kept."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice, starmap
from typing import Any, Literal, final

import attrs
import trio

from .._core.values import GroupId, Prompt
from ..errors import SourceError
from ._position import Count, dumped, loaded, require_same

_STRIDE = 1024  # prompts held at once while a restore goes through the iterable


@attrs.frozen(kw_only=True)
class IterablePosition:
    """What is saved: how many prompts were taken, a digest of their ids, and which were given back."""

    kind: Literal["iterable"] = "iterable"
    taken: Count
    digest: str
    returned: tuple[tuple[int, str], ...]


@attrs.define(eq=False)
class Cursor:
    """A place in an iterable. An iterable that fails is over: most iterators end after they have raised."""

    iterator: Iterator[Prompt]
    taken: int = 0
    failure: Exception | None = None
    _digest: Any = attrs.field(factory=lambda: blake2b(digest_size=16))

    def advance(self, count: int) -> list[Prompt]:
        """Up to ``count`` more; fewer when the iterable ends or fails."""
        ahead: list[Prompt] = []
        if self.failure is not None:
            return ahead
        try:
            for item in islice(self.iterator, count):
                self._require_prompt(item)
                ahead.append(item)
                self.taken += 1
        except Exception as error:  # ruff: ignore[blind-except]  the iterable is user code; take() raises it
            self.failure = error
        return ahead

    @property
    def digest(self) -> str:
        """Of the ids so far."""
        found: str = self._digest.hexdigest()
        return found

    def _require_prompt(self, item: object) -> None:
        if not isinstance(item, Prompt):
            raise TypeError(f"item {self.taken} is of type {type(item).__name__}, not a Prompt")
        self._digest.update(f"{item.group_id}\n".encode())


@final
@attrs.define(eq=False, repr=False)
class IterableSource:
    """Prompts from an iterable, an endless one too; a ``Source``.

    The iterable is advanced on the loop and must not block: a source that reads or waits implements ``Source`` itself. A
    state holds a count, so ``restore`` goes through the iterable from its beginning: it must give the same prompts again.
    ``identity`` names them for a ledger, which refuses those of another name; without one, only other ids are noticed.
    """

    _prompts: Iterable[Prompt] = attrs.field(alias="prompts")
    identity: str | None = attrs.field(default=None, kw_only=True)
    _cursor: Cursor = attrs.field(init=False)
    _returned: list[Prompt] = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self._prompts, Iterable):
            raise SourceError(f"IterableSource needs an iterable of Prompt, got {type(self._prompts).__name__}")
        self._cursor = Cursor(iter(self._prompts))

    def __repr__(self) -> str:
        return f"<IterableSource {self._cursor.taken} taken, {len(self._returned)} returned>"

    async def take(self, count: int) -> Sequence[Prompt]:
        """Up to ``count`` prompts, those given back first; empty means that the iterable has ended.

        Does not block. Cancelled, it has taken nothing. If the iterable raises, what it gave before comes out first.

        Raises:
          SourceError: the iterable raised, or gave something that is no Prompt; from then on every call raises this.

        """
        await trio.lowlevel.checkpoint()
        taken, self._returned = self._returned[:count], self._returned[count:]
        taken += self._cursor.advance(count - len(taken))
        failure = self._cursor.failure
        if not taken and failure is not None:
            raise SourceError(f"{self!r}: the iterable failed: {type(failure).__name__}: {failure}") from failure
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
        return dumped(IterablePosition(taken=self._cursor.taken, digest=self._cursor.digest, returned=returned))

    def restore(self, state: Mapping[str, object]) -> None:
        """Go through the iterable again, up to the saved position.

        Raises:
          SourceError: the state is of another kind of source; the iterable gives other prompts now, or is an iterator
            that has been advanced already. The position is as it was.

        """
        saved = loaded(state, IterablePosition, kind="iterable", source=self)
        cursor = Cursor(iter(self._prompts))
        if cursor.iterator is self._cursor.iterator and self._cursor.taken:
            raise SourceError(f"{self!r}: an iterator can't be restored once it was advanced; pass an iterable")
        wanted = dict.fromkeys(starmap(GroupId, saved.returned))
        found: dict[GroupId, Prompt] = {}
        while ahead := cursor.advance(min(saved.taken - cursor.taken, _STRIDE)):
            found.update((prompt.group_id, prompt) for prompt in ahead if prompt.group_id in wanted)
        before, now = (saved.taken, saved.digest), (cursor.taken, cursor.digest)
        require_same(before, now, what="sequence of prompts (count, digest)", source=self)
        if missing := [group_id for group_id in wanted if group_id not in found]:
            raise SourceError(f"{self!r}: the state gives back what was never taken: {', '.join(map(str, missing))}")
        self._cursor, self._returned = cursor, [found[group_id] for group_id in wanted]
