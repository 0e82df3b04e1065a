"""Files in memory that know which of their bytes would survive a power cut.

A write is in the page cache until its file is synced, a name until the names are. After a power cut, any subset of the
unsynced writes may be there, in any order, each cut anywhere or full of garbage.
"""

import random
from collections.abc import Callable, Sequence
from typing import TypeAlias, final

import attrs


@attrs.frozen
class Write:
    """Write bytes at an offset of a file; ``data`` None truncates the file there."""

    name: str
    offset: int
    data: bytes | None


@attrs.frozen
class Sync:
    """Make a file's content durable."""

    name: str


@attrs.frozen
class Rename:
    """Rename a file; ``to`` None deletes it."""

    name: str
    to: str | None


@attrs.frozen
class SyncNames:
    """Make creations, renames and deletions durable."""


@attrs.frozen
class Mark:
    """Change nothing: a mark of how far the scenario has come."""

    number: int


Op: TypeAlias = Write | Sync | Rename | SyncNames | Mark
Edit: TypeAlias = tuple[int, bytes | None]


def apply_edit(content: bytearray, offset: int, data: bytes | None) -> None:
    """Write into a content, which grows with zeros as files do, or truncate it."""
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
"""Chooses the unsynced edits of a file that survive, in the order in which they reached the disk."""


@final
@attrs.define(eq=False, repr=False)
class SimFiles:
    """A directory. ``apply`` changes it; ``after_power_cut`` returns one of the directories that a power cut may leave."""

    _inodes: dict[str, _Inode] = attrs.field(factory=dict)
    _durable_names: dict[str, _Inode] = attrs.field(factory=dict)

    @classmethod
    def holding(cls, contents: dict[str, bytes]) -> "SimFiles":
        """Return a directory whose files are all durable."""
        inodes = {name: _Inode(bytearray(content), content) for name, content in contents.items()}
        return cls(inodes, dict(inodes))

    def apply(self, op: Op) -> None:
        """Apply an operation; raises FileNotFoundError for a rename or a sync of a missing file."""
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
        """Return the names of the files."""
        return sorted(self._inodes)

    def content(self, name: str) -> bytearray:
        """Return a file's content with its unsynced parts; the caller must not change it."""
        return self._existing(name).content

    def contents(self) -> dict[str, bytes]:
        """Return every file as running processes see it."""
        return {name: bytes(inode.content) for name, inode in self._inodes.items()}

    def unsynced(self) -> dict[str, list[Edit]]:
        """Return the edits that are not durable, by file."""
        return {name: list(inode.pending) for name, inode in self._inodes.items() if inode.pending}

    def after_power_cut(self, choose: Choice, *, names: bool) -> dict[str, bytes]:
        """Return the files after a power cut: the edits that ``choose`` keeps, under the present or the last synced names."""
        found: dict[str, bytes] = {}
        for name, inode in (self._inodes if names else self._durable_names).items():
            content = bytearray(inode.durable)
            for offset, data in choose(inode.pending):
                apply_edit(content, offset, data)
            found[name] = bytes(content)
        return found


_KEPT = (True, True, False)
_DAMAGES = ("whole", "whole", "whole", "torn", "torn", "garbage")


def shuffled(rng: random.Random) -> Choice:
    """Return a choice in which some edits survive, in any order, some of them torn, some as garbage."""

    def choose(edits: Sequence[Edit]) -> Sequence[Edit]:
        kept = [edit for edit in edits if rng.choice(_KEPT)]
        rng.shuffle(kept)
        return [(offset, _mangled(data, rng)) for offset, data in kept]

    return choose


def _mangled(data: bytes | None, rng: random.Random) -> bytes | None:
    if not data:
        return data
    match rng.choice(_DAMAGES):
        case "torn":
            return data[: rng.randrange(len(data))]
        case "garbage":
            return rng.randbytes(len(data))
    return data
