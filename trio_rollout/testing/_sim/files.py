"""Files in memory that know what of them would survive a power cut.

A write is in the page cache until its file is synced, a name until the names are. After a power cut any subset of what
was not synced may be there, in any order, each write cut anywhere or full of garbage.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, final

import attrs


@attrs.frozen
class Write:
    """Bytes at an offset of a file; ``data`` None cuts the file there."""

    name: str
    offset: int
    data: bytes | None


@attrs.frozen
class Sync:
    """A file's content becomes durable."""

    name: str


@attrs.frozen
class Rename:
    """A file gets another name; ``to`` None deletes it."""

    name: str
    to: str | None


@attrs.frozen
class SyncNames:
    """Creations, renames and deletions become durable."""


@attrs.frozen
class Mark:
    """Nothing happens on the disk; the scenario notes that it came this far."""

    number: int


Op: TypeAlias = Write | Sync | Rename | SyncNames | Mark
Edit: TypeAlias = tuple[int, bytes | None]


def apply_edit(content: bytearray, offset: int, data: bytes | None) -> None:
    """Write into a content, which grows with zeros as files do, or cut it."""
    if data is None:
        del content[offset:]
    content.extend(bytes(max(0, offset - len(content))))
    if data is not None:
        content[offset : offset + len(data)] = data


@attrs.define(eq=False)
class _Inode:
    content: bytearray = attrs.field(factory=bytearray)
    durable: bytes = b""
    pending: list[Edit] = attrs.field(factory=list)


Choice: TypeAlias = Callable[[Sequence[Edit]], Sequence[Edit]]
"""What survives of a file's unsynced edits, in the order in which it reached the disk."""


@final
@attrs.define(eq=False, repr=False)
class SimFiles:
    """A directory. ``apply`` changes it, ``after_power_cut`` gives one of the directories that a power cut may leave."""

    _inodes: dict[str, _Inode] = attrs.field(factory=dict)
    _durable_names: dict[str, _Inode] = attrs.field(factory=dict)

    @classmethod
    def holding(cls, contents: dict[str, bytes]) -> "SimFiles":
        """A directory of files that are all durable."""
        inodes = {name: _Inode(bytearray(content), content) for name, content in contents.items()}
        return cls(inodes, dict(inodes))

    def apply(self, op: Op) -> None:
        """Do what the operation says; renaming or syncing what is not there raises FileNotFoundError."""
        match op:
            case Write():
                inode = self._inodes.setdefault(op.name, _Inode())
                apply_edit(inode.content, op.offset, op.data)
                inode.pending.append((op.offset, op.data))
            case Sync():
                inode = self._existing(op.name)
                inode.durable = bytes(inode.content)
                inode.pending.clear()
            case Rename():
                inode = self._existing(op.name)
                del self._inodes[op.name]
                if op.to is not None:
                    self._inodes[op.to] = inode
            case SyncNames():
                self._durable_names = dict(self._inodes)
            case Mark():
                pass

    def _existing(self, name: str) -> _Inode:
        if name not in self._inodes:
            raise FileNotFoundError(2, "no such file on the simulated disk", name)
        return self._inodes[name]

    def names(self) -> list[str]:
        """The files there are."""
        return sorted(self._inodes)

    def content(self, name: str) -> bytearray:
        """A file's content, unsynced parts included; not to be changed."""
        return self._existing(name).content

    def contents(self) -> dict[str, bytes]:
        """Everything as running processes see it."""
        return {name: bytes(inode.content) for name, inode in self._inodes.items()}

    def unsynced(self) -> dict[str, list[Edit]]:
        """The edits that are not durable, by file."""
        return {name: list(inode.pending) for name, inode in self._inodes.items() if inode.pending}

    def after_power_cut(self, choose: Choice, *, names: bool) -> dict[str, bytes]:
        """What a power cut leaves: of each file what ``choose`` keeps, and the names of now or those last synced."""
        found: dict[str, bytes] = {}
        for name, inode in (self._inodes if names else self._durable_names).items():
            content = bytearray(inode.durable)
            for offset, data in choose(inode.pending):
                apply_edit(content, offset, data)
            found[name] = bytes(content)
        return found


def nothing(edits: Sequence[Edit]) -> Sequence[Edit]:
    """Only what was synced survives."""
    del edits
    return ()


def everything(edits: Sequence[Edit]) -> Sequence[Edit]:
    """Everything happens to have reached the disk."""
    return edits


def only_last(edits: Sequence[Edit]) -> Sequence[Edit]:
    """The last edit overtook all others."""
    return edits[-1:]


def torn_at(length: int) -> Choice:
    """The edits survive in order, up to so many bytes in all; the last one is torn there."""

    def choose(edits: Sequence[Edit]) -> Iterator[Edit]:
        left = length
        for offset, data in edits:
            size = 0 if data is None else len(data)
            if data is None or size <= left:
                yield offset, data
            elif left:
                yield offset, data[:left]
            left -= size
            if left < 0:
                return

    return lambda edits: list(choose(edits))


_KEPT = (True, True, False)
_FATES = ("whole", "whole", "whole", "torn", "torn", "garbage")


def shuffled(rng: random.Random) -> Choice:
    """Some edits survive, in any order, some of them torn, some as garbage."""

    def choose(edits: Sequence[Edit]) -> Sequence[Edit]:
        kept = [edit for edit in edits if rng.choice(_KEPT)]
        rng.shuffle(kept)
        return [(offset, _mangled(data, rng)) for offset, data in kept]

    return choose


def _mangled(data: bytes | None, rng: random.Random) -> bytes | None:
    if not data:
        return data
    match rng.choice(_FATES):
        case "torn":
            return data[: rng.randrange(len(data))]
        case "garbage":
            return rng.randbytes(len(data))
    return data
