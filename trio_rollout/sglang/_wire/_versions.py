"""Weight versions: servers name them with strings, the engine counts with ints."""

from typing import Final

DEFAULT_VERSION: Final = "default"
"""What a server names that nobody has told a version: 0, or the trainer's word once there is one."""

# A number with more digits than this is a hash or a time stamp that happens to be all digits; int64 is what we store.
_MOST_DIGITS: Final = 18


def number_of(name: object) -> int | None:
    """The number that a version's name is, or None if it is none."""
    if isinstance(name, str):
        return int(name) if name.isascii() and name.isdigit() and len(name) <= _MOST_DIGITS else None
    return name if type(name) is int and name >= 0 else None  # no bool
