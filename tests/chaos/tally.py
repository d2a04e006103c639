"""What became of faults and requests, in numbers."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from attrs import define, field


@define
class Fault:
    """One fault: what, to which process or relay, at which moment of a request (empty: at any).

    Seconds until it was `noticed`, until the stages were `joined` again, until an interrupted request was `going_on`.
    """

    kind: str
    target: int
    moment: str = ""
    noticed: float | None = None
    joined: float | None = None
    going_on: float | None = None


@define
class Tally:
    """What became of the requests, and of the faults. `errors`: of requests that ended with one."""

    faults: list[Fault] = field(factory=list)
    requests: int = 0
    resumed: int = 0
    cancelled: int = 0
    errors: list[str] = field(factory=list)
    memory: dict[str, Any] = field(factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: counts, and by kind of fault the median and worst seconds, and of how many."""
        kinds = Counter(fault.kind for fault in self.faults)
        times: dict[str, Any] = {}
        for kind in kinds:
            mine = [fault for fault in self.faults if fault.kind == kind]
            times[kind] = {
                name: _median_and_worst(
                    [value for fault in mine if (value := getattr(fault, name)) is not None]
                )
                for name in ("noticed", "joined", "going_on")
            }
        return {
            "faults": dict(kinds),
            "moments": dict(Counter(fault.moment for fault in self.faults)),
            "requests": self.requests,
            "resumed": self.resumed,
            "cancelled": self.cancelled,
            "errors": self.errors,
            "seconds": times,
            "memory": self.memory,
        }


def _median_and_worst(values: list[float]) -> list[float] | None:
    return [round(statistics.median(values), 3), round(max(values), 3), len(values)] if values else None
