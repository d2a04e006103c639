"""What a schema's values are made of, as far as a grammar's ways through them depend on it.

A node stands for a schema. Its shapes are what its values may look like: texts without values inside, listed
values, and containers (objects and arrays). A node may also name others, whose shapes are then its own too: a
reference names one, `anyOf` several. Equal nodes are made one, also where they refer to themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from attrs import evolve, frozen

from meshpipe.errors import UsageError

KINDS = ("object", "array", "string", "number", "boolean", "null")
"""What the first character of a value tells apart."""
MAX_SIZE = 30_000
"""Members and listed values of the shapes of all nodes together (`size`)."""
_ROUNDS = 32


@frozen
class Text:
    """Values of one kind that a rule matches by itself."""

    kind: str
    rule: str


@frozen
class Listed:
    """Values by their JSON texts."""

    texts: frozenset[str]

    def of(self, kind: str) -> frozenset[str]:
        """Those of a kind."""
        return frozenset(text for text in self.texts if _kind(text) == kind)


@frozen
class Row:
    """An object's properties, or a tuple's items: (name or None, node, whether it must be there), in this order."""

    kind: str
    members: tuple[tuple[str | None, str, bool], ...]

    def moves(self) -> Iterator[tuple[str | None, str, Row]]:
        """Which members may come first: (name, node, the row of what may follow)."""
        for place, (name, node, needed) in enumerate(self.members, 1):
            yield name, node, Row(self.kind, self.members[place:])
            if needed:
                return

    @property
    def ends(self) -> bool:
        """Whether no member is needed."""
        return not any(needed for _, _, needed in self.members)

    def nodes(self) -> list[str]:
        """Of its members."""
        return [node for _, node, _ in self.members]

    def renamed(self, names: Mapping[str, str]) -> Row:
        """The same with other names of nodes."""
        return evolve(self, members=tuple((key, names[node], needed) for key, node, needed in self.members))


@frozen
class Loop:
    """Any number of members alike: an array's items, or an object's with whatever names."""

    kind: str
    node: str
    least: int = 0
    most: int | None = None

    def moves(self) -> Iterator[tuple[str | None, str, Loop]]:
        """As of a row."""
        if self.most != 0:
            yield None, self.node, self.rest

    @property
    def rest(self) -> Loop:
        """What may follow one member."""
        return evolve(self, least=max(0, self.least - 1), most=None if self.most is None else self.most - 1)

    @property
    def ends(self) -> bool:
        """Whether no member is needed."""
        return self.least == 0

    def nodes(self) -> list[str]:
        """Of its members."""
        return [] if self.most == 0 else [self.node]

    def renamed(self, names: Mapping[str, str]) -> Loop:
        """The same with other names of nodes."""
        return evolve(self, node=names[self.node])


Container = Row | Loop
Shape = Text | Listed | Container
Nodes = Mapping[str, frozenset[Shape]]
"""The shapes of each node; of listed values there is one at most."""


def resolved(
    given: Mapping[str, Sequence[Shape | str]],
) -> tuple[dict[str, frozenset[Shape]], dict[str, str]]:
    """Nodes by what they are made of, equal ones as one, and the name that each node goes by.

    `given` has for each node its shapes and the names of nodes whose shapes are its own too. A node that only names
    itself has none. Raises UsageError if there is too much of them.
    """
    flat: dict[str, frozenset[Shape]] = {}
    total = 0
    for name in given:
        shapes = _flat(given, name)
        total += sum(map(size, shapes))
        if total > MAX_SIZE:
            raise UsageError(
                f"the schema is too large: its unions have more than {MAX_SIZE} members and values, written out"
            )
        flat[name] = _joined(shapes)
    names = _equals(flat)
    return {
        name: frozenset(_renamed(shape, names) for shape in flat[name]) for name in set(names.values())
    }, names


def size(shape: Shape) -> int:
    """What a shape counts, so as to bound time and memory; a long text as several."""
    if isinstance(shape, Listed):
        return sum(1 + len(text) // 100 for text in shape.texts)
    return 1 + len(shape.nodes()) if isinstance(shape, (Row, Loop)) else 1


def kinds(shape: Shape) -> set[str]:
    """Of the values."""
    return set(map(_kind, shape.texts)) if isinstance(shape, Listed) else {shape.kind}


def containers(shapes: Iterable[Shape], kind: str) -> list[Container]:
    """The containers of a kind among shapes."""
    return [shape for shape in shapes if isinstance(shape, (Row, Loop)) and shape.kind == kind]


def union(shapes: Iterable[frozenset[Shape]]) -> frozenset[Shape]:
    """The shapes of several nodes together."""
    return _joined(shape for one in shapes for shape in one)


def _kind(text: str) -> str:
    first = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
    return first.get(text[0], "number")


def _flat(given: Mapping[str, Sequence[Shape | str]], name: str) -> list[Shape]:
    """The node's shapes, and those of the nodes that it names."""
    found: dict[Shape, None] = {}
    seen, left = {name}, [name]
    while left:
        for part in given[left.pop()]:
            if not isinstance(part, str):
                found[part] = None
            elif part not in seen:
                seen.add(part)
                left.append(part)
    return list(found)


def _joined(shapes: Iterable[Shape]) -> frozenset[Shape]:
    found = list(shapes)
    texts = frozenset(text for shape in found if isinstance(shape, Listed) for text in shape.texts)
    others: list[Shape] = [shape for shape in found if not isinstance(shape, Listed)]
    return frozenset([*others, Listed(texts)] if texts else others)


def _renamed(shape: Shape, names: Mapping[str, str]) -> Shape:
    return shape.renamed(names) if isinstance(shape, (Row, Loop)) else shape


def _equals(flat: Nodes) -> dict[str, str]:
    """For each node the first of those that are equal to it: the coarsest partition in which equal nodes have equal
    members (Moore 1956). Where that takes too many rounds, each for itself.
    """
    names = dict.fromkeys(flat, "")
    count = 1
    for _ in range(_ROUNDS):
        first: dict[frozenset[Shape], str] = {}
        names = {
            node: first.setdefault(frozenset(_renamed(shape, names) for shape in shapes), node)
            for node, shapes in flat.items()
        }
        if len(first) == count:
            return names
        count = len(first)
    return {node: node for node in flat}
