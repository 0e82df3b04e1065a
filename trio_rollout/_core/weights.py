"""The names that a server gives its weights, as versions. No I/O, no clock.

Separate from the table of a server's life because the table asks only one thing of them: if they are the required ones.
"""

import enum
from typing import Final

import attrs

DEFAULT_VERSION: Final = "default"
"""The name of weights that were never given a version: 0, or the version that the trainer requires."""

# A number with more digits than this is a hash or a time stamp that happens to be all digits; int64 is what we store.
_MOST_DIGITS: Final = 18
# Names that a server gave one after the other; an answer can only mention those that were in use while it was sampled.
_REMEMBERED: Final = 16


def number_of(name: object) -> int | None:
    """Return the number that a version's name is, or None if it is not a number."""
    if isinstance(name, str):
        return int(name) if name.isascii() and name.isdigit() and len(name) <= _MOST_DIGITS else None
    return name if type(name) is int and 0 <= name < 10**_MOST_DIGITS else None  # no bool


class Past(enum.Enum):
    """What the run before this one knew of a server's names for its weights."""

    NONE = "nothing"
    """There was none, or no server named a number."""
    NUMBERS = "numbers"
    """This server named a number for the version."""
    OTHERS = "others"
    """Other servers named a number, and this one did not."""


@attrs.frozen
class Named:
    """A name of weights, and the version that it stood for at some moment."""

    name: object
    version: int


@attrs.frozen
class Weights:
    """The names that one server gives its weights, as versions.

    A number is believed. Any other name stands for the version that was required last, and before that for 0. A server that
    named numbers and says ``default`` again has restarted with its old weights: 0. One that says another word after numbers
    has unknown weights, and is taken at the trainer's word again only after the next weight update.
    """

    now: Named = Named(DEFAULT_VERSION, 0)
    names_numbers: bool = False
    required: int | None = None
    known: tuple[Named, ...] = ()
    """The newest names that are not numbers, each with the version that was required while it was used."""
    unproven: bool = False
    """It names no number, and nothing says that these are the required weights: its run's weights had been numbers before."""
    refused_under: int | None = None
    """The version that was required (-1: none) when it did not let itself be paused; None once it did."""

    @property
    def barred(self) -> bool:
        """True from a pause that it refused until a weight update has brought it another version: updates go on without it."""
        if self.refused_under is None or self.required is None:
            return False
        return self.required == self.refused_under or (self.names_numbers and self.now.version != self.required)

    @property
    def fit(self) -> bool:
        """True if these are the required weights, or if the server does not name numbers."""
        if self.required is None:
            return True
        return not self.unproven and not self.barred and (not self.names_numbers or self.now.version == self.required)

    @property
    def number(self) -> int | None:
        """The version that the server names; None if it does not name a number."""
        return self.now.version if self.names_numbers else None

    def named(self, name: object) -> "Weights":
        """Return the weights after the server has named them so."""
        number = number_of(name)
        if number is None and name == DEFAULT_VERSION and self.names_numbers:
            number = 0
        if number is None:
            now, unproven = Named(name, self._known_as(name)), self.names_numbers or self.unproven
            return attrs.evolve(self, now=now, names_numbers=False, unproven=unproven)
        names_numbers = name != DEFAULT_VERSION or self.names_numbers
        return attrs.evolve(self, now=Named(name, number), names_numbers=names_numbers, unproven=False)

    def require(self, version: int, past: Past = Past.NONE) -> "Weights":
        """Return the weights after a version was required: a name that is not a number stands for that version now.

        ``past`` says what an earlier run knew of this server: after numbers, ``default`` means here what it means inside one run.
        """
        weights = self
        if past is Past.NUMBERS and not self.names_numbers:
            weights = attrs.evolve(self, names_numbers=True).named(self.now.name)
        if weights.names_numbers or past is not Past.NONE:
            return attrs.evolve(weights, required=version, unproven=not weights.names_numbers)
        now = Named(self.now.name, version)
        others = [named for named in self.known if named.name != now.name]
        return attrs.evolve(self, required=version, now=now, known=(*others, now)[-_REMEMBERED:], unproven=False)

    def refuse(self) -> "Weights":
        """Return the weights after the server could not be paused."""
        return attrs.evolve(self, refused_under=-1 if self.required is None else self.required)

    def version_of(self, name: object, sent: Named) -> int:
        """Return the version that ``name`` stands for in the answer to a request that was sent under ``sent``.

        A name that did not change over a weight update is taken for the older version: staleness must not be understated.
        """
        number = number_of(name)
        if number is not None:
            return number
        if name is None or name == sent.name:
            return sent.version
        if name == DEFAULT_VERSION and self.names_numbers:
            return 0
        return self._known_as(name)

    def _known_as(self, name: object) -> int:
        return next((named.version for named in self.known if named.name == name), self.now.version)
