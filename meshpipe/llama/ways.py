"""In how many ways a text can be read as values of a schema while it is written, bounded before it is used.

llama.cpp's grammars remember each way through what was written as a stack of its own. Branches of `anyOf` that begin
alike are as many ways, and where such a union stands inside itself they multiply with every bracket: forty branches
have forty ways after the first, 1600 after the second. What can be read in one way is made so (members that several
objects or tuples have in common, from the first on, become one); the ways that are left are counted, and a
schema that has too many is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from attrs import define

from meshpipe.errors import UsageError
from meshpipe.llama.shapes import KINDS, Container, Listed, Loop, Nodes, Row, Text, containers, kinds, union

MAX_WAYS = 100
MAX_NESTING = 32
"""Brackets within brackets up to which ways are counted."""
_MAX_RULES, _MAX_MOVES = 400, 4000
"""Moves between states that one union may have if they are to be rules, and if they are to be counted."""
_MAX_LOOKS = 200_000
"""Members that are looked at, over all unions: a second, about."""

State = frozenset[Container]
"""What is left of containers whose members have been the same so far: one way."""
Move = tuple[tuple[str, ...], State]
"""Nodes, a value of any of which leads to a state."""
Value = tuple[str, str]
"""A node, and the kind of what is written for it."""


def next_moves(state: State, nodes: Nodes) -> dict[str | None, list[Move]]:
    """The members that may come next, by name."""
    by_name: dict[str | None, dict[str, set[Container]]] = defaultdict(lambda: defaultdict(set))
    for container in state:
        for name, node, rest in container.moves():
            by_name[name][node].add(rest)
    return {name: _grouped(leads, nodes) for name, leads in by_name.items()}


def _grouped(leads: Mapping[str, set[Container]], nodes: Nodes) -> list[Move]:
    """Nodes that lead to the same state together, if no values are inside theirs."""
    found: list[Move] = []
    plain: dict[State, list[str]] = defaultdict(list)
    for node, rests in leads.items():
        if any(isinstance(shape, (Row, Loop)) for shape in nodes[node]):
            found.append(((node,), frozenset(rests)))
        else:
            plain[frozenset(rests)].append(node)
    return found + [(tuple(sorted(together)), to) for to, together in plain.items()]


Sum = tuple[int, tuple[Value, ...]]
"""Values that may be read at the same time, each in its ways, and so many ways beside them."""


def read(nodes: Nodes, roots: Iterable[str], places: Mapping[str, str]) -> set[Value]:
    """The nodes and kinds of which the containers, where there are several, are to be read as one.

    Raises UsageError if a text can be read in too many ways; `places` says where in the schema a node stands.
    """
    reader = _Reader(nodes, {node: set().union(*map(kinds, shapes)) for node, shapes in nodes.items()})
    starts: dict[Value, int] = {}
    sums: dict[Value, set[Sum]] = {}
    merged: set[Value] = set()
    for value in [(node, kind) for node in nodes for kind in reader.kinds[node]]:
        found = containers(nodes[value[0]], value[1])
        together = reader.sums([frozenset(found)], _MAX_RULES) if len(found) > 1 else None
        if together is not None:
            merged.add(value)
            starts[value], sums[value] = 1, together
        else:
            apart = reader.sums([frozenset([one]) for one in found], _MAX_MOVES)
            starts[value] = len(found)
            sums[value] = apart if apart is not None else reader.all_at_once(found)
    counts = _counts(nodes, starts, sums)
    if any(counts.get((node, kind), 0) > MAX_WAYS for node in roots for kind in KINDS):
        raise UsageError(_refusal(nodes, sums, counts, places))
    return merged


def _refusal(
    nodes: Nodes, sums: Mapping[Value, set[Sum]], counts: Mapping[Value, int], places: Mapping[str, str]
) -> str:
    def most(value: Value) -> int:
        return max((len(values) for _, values in sums[value]), default=0)

    bad = [value for value in sums if counts[value] > MAX_WAYS and most(value) > 1]
    if not bad:
        return f"the schema has values that can be read in more than {MAX_WAYS} ways: list fewer alternatives"
    node, kind = max(bad, key=most)
    return (
        f"{places.get(node, 'the schema')}: {len(containers(nodes[node], kind))} of its schemas are {kind}s that may "
        f"begin alike, so that the grammar would have to follow more than {MAX_WAYS} ways at a time; tell them apart "
        "by type, or by a required property with a const that comes first, or make them one schema"
    )


@define
class _Reader:
    """Finds out what may be read at the same time. `kinds` are those of each node's values."""

    nodes: Nodes
    kinds: Mapping[str, set[str]]
    _looks: int = 0

    def sums(self, starts: Sequence[State], most: int) -> set[Sum] | None:
        """What may be read at the same time inside of containers; None if they have more moves than `most`."""
        found: set[Sum] = set()
        start = frozenset(starts)
        seen, left = {start}, [start]
        count = 0
        while left:
            states = left.pop()
            if len(states) == 1 and len(alone := next(iter(states))) == 1:
                (container,) = alone
                found |= {(0, (value,)) for value in self._values(container)}
                continue
            self._looks += sum(1 + len(container.nodes()) for state in states for container in state)
            if self._looks > _MAX_LOOKS:
                return None
            moves: dict[str | None, list[Move]] = defaultdict(list)
            for state in states:
                for name, led in next_moves(state, self.nodes).items():
                    moves[name] += led
                    count += len(led)
            if count + len(seen) > most:
                return None
            for name, led in moves.items():
                for kind in KINDS:
                    fits = [
                        (together, to)
                        for together, to in (led if name is None else led + moves.get(None, []))
                        if any(kind in self.kinds[node] for node in together)
                    ]
                    if fits:
                        found.add(_sum([together for together, _ in fits], kind, self.nodes))
                        fresh = _after(fits, kind, self.nodes) - seen
                        seen |= fresh
                        left += fresh
        return found

    def all_at_once(self, found: Iterable[Container]) -> set[Sum]:
        """Whatever containers have inside, as if it could be read at the same time."""
        return {(0, tuple(value for container in found for value in sorted(self._values(container))))}

    def _values(self, container: Container) -> set[Value]:
        return {(node, kind) for node in container.nodes() for kind in self.kinds[node]}


