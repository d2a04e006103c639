"""Finds a decode that hangs while its process lives on and answers heartbeats.

A decode hangs when its steps have stood still for longer than the stage's own measurements explain. With the
compiled tap a step is a node of the graph, of which a decode has hundreds; else it is the whole decode. So what
is slow, a long prefill or a machine that is short of time or reads its weights from a disk, is not taken for what
stands still as long as steps can be seen: no single one takes twice as long as decodes of so many rows took at load,
or, by the same measure, of late. Where a decode is few steps, it is given `COARSE` times what it took at load.
"""

from __future__ import annotations

from collections.abc import Callable

import trio
from attrs import define, field

from meshpipe.speculation.policy import CostCurve

TICK = 0.25
"""Seconds between looks."""
LEAST = 2.0
"""Seconds without a step that are never a hang."""
FINE, COARSE = 2, 20
"""By how many times what a decode takes it may stand still, if it is of `MANY` steps or more, and if it is of less."""
MANY = 32
HOPELESS = 5
"""A decode that stands still for so many times as long is not waited for any more."""
FORGETTING = 0.98
"""What is left, after each decode, of the memory of a slow one."""


@define(eq=False)
class Watchdog:
    """Watches the decodes of one engine, whose `steps` rise as it computes; told when each `began` and `ended`.

    `hangs` says what is wrong as long as it is. `hopeless` is set once, when a decode has hung for very long.
    """

    cost: CostCurve
    steps: Callable[[], int]
    hangs: str | None = None
    hopeless: trio.Event = field(factory=trio.Event)
    _rows: int = 0  # of the decode at hand; 0: there is none
    _drafting: float = 0.0
    _began: float = 0.0
    _steps_before: int = 0
    _steps_each: int = 1  # steps of the last decode
    _slowness: float = 1.0
    _decodes: int = 0

    def began(self, rows: int, drafting: float = 0.0) -> None:
        """A decode of so many rows begins, and so many seconds of drafting with it."""
        self._rows, self._drafting = rows, drafting
        self._began = trio.current_time()
        self._steps_before = self.steps()
        self._decodes += 1

    def ended(self) -> None:
        """It has come to its end, whatever that was."""
        if self.hangs is None:
            took = trio.current_time() - self._began
            self._slowness = max(1.0, FORGETTING * self._slowness, took / self._usual())
        self._steps_each = self.steps() - self._steps_before
        self._rows = 0
        self.hangs = None

    def patience(self) -> float:
        """Seconds for which the decode at hand may stand still."""
        times = FINE * self._slowness
        return max(LEAST, self._usual() * (times if self._steps_each >= MANY else max(COARSE, times)))

    def _usual(self) -> float:
        return self.cost(self._rows) + self._drafting

    async def watch(self, on_hang: Callable[[str], None]) -> None:
        """Calls `on_hang` with the reason whenever a decode is found to hang; until cancelled."""
        seen, since = (0, 0), trio.current_time()
        while True:
            before = trio.current_time()
            await trio.sleep(TICK)
            now = trio.current_time()
            mark = (self._decodes, self.steps())
            stood_still = now - before > 2 * TICK  # this process itself
            if not self._rows or mark != seen or stood_still:
                seen, since, self.hangs = mark, now, None
                continue
            stands, patience = now - since, self.patience()
            if stands > patience and self.hangs is None:
                self.hangs = (
                    f"a decode of {self._rows} rows, which should take {self._usual():.2g} s, has not moved for "
                    f"{stands:.1f} s"
                )
                on_hang(self.hangs)
            if stands > HOPELESS * patience:
                self.hopeless.set()
