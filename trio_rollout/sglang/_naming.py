"""What the names that one server gives its weights stand for, as numbers. No I/O.

A server that names numbers is believed. One that names none is taken at the trainer's word: its name stands for the version
that was last required, and before that for 0. One that had named numbers and says ``default`` again has restarted with its
old weights: 0.
"""

from typing import Final, final

import attrs

from ._wire import DEFAULT_VERSION, number_of

# Names that a server gave one after the other; an answer can only mention those that were in use while it was sampled.
_REMEMBERED: Final = 16


@attrs.frozen
class Named:
    """A name and what it stood for at some moment."""

    name: object
    version: int


@final
@attrs.define(eq=False)
class Naming:
    """One server's current name and version."""

    now: Named = attrs.field(factory=lambda: Named(DEFAULT_VERSION, 0), init=False)
    names_numbers: bool = attrs.field(default=False, init=False)
    _known: dict[object, int] = attrs.field(factory=dict, init=False)
    _questions: int = attrs.field(default=0, init=False)
    _heard: int = attrs.field(default=0, init=False)

    def question(self) -> int:
        """The server is asked now: the number of this question."""
        self._questions += 1
        return self._questions

    def answer(self, name: object, question: int) -> int | None:
        """It answered that question; an answer counts for nothing if one to a later question was heard before."""
        if question < self._heard:
            return self.now.version if self.names_numbers else None
        self._heard = question
        return self.observe(name)

    def observe(self, name: object) -> int | None:
        """The server names its weights so: the number, or None if it names none."""
        number = number_of(name)
        if number is None and name == DEFAULT_VERSION and self.names_numbers:
            number = 0
        if number is not None:
            self.names_numbers = name != DEFAULT_VERSION or self.names_numbers
            self.now = Named(name, number)
            return number
        self.names_numbers = False
        self.now = Named(name, self._known.get(name, self.now.version))
        return None

    def require(self, version: int) -> None:
        """The trainer's word: from now on a name that is no number stands for this version."""
        if self.names_numbers:
            return
        self.now = Named(self.now.name, version)
        self._known.pop(self.now.name, None)
        self._known[self.now.name] = version
        if len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]

    def version_of(self, name: object, sent: Named) -> int:
        """The version that ``name`` stands for in the answer to a request that was sent under ``sent``.

        A name that did not change over a weight update is taken for the older version: staleness must not be understated.
        """
        number = number_of(name)
        if number is not None:
            return number
        if name is None or name == sent.name:
            return sent.version
        if name == DEFAULT_VERSION and self.names_numbers:
            return 0
        return self._known.get(name, self.now.version)
