"""Traces: every window joined on every stage, golden answers on the virtual clock, clocks that differ, exports."""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections import Counter
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import prometheus_client
import pytest
import trio
from attrs import define, field
from browser import CHROMIUM, browser
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families
from simulated import mixed, novel, periodic, simulated

from meshpipe import Conditions, Pipeline, Speculation
from meshpipe.cli import main
from meshpipe.errors import ProtocolError, UsageError
from meshpipe.messages import Record, Spans
from meshpipe.pipeline import tracing
from meshpipe.pipeline.sink import ReturnSink
from meshpipe.serving.metrics import Metrics
from meshpipe.telemetry.clocks import Offset, chain, estimate
from meshpipe.telemetry.html import render, write_html
from meshpipe.telemetry.live import LiveView
from meshpipe.telemetry.otel import OtelMetrics, export
from meshpipe.telemetry.overlap import analyse
from meshpipe.telemetry.perfetto import read_trace, write_trace
from meshpipe.telemetry.plot import write_plot
from meshpipe.telemetry.prometheus import Histograms
from meshpipe.telemetry.spans import NAMES, SPAN_BYTES, Kind, Recorder, Span, pack_spans, unpack_spans
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


# ---- the analysis, with answers that are known ---------------------------------------------------------

TICK = 0.009  # seconds: a row's decode, and the delay of a link
LINEAR = ((1, TICK), (2, 2 * TICK), (63, 63 * TICK))  # so that merging windows gains nothing
GOLDEN = {"max_tokens": 1 + 3 * 10, "speculation": Speculation(depth=3, width=1)}


async def golden() -> Trace:
    """Three windows in flight through two stages, everything in ticks of 9 ms.

    A period is 4 ticks, in which each stage is busy 3 and idle 1; stage 1 is 2 ticks behind stage 0:

        tick     0  1  2  3 | 4  5  6  7 | …
        stage 0  A  B  C  . | D  E  F  . |
        stage 1  .  .  A  B | C  .  D  E | F
    """
    async with simulated(periodic(), 2, delay=TICK, cost=LINEAR) as sim, sim.coordinator.tracing() as trace:
        await sim.coordinator.complete(PROMPT, **GOLDEN)
    return trace


async def test_golden_busy_shares_and_overlaps(autojump_clock: object) -> None:
    found = analyse(await golden())
    assert found is not None
    periods = 10
    seconds = (4 * (periods - 1) + 5) * TICK  # to the end of the last window at stage 1
    assert found.interval[1] - found.interval[0] == pytest.approx(seconds, abs=1e-6)
    computing = 3 * periods * TICK
    overlapping = (periods + periods - 1) * TICK  # C with A, and the next period's D with C
    for work in found.work:
        assert work.busy * seconds == pytest.approx(computing, abs=1e-6)
        assert (work.decodes, work.windows, work.rows) == (30, 30, 30)
        assert work.service == pytest.approx(TICK, abs=1e-6)
        assert (work.in_vain, work.stale_run, work.dropped) == (0, 0, 0)
    alone = 2 * computing - 2 * overlapping
    ticks = [seconds - alone - overlapping, alone, overlapping]
    assert [share * seconds for share in found.concurrent] == pytest.approx(ticks, abs=1e-6)
    assert found.at_least(1) == pytest.approx((alone + overlapping) / seconds)
    assert found.overlaps == found.between_windows == 2 * periods - 1
    assert found.between_sessions == 0
    assert found.in_flight[1] == 3
    assert found.windows == found.joined
    assert found.tokens == 30
    assert found.transit == pytest.approx(
        {
            "wire to stage 0": 0.0,
            "queue at stage 0": (1 + 2) * TICK / 30,  # B and C, which went out with A
            "compute at stage 0": TICK,
            "wire to stage 1": TICK,
            "queue at stage 1": 0.0,
            "compute at stage 1": TICK,
            "wire back": TICK,
        },
        abs=1e-6,
    )
    assert found.tpot is not None
    assert found.tpot.p50 == pytest.approx((4 * (periods - 1) + 6) / 30 * TICK, abs=1e-6)
    assert found.bottleneck.startswith("Stage 0 limits: it computes 73% of the time")


