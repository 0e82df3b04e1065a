"""In which order an epoch reads its records.

Prompts from a JSONL file: a cursor over (epoch, position) that can be saved and restored.

Owns the cursor and the prompts given back, as ids; the file is opened for each read and closed again. Invariant: the cursor
moves only after a read has succeeded, with no checkpoint in between, so a cancelled ``take`` has taken nothing.
"""

from collections.abc import Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import Literal, final

import attrs
import numpy as np
import numpy.typing as npt
import trio

from .._core.checks import Validator, whole
from .._core.values import GroupId, Prompt
from .._util.threads import RunSync, run_in_thread
from ..errors import SourceError
from ._jsonl_file import FileMark, JsonlFile, require_file, scan
from ._position import Count, dumped, loaded, require_same
from ._record import DEFAULT_LABEL_KEY, DEFAULT_METADATA_KEY, Keys


@attrs.define(eq=False)
class EpochOrder:
    """File order, or without repetition a shuffled one for each (seed, epoch), the same on every machine.

    Sorted random keys in place of ``Generator.permutation``: numpy keeps the streams of its bit generators for good, but
    not what its generators make of them, and a saved position means an order.
    """

    count: int
    seed: int | None
    _epoch: int = attrs.field(default=-1, init=False)
    _shuffled: npt.NDArray[np.int64] = attrs.field(factory=lambda: np.empty(0, np.int64), init=False)

    def record(self, epoch: int, position: int) -> int:
        """The number of the record at this position of the epoch. Slow once an epoch, when it is shuffled."""
        if self.seed is None:
            return position
        if epoch != self._epoch:
            bits = np.random.PCG64(np.random.SeedSequence((self.seed, epoch)))
            self._shuffled = np.argsort(bits.random_raw(self.count), kind="stable")
            self._epoch = epoch
        return int(self._shuffled[position])


def _whole_or_none(low: int) -> Validator:
    return attrs.validators.optional(whole(low))


@attrs.frozen(kw_only=True)
class JsonlPosition:
    """What is saved. ``file`` is None as long as nothing was read; ``epoch == epochs`` is the end of data."""

    kind: Literal["jsonl"] = "jsonl"
    file: FileMark | None
    options: dict[str, str | int | None]
    epoch: Count
    position: Count
    returned: tuple[tuple[Count, str], ...]


