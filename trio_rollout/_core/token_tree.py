"""A conversation as a tree of token ids: what an agent's requests extend, fork and roll back.

A node is one answer as the server gave it: prompt ids, output ids, log-probs. A node's parent is the deepest answer that
its prompt begins with, token for token, so the tree needs no names for sub-agents or compacted contexts: what continues is
a longer path, what does not is another branch. Rules, each with a test:

1. A recorded id never changes. A prompt that continues an answer is that answer's ids and new ones behind them.
2. Every answer is trained in exactly one row: the oldest one that it stands in. Elsewhere it is context.
3. If a text is tokenized to other ids than were sampled (drift), the recorded ids are used, or a new branch begins; the
   placement says which.
"""

import enum
import hashlib
from collections.abc import Sequence
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt

from .arrays import IdArray, id_array
from .segments import Row
from .values import Segment, Turn


class Drift(enum.Enum):
    """The agreement between a prompt's text and the recorded ids of its history."""

    NONE = "none"
    """The text is tokenized to the ids that were recorded, or there is no history."""
    REUSED = "reused"
    """The text of the history would be tokenized to other ids, or holds another nonce; the recorded ids are used."""
    FORKED = "forked"
    """The history before a recorded answer was rewritten, so the text's own ids are used: a new branch."""


@final
@attrs.frozen(eq=False, repr=False)
class Node:
    """One recorded answer. It keeps only the part of its prompt behind its parent: whole prompts grow with the square of turns."""

    turn: Turn
    """The answer, with the prompt's ids behind the parent."""
    parent: "Node | None"
    number: int
    size: int
    """The number of ids of the whole prompt and the answer together."""

    @property
    def tokens(self) -> IdArray:
        """The ids of the whole prompt and the answer."""
        parts = [part for node in _path_to(self) for part in (node.turn.prompt_ids, node.turn.output_ids)]
        return np.concatenate(parts)

    def __repr__(self) -> str:
        above = "root" if self.parent is None else f"below {self.parent.number}"
        answer = len(self.turn.output_ids)
        return f"<Node {self.number}, {above}, {self.size - answer}+{answer} ids>"


@attrs.frozen(kw_only=True)
class Placement:
    """The ids to send for a prompt, and what had to be done to get them."""

    prompt_ids: IdArray = attrs.field(converter=id_array, eq=attrs.cmp_using(eq=np.array_equal))
    drift: Drift


def continue_from(node: Node, suffix: Sequence[int], *, retokenized: Sequence[int]) -> Placement:
    """Return the placement of a prompt that goes on behind a recorded answer with ``suffix``.

    ``retokenized`` are the ids of the text of the answer and the suffix, tokenized again: only compared, never used.
    """
    behind = np.concatenate([node.turn.output_ids, np.asarray(suffix, np.int32)])
    same = np.array_equal(behind, np.asarray(retokenized, np.int32))
    prompt = np.concatenate([node.tokens, np.asarray(suffix, np.int32)])
    return Placement(prompt_ids=prompt, drift=Drift.NONE if same else Drift.REUSED)


@final
@attrs.define(eq=False, repr=False)
class TokenTree:
    """The recorded answers of one session."""

    _nodes: dict[int, Node] = attrs.field(factory=dict, init=False)
    # By how many ids they have, then by a digest of those: one pass over a prompt finds everything that it begins with.
    _by_ids: dict[int, dict[bytes, list[Node]]] = attrs.field(factory=dict, init=False)
    _added: int = attrs.field(default=0, init=False)

    def __len__(self) -> int:
        return len(self._nodes)

    def __repr__(self) -> str:
        return f"<TokenTree {len(self._nodes)} answers, {len(self.leaves())} branches>"

    @property
    def nodes(self) -> Sequence[Node]:
        """Every answer, in the order they were added."""
        return tuple(self._nodes.values())

    def parent_of(self, prompt_ids: Sequence[int] | npt.NDArray[Any]) -> Node | None:
        """Return the deepest answer that these ids begin with; of equals the newest."""
        ids = id_array(prompt_ids)
        digest, upto = hashlib.blake2b(digest_size=16), 0
        best: Node | None = None
        for size in sorted(self._by_ids):
            if size > len(ids):
                break
            digest.update(ids[upto:size].tobytes())
            upto = size
            found = self._by_ids[size].get(digest.digest())
            best = found[-1] if found else best
        return best

    def add(self, turn: Turn) -> Node:
        """Record an answer.

        Raises:
          ValueError: it has no tokens, so there is nothing to train.
        """
        if not len(turn.output_ids):
            raise ValueError(f"turn {turn.rid}: an answer without tokens can't be recorded")
        parent, size = self.parent_of(turn.prompt_ids), len(turn.prompt_ids) + len(turn.output_ids)
        if parent is not None:
            turn = attrs.evolve(turn, prompt_ids=turn.prompt_ids[parent.size :].copy())
        node = Node(turn, parent, self._added, size)
        self._added += 1
        self._nodes[node.number] = node
        self._by_ids.setdefault(node.size, {}).setdefault(_digest(node), []).append(node)
        return node

    def remove(self, node: Node) -> None:
        """Forget an answer that was not delivered.

        Raises:
          ValueError: another answer continues it, or it is not in the tree.
        """
        if self._nodes.get(node.number) is not node:
            raise ValueError(f"{node!r} is not in the tree")
        if self.is_continued(node):
            raise ValueError(f"{node!r} is continued by another answer")
        del self._nodes[node.number]
        same = self._by_ids[node.size]
        equal = same[_digest(node)]
        equal.remove(node)
        if not equal:
            del same[_digest(node)]
        if not same:
            del self._by_ids[node.size]

    def is_continued(self, node: Node) -> bool:
        """Return True if another answer goes on from this one."""
        return any(other.parent is node for other in self._nodes.values())

    def leaves(self) -> Sequence[Node]:
        """Return the answers that nothing continues, in the order they were added: one for each branch."""
        inner = {id(node.parent) for node in self._nodes.values()}
        return tuple(node for node in self._nodes.values() if id(node) not in inner)

    def segments(self) -> tuple[Segment, ...]:
        """Return one training row a branch; each answer is trained in the first row that it stands in."""
        trained: set[int] = set()
        rows: list[Segment] = []
        for leaf in self.leaves():
            path = _path_to(leaf)
            row = Row.begin(path[0].turn, trained=path[0].number not in trained)
            for node in path[1:]:
                row.context(node.turn.prompt_ids)
                row.answer(node.turn, trained=node.number not in trained)
            trained.update(node.number for node in path)
            rows.append(row.segment())
        return tuple(rows)


def _digest(node: Node) -> bytes:
    return hashlib.blake2b(node.tokens.tobytes(), digest_size=16).digest()


def _path_to(leaf: Node) -> Sequence[Node]:
    path = [leaf]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    return path[::-1]
