"""How wide the next verify window is, and whether one more may be sent at all.

A pipe of stages has a *latency* for a window of w rows (links and the service of every stage) and a *slowest
stage*, which can start a new one every `slowest(w)` seconds. By Little's law latency / slowest windows in
flight fill it; fewer leave it idle, more only queue. What a window is worth is the sum over its rows of the
probability that everything up to that row is right (`survival`): the commits to expect of it. What it costs is
the slowest stage's time, and, if it turns out stale, the delay of the correction that comes behind it.

`Pace` weighs these with the cost curves that stages publish and with what replies have shown so far. It asks
nothing of its proposers but honest probabilities, and it need not send hopeless windows to find out whether
hope has returned: proposals are judged by commits whether or not they were sent.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Literal

from attrs import define, field, frozen

from meshpipe.errors import UsageError
from meshpipe.messages import Timing

WIDTHS = (1, 64)
DEPTHS = (1, 256)


@frozen
class CostCurve:
    """Seconds of one decode by number of rows: measured at some numbers, linear between and above them.

    `points` are (rows, seconds), ascending in rows. Raises UsageError if there are none, or if they do not
    ascend or are not positive.
    """

    points: tuple[tuple[int, float], ...]

    def __attrs_post_init__(self) -> None:
        rows = [point[0] for point in self.points]
        if not rows or rows[0] < 1 or any(low >= high for low, high in pairwise(rows)):
            raise UsageError(f"a cost curve needs ascending numbers of rows from 1 up, but has {rows}")
        if min(seconds for _, seconds in self.points) <= 0:
            raise UsageError(f"a cost curve needs positive seconds, but has {self.points}")

    def __call__(self, rows: int) -> float:
        """Seconds for that many rows."""
        points = self.points
        if rows <= points[0][0]:
            return points[0][1]
        if len(points) == 1:
            return points[0][1] * rows / points[0][0]
        at = min(bisect_left(points, (rows, 0.0)), len(points) - 1)
        (low, start), (high, stop) = points[at - 1], points[at]
        return start + (stop - start) * (rows - low) / (high - low)


@define
class Pipe:
    """What a window costs: a curve for every stage, and `link`, the seconds that links add to a round trip.

    The curves come from probes at load and `link` from handshakes, so that the first windows are already
    right; `observe` keeps both fresh.
    """

    curves: tuple[CostCurve, ...]
    link: float
    _scales: list[float] = field(init=False)

    FRESHNESS = 1 / 16
    SLACK = 1

    def __attrs_post_init__(self) -> None:
        if not self.curves or self.link < 0:
            raise UsageError(f"a pipe needs a stage and a link time of 0 or more, not {self}")
        self._scales = [1.0] * len(self.curves)

    def replace(self, curves: tuple[CostCurve, ...], link: float) -> None:
        """Other stages have taken the place of these, as many."""
        self.curves, self.link = curves, link
        self._scales = [1.0] * len(curves)

    def services(self, width: int) -> list[float]:
        """Seconds that each stage takes for one window."""
        return [scale * curve(width) for scale, curve in zip(self._scales, self.curves, strict=True)]

    def latency(self, width: int) -> float:
        """Seconds from the dispatch of a window to its reply when nothing else is in the pipe."""
        return self.link + sum(self.services(width))

    def slowest(self, width: int) -> float:
        """Seconds of the slowest stage: the least time between two replies."""
        return max(self.services(width))

    def room(self, width: int) -> float:
        """Seconds of the slowest stage's work that may be in flight: Little's law, and `SLACK` windows more.

        Services vary. With no more than Little's number in flight the slowest stage would idle after every window
        that another stage, or a link, was late with; a lone stage without a link waits for neither.
        """
        latency, slowest = self.latency(width), self.slowest(width)
        return latency + (self.SLACK * slowest if latency > slowest else 0.0)

    def depth(self, width: int) -> int:
        """Windows of that width in flight that keep the pipe full (see `room`), at least 1."""
        return max(1, math.ceil(self.room(width) / self.slowest(width) - 1e-9))

    def observe(self, elapsed: float, timings: Iterable[Timing]) -> None:
        """Learn from a reply that came `elapsed` seconds after its window was sent."""
        for timing in timings:
            elapsed -= timing.queued + timing.service + timing.drafting
            expected = self.curves[timing.stage](timing.rows)
            scale = self._scales[timing.stage]
            self._scales[timing.stage] += self.FRESHNESS * (timing.service / expected - scale)
        self.link += self.FRESHNESS * (max(elapsed, 0.0) - self.link)


@define
class AdaptiveWidth:
    """The widest window that recent replies justify, from 1 to `maximum`.

    A rejection shrinks it to the run of guesses that were right before it (1 if there was none); a reply
    without one doubles it. Guesses count whether they were sent or not, so that it can grow from 1 again.
    """

    maximum: int
    limit: int = field(init=False)
    _run: int = field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self.limit = self.maximum

    def observe(self, accepted: int, rejected: bool) -> None:
        """Learn from a reply: guesses that it showed to be right, and whether it showed one to be wrong."""
        self._run += accepted
        if rejected:
            self.limit = max(1, min(self.maximum, self._run))
            self._run = 0
        elif accepted:
            self.limit = min(self.maximum, self.limit * 2)


@frozen
class Verdict:
    """What commits said of guesses, sent or not: how many were right, and whether one was wrong."""

    accepted: int
    rejected: bool


@define
class _Sent:
    number: int
    work: float  # seconds of the slowest stage
    expected: float  # commits


class Pace:
    """One session's answers to "how wide is the next window, and may it go now?".

    width, depth: fixed numbers, or "auto". A fixed width is what every window has (fewer rows if fewer tokens
    are known); an automatic one is chosen from 1 to `max_width` by comparing widths on the cost curves, within
    the limit of AdaptiveWidth. A fixed depth is the number of windows in flight; an automatic one is
    Little's law in work (so many rows as the pipe has `room` for on its slowest stage), at most
    `max_depth` windows, and lowered where one more window does not pay: where its expected commits are few
    beside its stale work. `least` is the smallest survival of a row that is sent at all.

    Raises UsageError for a width or depth out of WIDTHS or DEPTHS.
    """

    def __init__(
        self,
        pipe: Pipe,
        *,
        width: int | Literal["auto"] = "auto",
        depth: int | Literal["auto"] = "auto",
        max_width: int = 16,
        max_depth: int = 64,
        least: float = 0.05,
    ) -> None:
        for name, value, (low, high) in (
            ("width", max_width if width == "auto" else width, WIDTHS),
            ("depth", max_depth if depth == "auto" else depth, DEPTHS),
        ):
            if not isinstance(value, int) or not low <= value <= high:
                raise UsageError(f"{name} is {value!r}: it must be 'auto' or an integer from {low} to {high}")
        self.pipe = pipe
        self.width = width
        self.depth = depth
        self.adaptive = AdaptiveWidth(max_width)
        self.least = least
        self._max_depth = max_depth
        self._in_flight: deque[_Sent] = deque()

    @property
    def in_flight(self) -> int:
        """Windows sent and neither retired nor stale."""
        return len(self._in_flight)

    @property
    def full(self) -> bool:
        """Whether as many windows are in flight as may be, or as fill the pipe: more guesses would not be sent."""
        if self.depth != "auto":
            return self.in_flight >= self.depth
        work = sum(window.work for window in self._in_flight)
        return self.in_flight >= self._max_depth or work >= self.pipe.room(1) * (1 - 1e-9)

    @property
    def widest(self) -> int:
        """Most rows of the next window, whatever is known."""
        return self.adaptive.limit if self.width == "auto" else self.width

    def next_width(self, survival: Sequence[float]) -> int:
        """Rows of the window to send now, 0 to send none yet.

        `survival[i]` is the probability that the next token to send and the i after it are all right, those
        in flight before them included: 1.0 at first if that token is committed, and never rising. The next
        window is mandatory when nothing is in flight; it is then at least 1 wide if there is a token.
        """
        if not survival:
            return 0
        mandatory = not self._in_flight
        if mandatory and len(survival) == 1:
            return 1  # without guesses there is nothing to choose
        width = self._best_width(survival) if self.width == "auto" else min(self.width, len(survival))
        if mandatory:
            return max(1, width)
        if not width or self.in_flight >= (self._max_depth if self.depth == "auto" else self.depth):
            return 0
        if self.depth == "auto" and not self._pays(width, survival):
            return 0
        return width

    def sent(self, number: int, survival: Sequence[float]) -> None:
        """Note that window `number` was sent; `survival` of its rows alone."""
        self._in_flight.append(_Sent(number, self.pipe.slowest(len(survival)), sum(survival)))

    def retired(self, number: int, verdict: Verdict) -> None:
        """Note that window `number` and those before it retired, and what became of the guesses."""
        self.adaptive.observe(verdict.accepted, verdict.rejected)
        while self._in_flight and self._in_flight[0].number <= number:
            self._in_flight.popleft()

    def restart(self) -> None:
        """Note that nothing is in flight any more: a divergence made it stale, or a reply is lost for good."""
        self._in_flight.clear()

    def _best_width(self, survival: Sequence[float]) -> int:
        """The width with the most expected commits for its time: see `_price`."""
        widest = min(self.adaptive.limit, len(survival))
        best, best_rate = 0, 0.0
        for width, commits in enumerate(accumulate(survival[:widest]), 1):
            if survival[width - 1] < self.least:
                break
            rate = commits / self._price(width, survival)
            if rate > best_rate:
                best, best_rate = width, rate
        return best

    def _price(self, width: int, survival: Sequence[float]) -> float:
        """Seconds of the slowest stage, and those by which a divergence in this window becomes known later.

        Single rows would bring the news earlier: they wait for the slowest stage too, but not for the others.
        Where only one window may be in flight, it costs a whole round trip.
        """
        if self.depth == 1:
            return self.pipe.latency(width)
        slowest, single = self.pipe.slowest(width), self.pipe.slowest(1)
        late = (self.pipe.latency(width) - slowest) - (self.pipe.latency(1) - single)
        return slowest + (survival[0] - survival[width - 1]) * late

    def _pays(self, width: int, survival: Sequence[float]) -> bool:
        """Whether one more window in flight is worth its work.

        It has room as long as the work in flight is less than the latency. Its gain is the share it adds to
        what this round trip will commit, in seconds of that round trip. Its loss, if it is stale, is the time
        for which the correction finds a stage busy with it: half of a service in the mean, if that stage has
        no idle time left (a pipe that is mostly idle has long finished the stale window).
        """
        latency, service = self.pipe.latency(width), self.pipe.slowest(width)
        work = sum(window.work for window in self._in_flight)
        if work >= self.pipe.room(width) * (1 - 1e-9):
            return False
        expected = sum(window.expected for window in self._in_flight)
        commits = sum(survival[:width])
        gain = latency * commits / (1 + expected)
        busy = min(1.0, (work + service) / latency)
        loss = (1 - survival[width - 1]) * busy * service / 2
        return gain > loss
