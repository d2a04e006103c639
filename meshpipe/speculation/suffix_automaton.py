"""A suffix automaton that also knows where each of its strings was seen last.

The automaton (Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text") grows by one
token in amortised constant time and has at most two states a token. A state stands for a set of strings that
all end at the same positions of the text; its *link* leads to the state of their longest suffix that also
ends elsewhere. The links form a tree, and the strings that end at the newest token are those on the way from
the newest state to the root.

Where a string was seen last is the newest position below its state in that tree. Writing it into every
state on the way up would cost O(n) a token on a run of one token, so the tree is cut into *paths*: each state
continues the path of the child through which it was seen last, and a path keeps one last position for all
its states (the preferred paths of Sleator and Tarjan's link-cut trees, 1983). A new token takes the way from
its state to the root out of the paths that it crosses (O(log n) of them, amortised); where a path is cut or
two are joined, only the smaller side is relabelled. On natural text, runs and periods that is a few states.
The worst text found (long runs inside a period, over and over) relabels in the order of sqrt(n) a token.

Memory: about 120 bytes a token of natural text, 180 if it never repeats, 310 at worst (random bits).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

_NONE = -1
ROOT = 0


class SuffixAutomaton:
    """All substrings of the tokens given so far. Tokens are integers of 32 bits, -1 included.

    `repeat` is the longest suffix of the text that also ends before the text's end: its length and the last
    such end (exclusive index), (0, 0) if there is none.
    """

    __slots__ = (
        "_child",
        "_free",
        "_last",
        "_length",
        "_link",
        "_more",
        "_newest",
        "_next",
        "_path",
        "_path_last",
        "_path_size",
        "_path_top",
        "_token",
        "repeat",
        "tokens",
    )

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = array("i")
        self.repeat = (0, 0)
        # States. Most have one transition; the others of a branching state are in `_more`. The root is no
        # transition's target, so 0 in `_next` means none.
        self._length = array("i", [0])
        self._link = array("i", [_NONE])
        self._token = array("i", [0])
        self._next = array("i", [0])
        self._more: dict[int, dict[int, int]] = {}
        # Paths over the tree of links, the root left out: each state's path, and the next state down it.
        self._path = array("i", [_NONE])
        self._child = array("i", [_NONE])
        self._path_last = array("i")
        self._path_top = array("i")
        self._path_size = array("i")
        self._free: list[int] = []
        self._newest = ROOT
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def states(self) -> int:
        """Number of states, at most two a token and the root."""
        return len(self._length)

    @property
    def newest(self) -> int:
        """The state of the whole text."""
        return self._newest

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._append(token)

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest suffix of `string + token` that is in the text, as its (state, length).

        `state` and `length` stand for a string in the text; start from (ROOT, 0) or (newest, len(self)).
        """
        tokens, following = self._token, self._next
        while True:
            target = following[state] if tokens[state] == token else 0
            if not target and (more := self._more.get(state)):
                target = more.get(token, 0)
            if target:
                return target, length + 1
            if state == ROOT:
                return ROOT, 0
            state = self._link[state]
            length = self._length[state]

    def last_end(self, state: int) -> int:
        """The last position (exclusive index) at which the strings of a state other than the root end."""
        return self._path_last[self._path[state]]

    def _target(self, state: int, token: int) -> int:
        if self._token[state] == token and (target := self._next[state]):
            return target
        more = self._more.get(state)
        return more.get(token, 0) if more else 0

    def _set_target(self, state: int, token: int, target: int) -> None:
        if not self._next[state]:
            self._token[state] = token
            self._next[state] = target
        elif self._token[state] == token:
            self._next[state] = target
        else:
            self._more.setdefault(state, {})[token] = target

    def _new_state(self, length: int, link: int) -> int:
        self._length.append(length)
        self._link.append(link)
        self._token.append(0)
        self._next.append(0)
        self._path.append(_NONE)
        self._child.append(_NONE)
        return len(self._length) - 1

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        state = self._new_state(len(self.tokens), ROOT)
        above, target = self._newest, 0
        while above != _NONE and not (target := self._target(above, token)):
            self._set_target(above, token, state)
            above = self._link[above]
        if above != _NONE:
            if self._length[target] != self._length[above] + 1:
                target = self._split(above, token, target)
            self._link[state] = target
        self._newest = state
        parent = self._link[state]
        self.repeat = (self._length[parent], self.last_end(parent)) if parent != ROOT else (0, 0)
        self._mark(state)

    def _split(self, above: int, token: int, state: int) -> int:
        """Give the strings of `state` up to `above + token` a state of their own."""
        clone = self._new_state(self._length[above] + 1, self._link[state])
        self._token[clone] = self._token[state]
        self._next[clone] = self._next[state]
        if more := self._more.get(state):
            self._more[clone] = more.copy()
        self._link[state] = clone
        while above != _NONE and self._target(above, token) == state:
            self._set_target(above, token, clone)
            above = self._link[above]
        # The clone's strings were last seen where the longer ones were: it goes on the same path, above them.
        path = self._path[state]
        self._path[clone] = path
        self._child[clone] = state
        self._path_size[path] += 1
        if self._path_top[path] == state:
            self._path_top[path] = clone
        else:
            self._child[self._link[clone]] = clone
        return clone

    def _mark(self, state: int) -> None:
        """Put the way from the newest state to the root on one path, last seen at the text's end."""
        new = self._new_path(state, 1)
        self._path[state] = new
        below, node = state, self._link[state]
        while node != ROOT:
            upper = self._cut_below(node)
            self._child[node] = below
            top = self._path_top[upper]
            if self._path_size[upper] < self._path_size[new]:
                self._relabel(node, top, new)
                self._path_size[new] += self._path_size[upper]
                self._free.append(upper)
            else:
                self._relabel(state, below, upper)
                self._path_size[upper] += self._path_size[new]
                self._free.append(new)
                new = upper
            self._path_top[new] = top
            below, node = top, self._link[top]
        self._path_last[new] = len(self.tokens)

    def _cut_below(self, node: int) -> int:
        """Cut a state's path just below it; the path of the upper part, which includes the state."""
        path, lower = self._path[node], self._child[node]
        if lower == _NONE:
            return path
        # Walk both ways at once, to learn which side is the smaller.
        up, down, size, top = node, lower, 1, self._path_top[path]
        while up != top and self._child[down] != _NONE:
            up, down, size = self._link[up], self._child[down], size + 1
        if self._child[down] == _NONE:
            cut = self._new_path(lower, size)
            self._relabel(down, lower, cut)
            self._path_last[cut] = self._path_last[path]
            self._path_size[path] -= size
            return path
        cut = self._new_path(top, size)
        self._relabel(node, top, cut)
        self._path_top[path] = lower
        self._path_size[path] -= size
        return cut

    def _new_path(self, top: int, size: int) -> int:
        if self._free:
            path = self._free.pop()
            self._path_top[path] = top
            self._path_size[path] = size
            return path
        self._path_last.append(0)
        self._path_top.append(top)
        self._path_size.append(size)
        return len(self._path_last) - 1

    def _relabel(self, low: int, high: int, path: int) -> None:
        """Put the states from `low` up to `high` on a path."""
        self._path[low] = path
        while low != high:
            low = self._link[low]
            self._path[low] = path
