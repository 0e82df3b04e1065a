"""Prompts from a JSONL file: a position (epoch, place in the epoch) that can be saved and restored.

Owns the position and the ids of the prompts given back; the file is opened for each read and closed again. Invariant: the
position moves only after a read has succeeded, with no checkpoint in between, so a cancelled ``take`` has taken nothing.
The source sets each prompt's epoch (docs/decisions/0001-epoch-is-a-field-of-the-prompt.md).
"""

from collections.abc import Mapping, Sequence
from itertools import starmap
from os import PathLike
from pathlib import Path
from typing import Literal, final

import attrs
import numpy as np
import numpy.typing as npt
import trio

from .._core.checks import Validator, names_suggested, whole
from .._core.values import GroupId, Prompt
from .._util.threads import RunSync, run_in_thread
from ..errors import SettingsTypeError, SourceError
from ._jsonl_file import (
    DEFAULT_LABEL_KEY,
    DEFAULT_METADATA_KEY,
    DEFAULT_TOOLS_KEY,
    FileMark,
    JsonlFile,
    Keys,
    require_file,
    scan,
)
from ._position import Count, dumped, loaded, require_same


def _whole_or_none(low: int) -> Validator:
    return attrs.validators.optional(whole(low))


def _path(path: str | PathLike[str]) -> Path:
    if not isinstance(path, str | PathLike):
        raise SettingsTypeError(f"JsonlSource.path: got {path!r}, allowed: the path of a file")
    return Path(path)


