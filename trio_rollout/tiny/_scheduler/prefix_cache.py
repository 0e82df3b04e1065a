"""The prompts that the server has seen, as a tree of token runs, for ``cached_tokens``. Only lengths matter: no values are kept.

Owns: the tree. It holds at most ``capacity`` tokens; the leaves that were used longest ago are dropped first.
"""

from typing import TypeAlias, final

import attrs
import numpy as np
import numpy.typing as npt

Tokens: TypeAlias = npt.NDArray[np.int64]


@attrs.define(eq=False, repr=False)
class _Node:
    run: Tokens
    used: int
    children: dict[int, "_Node"] = attrs.field(factory=dict)


def _common(left: Tokens, right: Tokens) -> int:
    """Return the number of leading tokens that are equal."""
    size = min(left.size, right.size)
    different = left[:size] != right[:size]
    return int(different.argmax()) if different.any() else size


@final
@attrs.define(eq=False, repr=False)
class PrefixCache:
    """Finds the longest prefix of a prompt that has been computed before."""

    capacity: int
    tokens: int = attrs.field(default=0, init=False)
    """The number of tokens in the cache."""
    _clock: int = attrs.field(default=0, init=False)
    _root: _Node = attrs.field(factory=lambda: _Node(np.empty(0, np.int64), 0), init=False)

    def __repr__(self) -> str:
        return f"<PrefixCache {self.tokens} of {self.capacity} tokens>"

    def clear(self) -> None:
        """Forget everything."""
        self._root.children.clear()
        self.tokens = 0

    def match(self, tokens: Tokens) -> int:
        """Return the number of leading tokens that are in the cache."""
        return self._walk(tokens)[1]

    def insert(self, tokens: Tokens) -> None:
        """Add ``tokens`` and all its prefixes."""
        node, known = self._walk(tokens)
        if known < tokens.size:
            rest = tokens[known:].copy()
            node.children[int(rest[0])] = _Node(rest, self._clock)
            self.tokens += rest.size
            self._evict()

    def _walk(self, tokens: Tokens) -> tuple[_Node, int]:
        """Follow ``tokens`` down the tree, and split a run that matches in part, so that the returned node ends there."""
        self._clock += 1
        node, place = self._root, 0
        while place < tokens.size:
            child = node.children.get(int(tokens[place]))
            if child is None:
                break
            same = _common(child.run, tokens[place:])
            child.used = self._clock
            place += same
            if same < child.run.size:
                return self._split(node, child, same), place
            node = child
        return node, place

    def _split(self, parent: _Node, child: _Node, size: int) -> _Node:
        upper = _Node(child.run[:size], child.used)
        parent.children[int(upper.run[0])] = upper
        child.run = child.run[size:]
        upper.children[int(child.run[0])] = child
        return upper

    def _leaves(self) -> list[tuple[_Node, _Node]]:
        """Return each leaf behind its parent."""
        found: list[tuple[_Node, _Node]] = []
        stack = [self._root]
        while stack:
            node = stack.pop()
            stack.extend(child for child in node.children.values() if child.children)
            found.extend((node, child) for child in node.children.values() if not child.children)
        return found

    def _evict(self) -> None:
        """Drop leaves down to nine tenths at once: walking the tree at every insertion would cost more than the model."""
        if self.tokens <= self.capacity:
            return
        while self.tokens > self.capacity * 9 // 10:
            for parent, leaf in sorted(self._leaves(), key=lambda pair: pair[1].used):
                del parent.children[int(leaf.run[0])]
                self.tokens -= leaf.run.size
                if self.tokens <= self.capacity * 9 // 10:
                    return