async def test_golden_serial_run_waits_for_the_wire(autojump_clock: object) -> None:
    async with simulated(periodic(), 2, delay=0.1, cost=LINEAR) as sim, sim.coordinator.tracing() as trace:
        await sim.coordinator.complete(PROMPT, max_tokens=11, speculation=Speculation(mode="off"))
    found = analyse(trace)
    assert found is not None
    period, seconds = 2 * (0.1 + TICK), 9 * 2 * (0.1 + TICK) + 0.1 + 2 * TICK
    assert [work.busy for work in found.work] == pytest.approx([10 * TICK / seconds] * 2, abs=1e-6)
    assert found.concurrent[2] == 0
    assert found.overlaps == 0
    waits = {cause: share for cause, share in found.waits.items() if share > 1e-9}
    assert waits == pytest.approx({"wire": 0.2 / period, "compute": 2 * TICK / period}, abs=1e-6)
    assert found.ttft is not None
    assert found.itl is not None
    assert found.itl.p99 == pytest.approx(period, abs=1e-6)
    assert found.bottleneck == (
        "The wire limits: 92% of the time the oldest window was on it, for 200 of the 218 ms that a window takes: "
        "1.00 windows in flight that retire x 1.00 tokens each / 218 ms = 4.6 tokens/s."
    )


async def test_a_storm_of_rejects_shows_as_stale_work(autojump_clock: object) -> None:
    async with simulated(mixed, 2, delay=0.05) as sim, sim.coordinator.tracing() as trace:
        done = await sim.coordinator.complete(
            PROMPT, max_tokens=120, speculation=Speculation(depth=8, width=4)
        )
    found = analyse(trace)
    assert found is not None
    assert found.outcomes["corrected"] == done.report.divergences > 2
    assert found.outcomes["stale"] == done.report.stale_windows > 0
    for work, stage in zip(found.work, sim.stages, strict=True):
        assert work.dropped == stage.counters.windows_dropped
        assert work.windows == stage.counters.windows_run - 1  # the prompt's came before
        assert work.in_vain > 0 or not work.stale_run


async def test_many_requests(autojump_clock: object) -> None:
    async with (
        simulated(periodic(), 2, delay=0.02, lanes=16) as sim,
        sim.coordinator.tracing() as trace,
        trio.open_nursery() as nursery,
    ):
        for _ in range(150):
            nursery.start_soon(partial(sim.coordinator.complete, PROMPT, max_tokens=4))
    found = analyse(trace)
    assert found is not None
    assert found.requests == 150
    assert found.joined == found.windows
    assert found.waits["lane"] > 0.5
    assert found.between_sessions > 0
    assert sum(found.waits.values()) <= 1 + 1e-9


def test_nothing_to_analyse_is_none() -> None:
    assert analyse(Trace(stages=2)) is None


# ---- files --------------------------------------------------------------------------------------------


async def test_a_file_reads_back_and_is_a_chrome_trace(autojump_clock: object, tmp_path: Path) -> None:
    trace = await golden()
    write_trace(trace, tmp_path / "trace.json")
    again = read_trace(tmp_path / "trace.json")
    assert len(again.spans) == len(trace.spans)
    for one, other in zip(sorted(again.spans), sorted(trace.spans), strict=True):
        assert one[3:] == other[3:]
        assert one[:3] == pytest.approx(other[:3], abs=1e-9)
    assert (again.run, again.stages, again.missing, again.full) == (trace.run, 2, (), False)
    before, after = analyse(trace), analyse(again)
    assert before is not None
    assert after is not None
    assert after.bottleneck == before.bottleneck
    assert after.concurrent == pytest.approx(before.concurrent, abs=1e-9)
    document = json.loads((tmp_path / "trace.json").read_text())
    phases = Counter(event["ph"] for event in document["traceEvents"])
    assert phases["b"] == phases["e"] > 0
    assert phases["s"] == phases["f"] == 31
    for event in document["traceEvents"]:
        if event["ph"] != "M":
            assert event["ts"] >= 0
            assert event.get("dur", 0) >= 0
            assert isinstance(event["pid"], int)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "3", '{"otherData": {"meshpipe": 2}}', '{"otherData": {"meshpipe": 1}}']
)
def test_what_is_no_trace_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UsageError, match=r"x\.json"):
        read_trace(tmp_path / "x.json")
    with pytest.raises(UsageError, match="cannot read"):
        read_trace(tmp_path / "nowhere.json")