@final
@names_suggested
@attrs.define(eq=False, repr=False)
class JsonlSource:
    """Prompts from a file with one JSON object a line; a ``Source``.

    - ``prompt_key``: a list of integers is token ids, a string is text, a list of objects is messages in OpenAI's form.
    - ``tools_key``: a list of tools in OpenAI's form, or a JSON text with one, beside messages.
    - ``label_key``, ``metadata_key``, ``tools_key``: None reads none. A line may lack the default keys; a key that you name
      must be on every line.
    - ``id_key``: the key of a unique id. Without it, the ids are the numbers of the items: "0", "1", … Blank lines do not
      count.
    - ``epochs``: the file is read so many times; None: without end. Each prompt has its epoch.
    - ``shuffle_seed`` (>= 0): another order in each epoch, the same on every machine. None: file order.

    The first ``check`` or ``take`` reads and checks the whole file; 8 bytes an item stay in memory. ``run_sync`` runs the
    blocking reads: in a thread, except in a simulation.

    Raises:
      SourceError: the file does not exist or is empty.
      SettingsError: an option is out of its range.
    """

    path: Path = attrs.field(converter=_path)
    prompt_key: str = attrs.field(default="prompt", kw_only=True)
    label_key: str | None = attrs.field(default=DEFAULT_LABEL_KEY, kw_only=True)
    metadata_key: str | None = attrs.field(default=DEFAULT_METADATA_KEY, kw_only=True)
    tools_key: str | None = attrs.field(default=DEFAULT_TOOLS_KEY, kw_only=True)
    id_key: str | None = attrs.field(default=None, kw_only=True)
    epochs: int | None = attrs.field(default=1, kw_only=True, validator=_whole_or_none(1))
    shuffle_seed: int | None = attrs.field(default=None, kw_only=True, validator=_whole_or_none(0))
    run_sync: RunSync = attrs.field(default=run_in_thread, kw_only=True)

    _file: JsonlFile | None = attrs.field(default=None, init=False)
    _order: "EpochOrder | None" = attrs.field(default=None, init=False)
    _restored_from: FileMark | None = attrs.field(default=None, init=False)
    _epoch: int = attrs.field(default=0, init=False)
    _position: int = attrs.field(default=0, init=False)
    _returned: list[GroupId] = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        for name in ("prompt_key", "label_key", "metadata_key", "tools_key", "id_key"):
            key = getattr(self, name)
            if not isinstance(key, str) and (key is not None or name == "prompt_key"):
                raise SettingsTypeError(
                    f"JsonlSource.{name}: got {key!r}, allowed: a string{' or None' * (name != 'prompt_key')}"
                )
        require_file(self.path)

    def __repr__(self) -> str:
        return f"<JsonlSource {str(self.path)!r} epoch {self._epoch}, position {self._position}, {len(self._returned)} returned>"

    @property
    def total(self) -> int | None:
        """The number of prompts in all epochs; None before the file was checked, and if there is no end."""
        return None if self._file is None or self.epochs is None else len(self._file) * self.epochs

    @property
    def identity(self) -> str:
        """The name by which a ledger knows this source: the content of the file, not its path, and the options.

        See docs/decisions/0014-what-a-ledger-belongs-to.md.

        Raises:
          SourceError: the file has not been checked yet.
        """
        if self._file is None:
            raise SourceError(f"{self!r}: the identity is the content of the file, which is known after check()")
        options = ", ".join(f"{name} {value}" for name, value in self._options().items())
        return f"JSONL of {len(self._file)} prompts (digest {self._file.mark.digest}), {options}"

    async def check(self) -> None:
        """Read and check the whole file, once. The first ``take`` does it otherwise.

        Blocks while the file is read, in a thread. Cancelled, the file was not checked.

        Raises:
          SourceError: a line is wrong; names the file and the first such line. Or a restored state was saved from a file
            with another content.
        """
        if self._file is None:
            await self._scanned()
        else:
            await trio.lowlevel.checkpoint()
            self._require_origin(self._restored_from, self._file)

    async def take(self, count: int) -> Sequence[Prompt]:
        """Return up to ``count`` prompts, those given back first; empty means that the data has ended.

        Blocks while the file is read, in a thread. Cancelled, it has taken nothing. For one task at a time.

        Raises:
          SourceError: as ``check``; or the file has changed since it was checked.
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
        """Take back prompts that were not finished; they come out first, in this order.

        Does not block. Cancelled, no prompt was taken back.

        Raises:
          SourceError: a prompt has been given back already.
        """
        await trio.lowlevel.checkpoint()
        ids = [prompt.group_id for prompt in prompts]
        for place, group_id in enumerate(ids):
            if group_id in self._returned or group_id in ids[:place]:
                raise SourceError(f"{self!r}: prompt {group_id} was given back twice")
        self._returned[:0] = ids

    def state(self) -> dict[str, object]:
        """Return the position as JSON data, with the options, the file's digest, and the prompts given back."""
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

        A file that has not been checked yet is compared by its size here, and by its content in ``check``.

        Raises:
          SourceError: the state belongs to another kind of source or to another file, or was saved with other options.
            The position is unchanged.
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

    def _require_possible(self, saved: "JsonlPosition") -> None:
        damaged = f"{self!r}: can't be restored from a damaged state: "
        if self.epochs is not None and saved.epoch + (saved.position > 0) > self.epochs:
            raise SourceError(f"{damaged}position {saved.position} of epoch {saved.epoch}, of {self.epochs} from 0")
        if self._file is not None and saved.position >= len(self._file):
            raise SourceError(f"{damaged}position {saved.position}, but the file has {len(self._file)} prompts")

    def _require_origin(self, saved: FileMark | None, file: JsonlFile) -> None:
        if saved is not None:
            require_same(saved, file.mark, what="file", source=self)

    def _options(self) -> dict[str, str | int | None]:
        names = ("prompt_key", "label_key", "metadata_key", "id_key", "epochs", "shuffle_seed")
        tools = {} if self.tools_key == DEFAULT_TOOLS_KEY else {"tools_key": self.tools_key}  # older states lack it
        return {name: getattr(self, name) for name in names} | tools

    async def _scanned(self) -> JsonlFile:
        keys = Keys(
            prompt=self.prompt_key,
            label=self.label_key,
            metadata=self.metadata_key,
            tools=self.tools_key,
            id=self.id_key,
        )
        file = await self.run_sync(scan, self.path, keys)
        self._file, self._order = file, EpochOrder(count=len(file), seed=self.shuffle_seed)
        self._require_origin(self._restored_from, file)
        return file

    def _ahead(self, length: int, count: int) -> tuple[list[tuple[int, int]], int, int]:
        """Return the next (epoch, position) pairs, and the epoch and position after them."""
        ahead: list[tuple[int, int]] = []
        epoch, position = self._epoch, self._position
        while len(ahead) < count and epoch != self.epochs:
            ahead.append((epoch, position))
            position += 1
            if position == length:
                epoch, position = epoch + 1, 0
        return ahead, epoch, position

    def _read(self, file: JsonlFile, again: Sequence[GroupId], fresh: Sequence[tuple[int, int]]) -> list[Prompt]:
        """Read the prompts, in a thread. No other code uses the order meanwhile."""
        if self._order is None:
            raise AssertionError("a file is read before it was checked")
        numbers = [(epoch, self._order.item(epoch, position)) for epoch, position in fresh]
        return file.read([*again, *numbers])


@attrs.frozen(kw_only=True)
class JsonlPosition:
    """A saved position. ``file`` is None until the file was read; ``epoch == epochs`` is the end of data."""

    kind: Literal["jsonl"] = "jsonl"
    file: FileMark | None
    options: dict[str, str | int | None]
    epoch: Count
    position: Count
    returned: tuple[tuple[Count, str], ...]


@attrs.define(eq=False)
class EpochOrder:
    """The order of the items in an epoch: file order, or a shuffled one that (seed, epoch) fixes on every machine.

    It sorts random keys and does not call ``Generator.permutation``: numpy keeps the streams of its bit generators stable
    for good, but not the methods of ``Generator``, and a saved position relies on the order.
    """

    count: int
    seed: int | None
    _epoch: int = attrs.field(default=-1, init=False)
    _shuffled: npt.NDArray[np.int64] = attrs.field(factory=lambda: np.empty(0, np.int64), init=False)

    def item(self, epoch: int, position: int) -> int:
        """Return the number of the item at this position of the epoch. Slow once an epoch, for the shuffle."""
        if self.seed is None:
            return position
        if epoch != self._epoch:
            bits = np.random.PCG64(np.random.SeedSequence((self.seed, epoch)))
            self._shuffled = np.argsort(bits.random_raw(self.count), kind="stable")
            self._epoch = epoch
        return int(self._shuffled[position])
