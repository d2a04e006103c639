"""Traces: every window joined on every stage, golden answers on the virtual clock, clocks that differ, exports."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import mixed, novel, periodic, simulated

from meshpipe import Speculation
from meshpipe.errors import ProtocolError, UsageError
from meshpipe.telemetry.clocks import Offset, chain, estimate
from meshpipe.telemetry.spans import Kind, Recorder, Span, pack_spans, unpack_spans
from meshpipe.telemetry.trace import Outcome, Trace, Track, flights

PROMPT = [at % 7 for at in range(30)]


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("target", [periodic(), mixed, novel])
async def test_every_window_is_joined_on_every_stage(stages: int, target, autojump_clock: object) -> None:  # type: ignore[no-untyped-def]
    async with simulated(target, stages) as sim, sim.coordinator.tracing() as trace:
        done = [await sim.coordinator.complete(PROMPT, max_tokens=80) for _ in range(2)]
    followed = flights(trace)
    report = done[0].report
    sent = [flight for flight in followed if flight.session == followed[0].session]
    assert (
        sum(not flight.prefill for flight in sent) == report.windows - 1
    )  # the last of the prompt is prefill
    assert [flight.unseen(stages) for flight in followed if flight.unseen(stages)] == []
    outcomes = Counter(flight.outcome for flight in sent)
    assert outcomes[Outcome.UNFINISHED] == 0
    assert outcomes[Outcome.CORRECTED] == report.divergences
    assert sum(flight.tokens for flight in sent) == report.completion_tokens
    computed = Counter(
        (stage, stay.end)
        for flight in followed
        for stage, stay in flight.stays.items()
        if stay.end != "aborted"
    )
    for stage, actor in enumerate(sim.stages):
        assert computed[stage, "computed"] == actor.counters.windows_run
        assert computed[stage, "dropped"] == actor.counters.windows_dropped
    for flight in followed:
        for (_, began, ended), (_, next_began, _) in zip(
            flight.legs(stages), flight.legs(stages)[1:], strict=False
        ):
            assert began <= ended == next_began


async def test_recording_is_off_until_asked_for_and_once_at_a_time(autojump_clock: object) -> None:
    async with simulated(periodic()) as sim:
        await sim.coordinator.complete(PROMPT, max_tokens=5)
        async with sim.coordinator.tracing() as trace:
            with pytest.raises(UsageError, match="recorded already"):
                async with sim.coordinator.tracing():
                    pass
        assert {span.kind for span in trace.spans} == set()
        async with sim.coordinator.tracing() as trace:
            await sim.coordinator.complete(PROMPT, max_tokens=5, speculation=Speculation(mode="off"))
        assert sum(flight.tokens for flight in flights(trace)) == 5
        await sim.coordinator.complete(PROMPT, max_tokens=5)
        assert sum(flight.tokens for flight in flights(trace)) == 5


def test_a_ring_keeps_the_latest_and_says_that_it_has_come_round() -> None:
    recorder = Recorder(capacity=3)
    recorder.start()
    for at in range(3):
        recorder.add(Span(Kind.QUEUE, at, at))
    assert recorder.full
    recorder.add(Span(Kind.QUEUE, 3.0, 3.0))
    assert [span.began for span in recorder.stop()] == [1, 2, 3]
    assert not recorder.full


spans = st.builds(
    Span,
    kind=st.sampled_from([int(kind) for kind in Kind]),
    began=st.floats(-1e9, 1e9),
    ended=st.floats(-1e9, 1e9),
    stage=st.integers(-1, 100),
    session=st.integers(0, 2**62),
    epoch=st.integers(0, 2**31 - 1),
    window=st.integers(0, 2**31 - 1),
    value=st.integers(0, 2**31 - 1),
    detail=st.integers(0, 2**31 - 1),
)


@given(st.lists(spans, max_size=20))
def test_spans_come_back_from_bytes(some: list[Span]) -> None:
    assert unpack_spans(pack_spans(some)) == some


def test_what_is_no_span_is_refused() -> None:
    with pytest.raises(ProtocolError, match="pieces of"):
        unpack_spans(b"x" * 10)
    with pytest.raises(ProtocolError, match="unknown kind"):
        unpack_spans(b"\xff" + pack_spans([Span(0, 0.0, 0.0)])[1:])
    with pytest.raises(ProtocolError, match="without a time"):
        unpack_spans(pack_spans([Span(0, 0.0, float("nan"))]))


@given(
    ahead=st.floats(-1e6, 1e6),
    ways=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1e5)), min_size=1, max_size=20),
)
def test_an_offset_is_within_half_the_shortest_round_trip(
    ahead: float, ways: list[tuple[float, float, float]]
) -> None:
    beats = [(sent, sent + there + ahead, sent + there + back) for there, back, sent in ways]
    found = estimate(beats)
    assert found is not None
    assert found.give_or_take == pytest.approx(min(there + back for there, back, _ in ways) / 2, abs=1e-6)
    assert abs(found.ahead - ahead) <= found.give_or_take + 1e-6


def test_offsets_chain_along_the_route_as_far_as_they_are_known() -> None:
    assert estimate([]) is None
    assert chain([Offset(1.0, 0.1), Offset(-3.0, 0.2)]) == [
        Offset(1.0, 0.1),
        Offset(-2.0, pytest.approx(0.3)),
    ]
    assert chain([None, Offset(1.0, 0.1)]) == [None, None]


def test_clocks_that_differ_by_a_second_join_in_order() -> None:
    """Stage 0 is a second ahead of the coordinator, stage 1 a second behind; each hop takes 10 ms."""
    coordinator = [
        Span(Kind.DISPATCH, 5.0, 5.0, session=1, window=0, value=1),
        Span(Kind.REPLY, 5.05, 5.05, session=1, window=0, value=1),
        Span(Kind.COMMIT, 5.05, 5.05, session=1, window=0, value=1),
    ]
    stages = [
        [Span(Kind.QUEUE, 6.01, 6.01, 0, 1, 0, 0, 1), Span(Kind.COMPUTE, 6.01, 6.02, 0, 1, 0, 0, 1, 1)],
        [Span(Kind.QUEUE, 4.03, 4.03, 1, 1, 0, 0, 1), Span(Kind.COMPUTE, 4.03, 4.04, 1, 1, 0, 0, 1, 1)],
    ]
    clocks = chain([estimate([(1.0, 2.01, 1.02)]), estimate([(3.0, 1.01, 3.02)])])
    trace = Trace(stages=2)
    trace.join(
        [
            Track(coordinator, False, Offset()),
            *(Track(spans, False, clock) for spans, clock in zip(stages, clocks, strict=True)),
        ],
        missing=(),
    )
    (flight,) = flights(trace)
    assert [name for name, _, _ in flight.legs(2)] == [
        "wire",
        "queue",
        "compute",
        "wire",
        "queue",
        "compute",
        "wire",
    ]
    assert [round(ended - began, 6) for _, began, ended in flight.legs(2)] == [
        0.01,
        0,
        0.01,
        0.01,
        0,
        0.01,
        0.01,
    ]
    assert flight.unseen(2) == []
    assert trace.give_or_take == pytest.approx(0.02)
