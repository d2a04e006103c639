"""Patterns as deterministic automata, and these as rules of a grammar.

llama.cpp goes along every way through a grammar at once: where a text can be read in several ways, as by
`([a-z]?){60}`, these are so many that one pick never ends. A deterministic automaton has one way. It may be much
larger than the pattern, which is then refused. The
construction is the usual one: an automaton with empty moves from the syntax tree (Thompson 1968), and from that the
sets of its states that a text can lead to (Rabin and Scott 1959).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from attrs import define, field, frozen

from meshpipe.errors import UsageError
from meshpipe.llama.patterns import Chars, Either, Node, Ranges, Then, ranges, writable

MAX_STATES = 600
MAX_WORK = 1_000_000
"""Members of all sets of states that are looked at, one for each class of characters: a second, about."""


@frozen
class State:
    """Whether the text may end here, and by which characters it goes on to which state, by number."""

    accepts: bool
    moves: tuple[tuple[Ranges, int], ...]


def automaton(node: Node) -> list[State]:
    """The states of a pattern's automaton, which begins in the first. Raises UsageError if there are too many."""
    ways = _Ways()
    end = ways.add(node, ways.new())
    numbers = {ways.reached([0]): 0}
    states: list[State] = []
    work = 0
    for members in (queue := list(numbers)):
        targets: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for low, high, next_ in _classes(ways, members):
            work += len(next_)
            reached = ways.reached(next_)
            if reached not in numbers:
                numbers[reached] = len(numbers)
                queue.append(reached)
            targets[numbers[reached]].append((low, high))
        if len(numbers) > MAX_STATES or work > MAX_WORK:
            raise UsageError(
                "the pattern has too many ways to be read: repeat less, or tell what follows apart"
            )
        states.append(State(end in members, tuple((ranges(*found), to) for to, found in targets.items())))
    return states


def _classes(ways: _Ways, members: Iterable[int]) -> Iterable[tuple[int, int, frozenset[int]]]:
    """Characters between which these states make no difference, from the first to the last, and where they lead."""
    changes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for member in members:
        for chars, to in ways.moves[member]:
            for low, high in chars:
                changes[low].append((to, 1))
                changes[high + 1].append((to, -1))
    active: Counter[int] = Counter()
    edges = sorted(changes)
    for low, after in pairwise(edges):
        for to, change in changes[low]:
            active[to] += change
        if leads := frozenset(to for to, count in active.items() if count):
            yield low, after - 1, leads


@define
class _Ways:
    """An automaton with empty moves: by state, where characters lead, and where nothing does."""

    moves: list[list[tuple[Ranges, int]]] = field(factory=list)
    empty: list[list[int]] = field(factory=list)
    _known: dict[frozenset[int], frozenset[int]] = field(factory=dict)

    def new(self) -> int:
        self.moves.append([])
        self.empty.append([])
        return len(self.moves) - 1

    def add(self, node: Node, start: int) -> int:
        """Adds the ways through a node from `start` on; the state in which they end. None leads back to `start`."""
        if isinstance(node, Chars):
            end = self.new()
            self.moves[start].append((writable(node.ranges), end))
            return end
        if isinstance(node, Then):
            for part in node.parts:
                start = self.add(part, start)
            return start
        if isinstance(node, Either):
            end = self.new()
            for branch in node.branches:
                self.empty[self.add(branch, start)].append(end)
            return end
        for _ in range(node.least):
            start = self.add(node.part, start)
        end = self.new()
        self.empty[start].append(end)
        if node.most is None:
            self.empty[self.add(node.part, end)].append(end)
            return end
        for _ in range(node.most - node.least):
            start = self.add(node.part, start)
            self.empty[start].append(end)
        return end

    def reached(self, states: Iterable[int]) -> frozenset[int]:
        """These, and where nothing leads from them."""
        begin = frozenset(states)
        if begin not in self._known:
            found, left = set(begin), list(begin)
            while left:
                fresh = [to for to in self.empty[left.pop()] if to not in found]
                found.update(fresh)
                left += fresh
            self._known[begin] = frozenset(found)
        return self._known[begin]


def rule(state: State, names: Sequence[str], classes: Sequence[str]) -> str:
    """A state's GBNF rule: `names` are those of all states' rules, `classes` those of its moves' characters."""
    alternatives = ['""'] if state.accepts else []
    alternatives += [f"{chars} {names[to]}" for chars, (_, to) in zip(classes, state.moves, strict=True)]
    return " | ".join(alternatives)
