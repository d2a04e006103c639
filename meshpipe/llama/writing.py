"""Grammar rules for the nodes of a schema.

A node becomes a rule: one alternative for each of its shapes, but of containers that begin alike one for all, whose
members are written down state by state (`ways`).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection
from functools import partial

from meshpipe.llama.rules import Rules, literal
from meshpipe.llama.shapes import KINDS, Container, Listed, Loop, Nodes, Shape, Text, containers, union
from meshpipe.llama.ways import State, Value, next_moves

_FEW = 8
"""So many values are listed one by one, more by what they begin with: each is a way that llama.cpp follows."""
_BRACKETS = {"object": ('"{"', '"}"'), "array": ('"["', '"]"')}


class Writer:
    """Writes rules for nodes. `finish` before the rules are used.

    `merged` is what `ways.read` found; `given` are nodes whose rules every grammar has, by their names.
    """

    def __init__(self, rules: Rules, nodes: Nodes, merged: Collection[Value], given: Collection[str]) -> None:
        self._rules = rules
        self._nodes = nodes
        self._merged = merged
        self._given = given
        self._names: dict[object, str] = {}
        self._left: list[tuple[str, Callable[[], str]]] = []

    def finish(self) -> None:
        """Writes what others refer to."""
        while self._left:
            name, write = self._left.pop()
            self._rules.define(name, write())

    def rule(self, node: str) -> str:
        """The name of a node's rule."""
        if node in self._given:
            return node
        shapes = self._nodes[node]
        only = next(iter(shapes))
        if len(shapes) == 1 and isinstance(only, Text):
            return only.rule
        return self._later(node, partial(self._node, node))

    def _later(self, key: object, write: Callable[[], str]) -> str:
        """The name of a rule that is written when its turn comes: rules may refer to themselves."""
        if key not in self._names:
            self._names[key] = self._rules.reserve()
            self._left.append((self._names[key], write))
        return self._names[key]

    def _node(self, node: str) -> str:
        shapes = self._nodes[node]
        found = self._plain(shapes)
        for kind in KINDS:
            inside = sorted(containers(shapes, kind), key=repr)
            if (node, kind) in self._merged:
                found.append(self._opened(frozenset(inside)))
            else:
                found += map(self._container, inside)
        return " | ".join(found)

    def _plain(self, shapes: Collection[Shape]) -> list[str]:
        """Alternatives for the values that have none inside."""
        found = sorted(shape.rule for shape in shapes if isinstance(shape, Text))
        return found + [
            one for shape in shapes if isinstance(shape, Listed) for one in self._texts(shape.texts)
        ]

    def _either(self, texts: Collection[str]) -> str:
        return " | ".join(self._texts(texts))

    def _texts(self, texts: Collection[str]) -> list[str]:
        """Alternatives for texts: where there are many, by what they begin with."""
        if len(texts) <= _FEW:
            return [literal(text) for text in sorted(texts)]
        groups: dict[str, list[str]] = defaultdict(list)
        for text in sorted(texts):
            groups[text[:1]].append(text)
        found: list[str] = []
        for first, group in groups.items():
            size = 1
            while len(group) > 1 and len({text[: size + 1] for text in group}) == 1:
                size += 1
            rests = [text[size:] for text in group]
            if not first or len(group) == 1:
                found += map(literal, group)
            else:
                rest = self._later(("texts", *rests), partial(self._either, rests))
                found.append(f"{literal(group[0][:size])} {rest}")
        return found

    # ---- containers ---------------------------------------------------------------------------------------

    def _container(self, container: Container) -> str:
        opening, closing = _BRACKETS[container.kind]
        inside = self._begin(container)
        return f"{opening} ws {inside} {closing}" if inside else f"{opening} ws {closing}"

    def _begin(self, container: Container) -> str:
        """All members."""
        if isinstance(container, Loop):
            if container.most == 0:
                return ""
            body = f"{self._member(container.kind, None, container.node)} {self._go_on(container.rest)}"
            return f"({body})?" if container.ends else body
        first = after = ""
        for name, node, needed in reversed(container.members):
            member = self._member(container.kind, name, node)
            begun = f"{member} {after}"
            if not needed:
                begun = f"{begun} | {self._rules.add(first)}" if first else f"({begun})?"
            first = begun
            after = self._following(member, needed, after)
        return self._rules.add(first) if first else ""

    def _go_on(self, container: Container) -> str:
        """The same behind members, each with the comma before."""
        if isinstance(container, Loop):
            member = self._member(container.kind, None, container.node)
            many = times(container.least, container.most)
            return "" if container.most == 0 else f'("," ws {member}){many}'
        after = ""
        for name, node, needed in reversed(container.members):
            after = self._following(self._member(container.kind, name, node), needed, after)
        return after

    def _following(self, member: str, needed: bool, after: str) -> str:
        return self._rules.add(f'"," ws {member} {after}' if needed else f'("," ws {member})? {after}')

    def _member(self, kind: str, name: str | None, node: str) -> str:
        return f"{self._named(kind, name)}{self.rule(node)} ws"

    def _named(self, kind: str, name: str | None) -> str:
        """What stands before a member's value."""
        if kind == "array":
            return ""
        return f'{"string" if name is None else literal(json.dumps(name, ensure_ascii=False))} ws ":" ws '

    # ---- containers that begin alike ------------------------------------------------------------------------

    def _opened(self, state: State) -> str:
        opening, closing = _BRACKETS[next(iter(state)).kind]
        many = "?" if any(container.ends for container in state) else ""
        return f"{opening} ws {self._members(state)}{many} {closing}"

    def _members(self, state: State) -> str:
        """The name of the rule for one member and those that follow."""
        return self._later(state, partial(self._state, state))

    def _state(self, state: State) -> str:
        found = []
        for name, moves in sorted(next_moves(state, self._nodes).items(), key=lambda move: move[0] or ""):
            values = [
                f"{self._value(together)} ws {self._after(to)}"
                for together, to in sorted(moves, key=lambda move: move[0])
            ]
            value = values[0] if len(values) == 1 else f"({' | '.join(values)})"
            found.append(self._named(next(iter(state)).kind, name) + value)
        return " | ".join(found)

    def _value(self, together: tuple[str, ...]) -> str:
        if len(together) == 1:
            return self.rule(together[0])
        shapes = union([self._nodes[node] for node in together])
        return self._rules.add(" | ".join(self._plain(shapes)))

    def _after(self, state: State) -> str:
        if len(state) == 1:
            return self._go_on(next(iter(state)))
        if not next_moves(state, self._nodes):
            return ""
        rest = f'"," ws {self._members(state)}'
        return f"({rest})?" if any(container.ends for container in state) else rest


def times(least: int, most: int | None) -> str:
    """GBNF's suffix for so many in a row."""
    if most is None:
        return "*" if least == 0 else f"{{{least},}}"
    return f"{{{least},{most}}}"