@final
@attrs.define(eq=False, repr=False)
class JsonlSource:
    """Prompts from a file with one JSON object a line; a ``Source``.

    Under ``prompt_key`` a list of integers is token ids, a string text, a list of objects messages. A line may lack the
    label or the metadata as long as their keys are the default ones; a key that you name must be on every line; None
    reads none. Ids come from ``id_key`` and are unique, else they are the records' numbers: "0", "1", … Blank lines are
    no records. The file is read ``epochs`` times (None: without end), in file order, or with ``shuffle_seed`` (>= 0) in
    another order each epoch. The epoch of each prompt is set here.

    The first ``check`` or ``take`` reads and checks the whole file; 8 bytes a record stay in memory. ``run_sync`` is where
    blocking reads run: in a thread, unless a simulation says otherwise.

    Raises:
      SourceError: there is no such file, or it is empty.
      SettingsError: an option is out of its range.

    """

    path: Path = attrs.field(converter=Path)
    prompt_key: str = attrs.field(default="prompt", kw_only=True)
    label_key: str | None = attrs.field(default=DEFAULT_LABEL_KEY, kw_only=True)
    metadata_key: str | None = attrs.field(default=DEFAULT_METADATA_KEY, kw_only=True)
    id_key: str | None = attrs.field(default=None, kw_only=True)
    epochs: int | None = attrs.field(default=1, kw_only=True, validator=_whole_or_none(1))
    shuffle_seed: int | None = attrs.field(default=None, kw_only=True, validator=_whole_or_none(0))
    run_sync: RunSync = attrs.field(default=run_in_thread, kw_only=True)

    _file: JsonlFile | None = attrs.field(default=None, init=False)
    _order: EpochOrder | None = attrs.field(default=None, init=False)
    _restored_from: FileMark | None = attrs.field(default=None, init=False)
    _epoch: int = attrs.field(default=0, init=False)
    _position: int = attrs.field(default=0, init=False)
    _returned: list[GroupId] = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        require_file(self.path)

    def __repr__(self) -> str:
        return f"<JsonlSource {str(self.path)!r} epoch {self._epoch}, position {self._position}, {len(self._returned)} returned>"

    @property
    def total(self) -> int | None:
        """Prompts in all epochs; None before the file was checked, and without an end."""
        return None if self._file is None or self.epochs is None else len(self._file) * self.epochs

    @property
    def identity(self) -> str:
        """What makes it the same source in another run: the file's content, wherever it lies, and the options.

        Raises:
          SourceError: the file has not been checked yet.

        """
        if self._file is None:
            raise SourceError(f"{self!r}: its identity is its file's content, which is known after check()")
        options = ", ".join(f"{name} {value}" for name, value in self._options().items())
        return f"JSONL of {len(self._file)} prompts (digest {self._file.mark.digest}), {options}"

    async def check(self) -> None:
        """Read and check the whole file, once; ``take`` does it if nobody has.

        Blocks as long as that takes, in a thread. Cancelled, the check is not done.

        Raises:
          SourceError: the file and line of the first thing that is wrong; or a state was restored that was saved from
            another content.

        """
        if self._file is None:
            await self._scanned()
        else:
            await trio.lowlevel.checkpoint()
            self._require_origin(self._restored_from, self._file)

    async def take(self, count: int) -> Sequence[Prompt]:
        """Up to ``count`` prompts, those given back first; empty means that the data has ended.

        Blocks while the file is read, in a thread. Cancelled, it has taken nothing. For one task at a time.

        Raises:
          SourceError: as ``check``; or the file has changed since.

        """
        file = self._file or await self._scanned()
        self._require_origin(self._restored_from, file)
        again = tuple(self._returned[:count])
        fresh, epoch, position = self._ahead(len(file), count - len(again))
        if not again and not fresh:
            await trio.lowlevel.checkpoint()
            return ()
        prompts = await self.run_sync(self._read, file, again, fresh)
        self._epoch, self._position = epoch, position
        self._returned = [returned for returned in self._returned if returned not in again]
        return prompts

    async def give_back(self, prompts: Sequence[Prompt]) -> None:
        """Take back prompts that were never finished; they come out first, in this order.

        Does not block. Cancelled, none was taken back.

        Raises:
          SourceError: one of them has been given back already.

        """
        await trio.lowlevel.checkpoint()
        ids = [prompt.group_id for prompt in prompts]
        for place, group_id in enumerate(ids):
            if group_id in self._returned or group_id in ids[:place]:
                raise SourceError(f"{self!r}: prompt {group_id} was given back twice")
        self._returned[:0] = ids

    def state(self) -> dict[str, object]:
        """The position, the options, which file it is, and what was given back: JSON-able."""
        mark = self._file.mark if self._file is not None else self._restored_from
        position = JsonlPosition(
            file=mark,
            options=self._options(),
            epoch=self._epoch,
            position=self._position,
            returned=tuple(self._returned),
        )
        return dumped(position)

    def restore(self, state: Mapping[str, object]) -> None:
        """Continue from a saved position.

        A file that has not been checked yet is compared by its size here, by its content in ``check``.

        Raises:
          SourceError: the state is of another kind of source, of another file, or was made with other options; the
            position is as it was.

        """
        saved = loaded(state, JsonlPosition, kind="jsonl", source=self)
        require_same(saved.options, self._options(), what="set of options", source=self)
        if saved.file is not None:
            size = self._file.mark.size if self._file is not None else require_file(self.path).st_size
            require_same(f"{saved.file.size} bytes", f"{size} bytes", what="file", source=self)
        self._require_possible(saved)
        if self._file is not None:
            self._require_origin(saved.file, self._file)
        self._restored_from = saved.file
        self._epoch, self._position = saved.epoch, saved.position
        self._returned = list(starmap(GroupId, saved.returned))

    def _require_possible(self, saved: JsonlPosition) -> None:
        damaged = f"{self!r}: cannot be restored from a damaged state: "
        if self.epochs is not None and saved.epoch + (saved.position > 0) > self.epochs:
            raise SourceError(f"{damaged}position {saved.position} of epoch {saved.epoch}, of {self.epochs} from 0")
        if self._file is not None and saved.position >= len(self._file):
            raise SourceError(f"{damaged}position {saved.position}, but the file has {len(self._file)} prompts")

    def _require_origin(self, saved: FileMark | None, file: JsonlFile) -> None:
        if saved is not None:
            require_same(saved, file.mark, what="file", source=self)

    def _options(self) -> dict[str, str | int | None]:
        names = ("prompt_key", "label_key", "metadata_key", "id_key", "epochs", "shuffle_seed")
        return {name: getattr(self, name) for name in names}

    async def _scanned(self) -> JsonlFile:
        keys = Keys(prompt=self.prompt_key, label=self.label_key, metadata=self.metadata_key, id=self.id_key)
        file = await self.run_sync(scan, self.path, keys)
        self._file, self._order = file, EpochOrder(count=len(file), seed=self.shuffle_seed)
        self._require_origin(self._restored_from, file)
        return file

    def _ahead(self, length: int, count: int) -> tuple[list[tuple[int, int]], int, int]:
        """The next (epoch, position) pairs, and the cursor behind them."""
        ahead: list[tuple[int, int]] = []
        epoch, position = self._epoch, self._position
        while len(ahead) < count and epoch != self.epochs:
            ahead.append((epoch, position))
            position += 1
            if position == length:
                epoch, position = epoch + 1, 0
        return ahead, epoch, position

    def _read(self, file: JsonlFile, again: Sequence[GroupId], fresh: Sequence[tuple[int, int]]) -> list[Prompt]:
        """In a thread: it alone looks at the order meanwhile."""
        if self._order is None:
            raise AssertionError("a file is read before it was checked")
        numbers = [(epoch, self._order.record(epoch, position)) for epoch, position in fresh]
        return file.read([*again, *numbers])