def _sum(alive: Sequence[tuple[str, ...]], kind: str, nodes: Nodes) -> Sum:
    values = tuple(sorted((one[0], kind) for one in alive if len(one) == 1))
    plain = [union([nodes[node] for node in several]) for several in alive if len(several) > 1]
    return sum(kind in kinds(shape) for shapes in plain for shape in shapes), values


def _after(fits: Sequence[Move], kind: str, nodes: Nodes) -> set[frozenset[State]]:
    """The states in which the containers may be, one a way, when a value of this kind has been read."""
    texts: dict[str, set[State]] = defaultdict(set)
    any_text: set[State] = set()
    for together, to in fits:
        for shape in union([nodes[node] for node in together]):
            if isinstance(shape, Listed):
                for text in shape.of(kind):
                    texts[text].add(to)
            elif shape.kind == kind:
                any_text.add(to)
    return {frozenset(states | any_text) for states in (*texts.values(), any_text)} - {frozenset()}


def _counts(nodes: Nodes, starts: Mapping[Value, int], sums: Mapping[Value, set[Sum]]) -> dict[Value, int]:
    """The ways in which a value can be read at most, brackets nested as deep as is counted."""
    plain = {
        (node, kind): sum(kind in kinds(shape) for shape in nodes[node] if isinstance(shape, (Text, Listed)))
        for node, kind in sums
    }
    counts = {value: plain[value] + starts[value] for value in sums}
    for _ in range(MAX_NESTING):
        before = counts
        counts = {
            value: plain[value]
            + max(
                [
                    starts[value],
                    *(beside + sum(before[one] for one in inner) for beside, inner in sums[value]),
                ]
            )
            for value in sums
        }
        if counts == before:
            break
    return counts