# ---- pictures -----------------------------------------------------------------------------------------


async def storm() -> Trace:
    """Two sessions whose guesses are often wrong, with speculation that does not mind."""
    ask = {"max_tokens": 100, "speculation": Speculation(depth=6, width=3)}
    async with (
        simulated(mixed, 3, delay=0.03) as sim,
        sim.coordinator.tracing() as trace,
        trio.open_nursery() as nursery,
    ):
        for _ in range(2):
            nursery.start_soon(partial(sim.coordinator.complete, PROMPT, **ask))
    return trace


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")
async def test_the_report_in_a_browser(autojump_clock: object, tmp_path: Path) -> None:
    """Bars are there, hovering tells, the wheel zooms and a double click shows all again; no script error."""
    trace = await storm()
    write_html(trace, tmp_path / "report.html")
    found = analyse(trace)
    assert found is not None
    computed = sum(stay.end != "dropped" for flight in flights(trace) for stay in flight.stays.values())
    with browser(tmp_path / "profile") as page:
        page.open((tmp_path / "report.html").as_uri())
        page.settled()
        state = "({...document.getElementById('timeline').dataset})"
        assert page.value(state)["bars"] == str(computed)
        assert page.value("document.querySelector('.limit').textContent") == found.bottleneck
        colours = page.value(
            "(() => { const c = document.getElementById('timeline'), seen = new Set();"
            " const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
            " for (let i = 0; i < d.length; i += 4) seen.add([d[i], d[i + 1], d[i + 2]].join());"
            " return [...seen] })()"
        )
        for colour in ("0,158,115", "230,159,0", "213,94,0"):  # accepted, corrected, stale
            assert colour in colours
        left, top, pointed = page.value(
            "(() => { const canvas = document.getElementById('timeline'); canvas.scrollIntoView();"
            " const box = canvas.getBoundingClientRect();"
            " const bar = bars.find((bar) => flights[bar.index].outcome === 'corrected');"
            " const [y, high] = slice(flights[bar.index], bar);"
            " return [box.left + x((bar.began + bar.ended) / 2), box.top + y + high / 2, bar.index] })()"
        )
        page.mouse("mouseMoved", left, top)
        assert page.value(state)["hovered"] == str(pointed)
        told = page.value("document.getElementById('tip').textContent")
        assert "corrected" in told
        assert "stage 2" in told
        assert page.value("document.getElementById('tip').hidden") is False
        page.mouse("mouseWheel", left, top, deltaX=0, deltaY=-900)
        near = page.value(state)
        assert float(near["to"]) - float(near["from"]) < 0.4 * trace.spans[-1].ended
        assert int(near["bars"]) < computed
        for count in (1, 2):
            for kind in ("mousePressed", "mouseReleased"):
                page.mouse(kind, left, top, button="left", clickCount=count)
        assert page.value(state)["bars"] == str(computed)
        assert page.errors == []


async def test_the_report_needs_nothing_else(autojump_clock: object) -> None:
    page = render(await golden())
    assert "http" not in page.replace("http-equiv", "")
    assert "__" not in page.split("<script>")[0]
    data = json.loads(page.split('type="application/json">')[1].split("</script>")[0])
    assert len(data["flights"]) == 31
    with pytest.raises(UsageError, match="nothing to show"):
        render(Trace(stages=2))


@pytest.mark.slow
async def test_a_picture(autojump_clock: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)  # matplotlib's list of fonts takes long to make
    trace = await storm()
    write_plot(trace, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="cannot write"):
        write_plot(trace, tmp_path / "nowhere" / "run.png")


# ---- the command --------------------------------------------------------------------------------------


