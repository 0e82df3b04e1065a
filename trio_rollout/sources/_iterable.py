"""Prompts from any iterable: taken prompts are counted, prompts that were given back are kept."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import islice, starmap
from typing import Any, Final, Literal, final

import attrs
import msgspec
import trio

from .._core.values import GroupId, Prompt
from .._util.user_code import ends_the_process
from ..errors import SourceError
from ._position import Count, dumped, loaded, require_same

_STRIDE = 1024  # most prompts in memory while a restore goes through the iterable


@final
@attrs.define(eq=False, repr=False)
class IterableSource:
    """Prompts from an iterable, which may be endless; a ``Source``.

    The iterable runs on the event loop and must not block: a source that reads or waits implements ``Source`` itself. A
    state holds a count, so ``restore`` goes through the iterable from its beginning, which must give the same prompts
    again: the same ids, inputs and labels. ``identity`` names the prompts for a ledger, which refuses a source of another
    name before anything is read.
    """

    _prompts: Iterable[Prompt] = attrs.field(alias="prompts")
    identity: str | None = attrs.field(default=None, kw_only=True)
    _cursor: "Cursor" = attrs.field(init=False)
    _returned: list[Prompt] = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        given: object = self._prompts
        if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
            raise SourceError(f"IterableSource needs an iterable of Prompt, got {type(self._prompts).__name__}")
        self._cursor = Cursor(iter(self._prompts))

    def __repr__(self) -> str:
        return f"<IterableSource {self._cursor.taken} taken, {len(self._returned)} returned>"

    async def take(self, count: int) -> Sequence[Prompt]:
        """Return up to ``count`` prompts, those given back first; empty means that the iterable has ended.

        Does not block. Cancelled, it has taken nothing. If the iterable raises, its earlier prompts come out first.

        Raises:
          SourceError: the iterable raised, or gave an object that is no Prompt; from then on every call raises this.
        """
        await trio.lowlevel.checkpoint()
        taken, self._returned = self._returned[:count], self._returned[count:]
        taken += self._cursor.advance(count - len(taken))
        failure = self._cursor.failure
        if not taken and failure is not None:
            raise SourceError(f"{self!r}: the iterable failed: {type(failure).__name__}: {failure}") from failure
        return taken

    async def give_back(self, prompts: Sequence[Prompt]) -> None:
        """Take back prompts that were not finished; they come out first, in this order.

        Does not block. Cancelled, no prompt was taken back.
        """
        await trio.lowlevel.checkpoint()
        self._returned[:0] = prompts

    def state(self) -> dict[str, object]:
        """Return the position as JSON data: the number of taken prompts, a digest of their ids, and those given back."""
        returned = tuple(prompt.group_id for prompt in self._returned)
        cursor = self._cursor
        return dumped(
            IterablePosition(taken=cursor.taken, digest=cursor.digest, content=cursor.content, returned=returned)
        )

    def restore(self, state: Mapping[str, object]) -> None:
        """Go through the iterable again, up to the saved position.

        Raises:
          SourceError: the state belongs to another kind of source; or the iterable gives other prompts now; or it is an
            iterator that has been advanced already. The position is unchanged.
        """
        saved = loaded(state, IterablePosition, kind="iterable", source=self)
        cursor = Cursor(iter(self._prompts))
        if cursor.iterator is self._cursor.iterator and self._cursor.taken:
            raise SourceError(
                f"{self!r}: an iterator can't be restored once it was advanced; pass an iterable that can begin again"
            )
        wanted = dict.fromkeys(starmap(GroupId, saved.returned))
        found: dict[GroupId, Prompt] = {}
        while ahead := cursor.advance(min(saved.taken - cursor.taken, _STRIDE)):
            found.update((prompt.group_id, prompt) for prompt in ahead if prompt.group_id in wanted)
        before, now = (saved.taken, saved.digest), (cursor.taken, cursor.digest)
        require_same(before, now, what="sequence of prompts (count, digest)", source=self)
        if saved.content is not None:
            require_same(saved.content, cursor.content, what="content of prompts (digest)", source=self)
        if missing := [group_id for group_id in wanted if group_id not in found]:
            raise SourceError(
                f"{self!r}: the state gives back prompts that were never taken: {', '.join(map(str, missing))}"
            )
        self._cursor, self._returned = cursor, [found[group_id] for group_id in wanted]


@attrs.frozen(kw_only=True)
class IterablePosition:
    """A saved position: the number of taken prompts, a digest of their ids, and the prompts that were given back.

    ``content`` is a digest of their inputs and labels; None in a state of an older version.
    """

    kind: Literal["iterable"] = "iterable"
    taken: Count
    digest: str
    content: str | None = None
    returned: tuple[tuple[int, str], ...]


@attrs.define(eq=False)
class Cursor:
    """A position in an iterable. An iterable that raises has ended: most iterators end after they have raised."""

    iterator: Iterator[Prompt]
    taken: int = 0
    failure: BaseException | None = None
    _digest: Any = attrs.field(factory=lambda: blake2b(digest_size=16))
    _content: Any = attrs.field(factory=lambda: blake2b(digest_size=16))

    def advance(self, count: int) -> list[Prompt]:
        """Return up to ``count`` more prompts; fewer when the iterable ends or raises."""
        ahead: list[Prompt] = []
        if self.failure is not None:
            return ahead
        try:
            for item in islice(self.iterator, count):
                self._require_prompt(item)
                ahead.append(item)
                self.taken += 1
        except BaseException as error:  # noqa: ASYNC103  the iterable is user code; take() raises its failure
            if ends_the_process(error):
                raise
            self.failure = error
        return ahead

    @property
    def digest(self) -> str:
        """The digest of the ids so far."""
        found: str = self._digest.hexdigest()
        return found

    @property
    def content(self) -> str:
        """The digest of the inputs and labels so far."""
        found: str = self._content.hexdigest()
        return found

    def _require_prompt(self, item: object) -> None:
        if not isinstance(item, Prompt):
            raise TypeError(f"item {self.taken} is of type {type(item).__name__}, not a Prompt")
        self._digest.update(f"{item.group_id}\n".encode())
        self._content.update(_content_of(item))


_encode: Final = msgspec.json.Encoder(enc_hook=lambda value: type(value).__name__).encode


def _content_of(prompt: Prompt) -> bytes:
    """Return what makes a prompt another one for the model, or for its reward, as far as it is JSON."""
    ids = b"" if prompt.input_ids is None else prompt.input_ids.tobytes()
    parts = (prompt.text, prompt.messages, prompt.tools, prompt.label)
    # What is no JSON is told apart by its id alone.
    with suppress(ValueError, TypeError, OverflowError, RecursionError):
        return ids + _encode(parts) + b"\n"
    return ids + b"\n"
