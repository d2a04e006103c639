"""What a generation did: times, speculation, occupancy."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from attrs import asdict, define, field, frozen

from meshpipe.speculation.ledger import Counters, Tally


@frozen
class SourceReport:
    """Of one proposer: tokens sent in windows, tokens judged by a commit at their position, tokens accepted.

    Of one that computes beside the pipe also the tokens that it `made`, sent or not, and the `seconds` that these
    took (of a decode shared by several sessions, an equal part).
    """

    drafted: int
    judged: int
    accepted: int
    made: int = 0
    seconds: float = 0.0

    @property
    def acceptance(self) -> float | None:
        """Share of the judged tokens that were right; None if none was judged."""
        return self.accepted / self.judged if self.judged else None


@frozen
class Report:
    """One request, from its prompt to its last token. Times in seconds, rates in tokens per second.

    `ttft`: to the first token; `itl`: percentiles 50, 90 and 99 of the time between commits, spread over the
    tokens of a commit; `tpot`: seconds a token after the first; `occupancy`: mean number of windows in flight
    while decoding; `overlapped`: share of the decode time with two or more in flight; `depth` and `width`: mean
    and maximum of the windows dispatched; `survival`: acceptance by distance from the frontier; `steps`: the
    windows that retired after the first commit, as (width, tokens committed, how many such). `reroutes`: times
    that windows went out again because replies were lost; `resumes`: times that the tokens were run again because
    caches were (a stage was lost, or a lane taken); `kept_tokens`: by stage, those that it did not run then, since
    its cache still held them. `exact` False: bits may differ from the unsplit model's.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish_reason: str
    ttft: float
    total: float
    tpot: float | None
    decode_tps: float | None
    itl: tuple[float, float, float] | None
    windows: int
    stale_windows: int
    stale_tokens: int
    divergences: int
    reroutes: int
    resumes: int
    kept_tokens: tuple[int, ...]
    sources: dict[str, SourceReport]
    survival: tuple[tuple[int, int, int], ...]
    """(distance, judged, accepted), ascending."""
    occupancy: float
    overlapped: float
    depth: tuple[float, int]
    width: tuple[float, int]
    exact: bool
    steps: tuple[tuple[int, int, int], ...] = ()

    @property
    def acceptance(self) -> float | None:
        """Share of all judged proposals that were right."""
        judged = sum(source.judged for source in self.sources.values())
        return sum(source.accepted for source in self.sources.values()) / judged if judged else None

    def to_dict(self) -> dict[str, object]:
        """Plain data, for JSON."""
        return asdict(self) | {"acceptance": self.acceptance}


@define
class Stopwatch:
    """Collects what a `Report` says about time while a session runs. All times on one monotonic clock."""

    began: float
    commits: list[tuple[float, int]] = field(factory=list)  # (time, tokens)
    widths: list[int] = field(factory=list)
    depths: list[int] = field(factory=list)
    _steps: Counter[tuple[int, int]] = field(factory=Counter)
    _in_flight: int = 0
    _since: float = 0.0
    _area: float = 0.0
    _overlapped: float = 0.0

    def sent(self, now: float, width: int, in_flight: int) -> None:
        """A verify window went out; `in_flight` counts it."""
        self.widths.append(width)
        self.depths.append(in_flight)
        self.flying(now, in_flight)

    def flying(self, now: float, in_flight: int) -> None:
        """The number of windows in flight is this from now on."""
        if self.commits:
            self._area += self._in_flight * (now - self._since)
            self._overlapped += (now - self._since) if self._in_flight >= 2 else 0.0
        self._in_flight, self._since = in_flight, now

    def committed(self, now: float, tokens: int, width: int) -> None:
        """A window of this width retired, and gave tokens."""
        if self.commits:
            self._steps[width, tokens] += 1
        else:
            self._since = now
        self.commits.append((now, tokens))

    def report(
        self,
        now: float,
        counters: Counters,
        *,
        prompt: int,
        cached: int,
        kept: tuple[int, ...],
        reason: str,
        exact: bool,
        made: Mapping[str, tuple[int, float]],
    ) -> Report:
        """The report of a session that ended at `now`; `made` is what proposers computed: tokens and seconds."""
        count = sum(tokens for _, tokens in self.commits)
        first = self.commits[0][0] if self.commits else now
        last = self.commits[-1][0] if self.commits else now
        # What the first commit brought was not decoded one by one: it does not count towards the rate.
        later = count - (self.commits[0][1] if self.commits else 0)
        span = last - first
        sources = dict.fromkeys(made, Tally()) | counters.sources
        return Report(
            prompt_tokens=prompt,
            cached_tokens=cached,
            completion_tokens=count,
            finish_reason=reason,
            ttft=first - self.began,
            total=now - self.began,
            tpot=span / later if later and span > 0 else None,
            decode_tps=later / span if later and span > 0 else None,
            itl=self._itl(),
            windows=counters.windows,
            stale_windows=counters.stale_windows,
            stale_tokens=counters.stale_tokens,
            divergences=counters.divergences,
            reroutes=counters.reroutes,
            resumes=counters.resumes,
            kept_tokens=kept,
            sources={
                name: SourceReport(tally.dispatched, tally.judged, tally.accepted, *made.get(name, ()))
                for name, tally in sources.items()
            },
            survival=tuple(
                (distance, tally.judged, tally.accepted)
                for distance, tally in sorted(counters.distances.items())
            ),
            occupancy=self._area / span if span > 0 else 0.0,
            overlapped=self._overlapped / span if span > 0 else 0.0,
            depth=_mean_and_max(self.depths),
            width=_mean_and_max(self.widths),
            exact=exact,
            steps=tuple((width, tokens, count) for (width, tokens), count in sorted(self._steps.items())),
        )

    def _itl(self) -> tuple[float, float, float] | None:
        gaps = [
            (time - before) / tokens
            for (before, _), (time, tokens) in zip(self.commits, self.commits[1:], strict=False)
            for _ in range(tokens)
        ]
        if len(gaps) < 2:
            return None
        cuts = statistics.quantiles(gaps, n=100, method="inclusive")
        return cuts[49], cuts[89], cuts[98]


def _mean_and_max(values: Sequence[int]) -> tuple[float, int]:
    return (sum(values) / len(values), max(values)) if values else (0.0, 0)