async def test_the_command_tells_what_limits(
    autojump_clock: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(await golden(), tmp_path / "run.json")
    assert main(["trace", str(tmp_path / "run.json"), "--html", str(tmp_path / "run.html")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Stage 0 limits")
    assert "31 windows, 31 of them known at every stage: 30 accepted, 1 prefill" in said
    assert (tmp_path / "run.html").read_text().startswith("<!doctype html>")
    assert main(["trace", str(tmp_path / "run.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["overlaps"] == 19
    (tmp_path / "none.json").write_text("{}")
    assert main(["trace", str(tmp_path / "none.json")]) == 2
    assert "make one with --trace" in capsys.readouterr().err


# ---- metrics and spans for others ----------------------------------------------------------------------


async def test_prometheus_reads_the_histograms(autojump_clock: object) -> None:
    registry = prometheus_client.CollectorRegistry()
    async with simulated(periodic(), 2, delay=0.1, cost=LINEAR) as sim:
        sim.coordinator.observers.append(Histograms(registry))
        for _ in range(2):
            done = await sim.coordinator.complete(PROMPT, max_tokens=11, speculation=Speculation(mode="off"))
    text = prometheus_client.generate_latest(registry).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = {
        (sample.name, sample.labels.get("stage", ""), sample.labels.get("le", "")): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert sum(family.type == "histogram" for family in families.values()) == 8
    assert samples["meshpipe_time_to_first_token_seconds_count", "", ""] == 2
    assert samples["meshpipe_window_seconds_count", "", ""] == 2 * done.report.windows
    assert samples["meshpipe_stage_compute_seconds_count", "1", ""] == 2 * done.report.windows
    assert samples["meshpipe_stage_compute_seconds_bucket", "0", "0.01"] == 21  # all but the first prompt's
    assert samples["meshpipe_window_network_seconds_sum", "", ""] == pytest.approx(2 * 11 * 0.2)
    assert samples["meshpipe_time_per_output_token_seconds_bucket", "", "0.25"] == 2


async def test_the_dashboard_asks_for_metrics_that_the_server_has(autojump_clock: object) -> None:
    async with simulated(periodic()) as sim:
        metrics = Metrics(sim.coordinator)
        await sim.coordinator.complete(PROMPT, max_tokens=11)
        metrics.answered([])
    known = set()
    for family in metrics.registry.collect():
        parts = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}.get(family.type, ("",))
        known |= {family.name + part for part in parts}
    dashboard = json.loads((Path(__file__).parent.parent / "examples" / "grafana.json").read_text())
    for panel in dashboard["panels"]:
        asked = re.findall(r"meshpipe_\w+", json.dumps(panel["targets"]))
        assert asked
        assert set(asked) <= known, panel["title"]
    samples = {
        sample.name: sample.value for family in metrics.registry.collect() for sample in family.samples
    }
    assert samples["meshpipe_time_to_first_token_seconds_count"] == 1


async def test_opentelemetry_spans_and_metrics(autojump_clock: object) -> None:
    reader = InMemoryMetricReader()
    exporter = InMemorySpanExporter()
    async with simulated(periodic(), 2, delay=0.1, cost=LINEAR) as sim:
        sim.coordinator.observers.append(OtelMetrics(MeterProvider([reader]).get_meter("meshpipe")))
        async with sim.coordinator.tracing() as trace:
            await sim.coordinator.complete(PROMPT, max_tokens=11, speculation=Speculation(mode="off"))
    export(trace, exporter)
    made = exporter.get_finished_spans()
    names = Counter(span.name for span in made)
    assert names == {
        "meshpipe.request": 1, "meshpipe.session": 1, "meshpipe.window": 11, "meshpipe.wire": 33,
        "meshpipe.queue": 22, "meshpipe.compute": 22,
    }  # fmt: skip
    (session,) = (span.attributes for span in made if span.name == "meshpipe.session")
    assert (session["meshpipe.tokens"], session["meshpipe.prompt_tokens"]) == (11, len(PROMPT))
    by_id = {span.context.span_id: span for span in made}
    for span in made:
        if span.name == "meshpipe.compute":
            window = by_id[span.parent.span_id]
            assert window.name == "meshpipe.window"
            assert window.start_time <= span.start_time <= span.end_time <= window.end_time
            assert span.attributes["meshpipe.stage"] in (0, 1)
    decodes = [s.end_time - s.start_time for s in made if s.name == "meshpipe.compute"]
    assert sorted(decodes)[:20] == pytest.approx([TICK * 1e9] * 20, abs=1e3)
    data = reader.get_metrics_data()
    metrics = {metric.name: metric for metric in data.resource_metrics[0].scope_metrics[0].metrics}
    assert metrics["meshpipe.tokens"].data.data_points[0].value == 11
    assert metrics["meshpipe.request.ttft"].data.data_points[0].count == 1
    assert {
        point.attributes["meshpipe.stage"] for point in metrics["meshpipe.stage.compute"].data.data_points
    } == {0, 1}


@pytest.mark.slow
async def test_spans_reach_a_collector(autojump_clock: object, tmp_path: Path) -> None:
    """Over HTTP, as the protocol's own parser reads them; a collector that refuses is an error in one line."""
    write_trace(await golden(), tmp_path / "run.json")
    received: list[ExportTraceServiceRequest] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
            assert main(["trace", str(tmp_path / "run.json"), "--otlp", url]) == 0
            spans = [
                span.name
                for request in received
                for resource in request.resource_spans
                for scope in resource.scope_spans
                for span in scope.spans
            ]
            assert Counter(spans)["meshpipe.compute"] == 62
            assert main(["trace", str(tmp_path / "run.json"), "--otlp", url + "/no"]) == 2
        finally:
            server.shutdown()
            serving.join()


async def test_the_live_view_moves(autojump_clock: object) -> None:
    """Windows are drawn on their way, and gone from it at the end; what it says adds up."""
    seen: list[str] = []
    async with simulated(mixed, 2, delay=0.05) as sim:
        view = LiveView(2, trio.current_time)
        sim.coordinator.observers.append(view)
        async with (
            sim.coordinator.tracing(view.note),
            sim.coordinator.generate(PROMPT, max_tokens=120) as generation,
        ):
            async for _ in generation:
                seen.append(view.text(100))
                assert all(len(line) <= 100 for line in seen[-1].split("\n"))
        assert generation.report is not None
    moving = [text.split("\n") for text in seen]
    assert {line[1].count("stage") for line in moving[2:]} == {2}
    assert any("●" in line[2] for line in moving)
    assert len({line[2] for line in moving}) > 10
    head = view.text(200).split("\n")[0]
    assert ", 0 windows in flight" in head
    assert f", {generation.report.stale_windows} stale, 120 tokens" in head


# ---- processes ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3])
async def test_processes_join_every_window_on_every_stage(stages: int, smollm2: Path, tmp_path: Path) -> None:
    """Each process has a clock of its own (trio's begins anywhere); 20 ms between them."""
    text = "Count: 1 2 3 4 5 6 7 8 9 10 1 2 3 4 5 6 7 8 9 10 1 2 3 4 5 6 7"
    async with Pipeline.spawn(
        smollm2, stages, lanes=2, context=512, conditions=Conditions(delay=0.02)
    ) as pipeline:
        async with pipeline.tracing() as trace, trio.open_nursery() as nursery:
            options = {"max_tokens": 24, "ignore_end": True, "speculation": Speculation(depth=4, width=2)}
            nursery.start_soon(partial(pipeline.complete, text, **options))
            surprising = (
                "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n"
            )
            nursery.start_soon(partial(pipeline.complete, surprising, **options))
        async with pipeline.tracing() as second:
            done = await pipeline.complete(text, max_tokens=5)
    assert trace.missing == ()
    assert trace.give_or_take < 1.0
    followed = flights(trace)
    assert sum(flight.tokens for flight in followed) >= 48
    assert [flight for flight in followed if flight.unseen(stages)] == []
    assert {flight.outcome for flight in followed} >= {Outcome.PREFILL, Outcome.ACCEPTED, Outcome.CORRECTED}
    retired = [flight for flight in followed if flight.outcome in (Outcome.ACCEPTED, Outcome.CORRECTED)]
    for flight in retired:
        assert sorted(flight.stays) == list(range(stages))
        assert sorted(flight.written) == sorted(flight.serialized) == list(range(-1, stages))
        for piece, began, ended in flight.legs(stages):
            assert ended - began >= -trace.give_or_take, (piece, flight)
    found = analyse(trace)
    assert found is not None
    assert found.joined == found.windows == len(followed)
    assert found.between_windows == found.overlaps
    for name, took in found.transit.items():
        assert took > 0.015 or not (name.startswith("wire") and name != "wire to stage 0"), name
    assert sum(flight.tokens for flight in flights(second)) == done.report.completion_tokens
    assert {flight.session for flight in flights(second)}.isdisjoint(flight.session for flight in followed)


async def test_a_stage_that_sends_no_spans_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two stages the second is silent; what the first has comes, in pieces, on the coordinator's clock."""
    monkeypatch.setattr(tracing, "PATIENCE", 0.05)
    monkeypatch.setattr(tracing, "PIECE", 4)
    sink = ReturnSink()
    ahead = 1000.0

    @define
    class First:
        beats: list[tuple[float, float, float]] = field(factory=lambda: [(1.0, 1.5 + ahead, 2.0)])

        @property
        def ref(self) -> First:
            return self

        async def send(self, message: object) -> None:
            assert isinstance(message, Record)
            up = SimpleNamespace(send=sink.send)
            await tracing.send_spans(message, 0, recorder, up, None)  # type: ignore[arg-type]

    recorder = Recorder()
    tracer = tracing.RemoteTracer(Recorder(), 2, lambda: First(), sink)  # type: ignore[arg-type,return-value]
    await tracer.start()
    now = trio.current_time()
    tracer.recorder.add(Span(Kind.DISPATCH, now, now, session=1, value=1))
    for at in range(10):
        recorder.add(Span(Kind.QUEUE, now + ahead + at, now + ahead + at, 0, 1, 0, at, 1))
    trace = Trace(stages=2)
    await tracer.stop(trace)
    assert trace.missing == (1,)
    assert [round(span.began, 6) for span in trace.spans] == [0.0, *map(float, range(10))]
    assert trace.give_or_take == 0.5
    assert not recorder.on
    assert not tracer.recorder.on


async def test_spans_nobody_asked_for_are_not_kept() -> None:
    sink = ReturnSink()
    tracer = tracing.RemoteTracer(Recorder(), 1, lambda: None, sink)  # type: ignore[arg-type,return-value]
    for _ in range(tracing.CAPACITY // tracing.PIECE + 10):
        await sink.send(Spans(0, pack_spans([Span(0, 0.0, 0.0)] * tracing.PIECE), last=False))
    await sink.send(Spans(7, b""))
    kept = tracer._heard.get(0, [])
    assert sum(len(piece.data) for piece in kept) <= tracing.CAPACITY * SPAN_BYTES
    assert 7 not in tracer._heard


def test_work_in_vain_counts_a_broken_off_decode_once() -> None:
    """Two windows of 1 and 3 rows shared a decode of 40 ms that was broken off; a right one took 60 ms before."""
    trace = Trace(stages=1)
    spans = [
        *(
            Span(Kind.DISPATCH, 0.0, 0.0, session=1, window=at, value=rows)
            for at, rows in enumerate((2, 1, 3))
        ),
        Span(Kind.COMPUTE, 0.0, 0.06, 0, 1, 0, 0, 2, 2),
        *(Span(Kind.ABORT, 0.06, 0.10, 0, 1, 0, at, 4, rows) for at, rows in ((1, 1), (2, 3))),
        Span(Kind.COMMIT, 0.08, 0.08, session=1, window=0, value=2, detail=1),
    ]
    trace.join([Track(spans, False, Offset())], ())
    found = analyse(trace)
    assert found is not None
    (work,) = found.work
    assert (work.decodes, work.aborted, work.stale_run, work.dropped) == (2, 2, 0, 0)
    assert work.in_vain == pytest.approx(0.04)
    assert work.busy == pytest.approx(1.0)
    assert found.outcomes["stale"] == 2
    assert "(40% of that in vain)" in found.bottleneck


def test_every_name_is_in_the_documented_table() -> None:
    page = (Path(__file__).parent.parent / "docs" / "telemetry.md").read_text()
    for name in NAMES:
        cells = (f"`{name.name}`", name.where, name.meaning, name.value, name.detail)
        assert f"| {' | '.join(cells)} |" in page
    assert [name.kind for name in NAMES] == list(Kind)
