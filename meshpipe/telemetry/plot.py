"""The timeline as a picture for documents (PNG, SVG or PDF, by the file's name). Needs matplotlib."""

from __future__ import annotations

import io
from pathlib import Path

from meshpipe.errors import UsageError
from meshpipe.files import write_whole

from .overlap import analyse
from .trace import Trace, flights

COLOURS = {
    "accepted": "#009e73", "corrected": "#e69f00", "stale": "#d55e00", "prefill": "#56a5e9", "unfinished": "#98a0aa",
}  # fmt: skip


def write_plot(trace: Trace, path: str | Path, within: tuple[float, float] | None = None) -> None:
    """Draws stages as rows and windows as bars, with lines where they are on the wire, and saves that.

    `within`: the seconds to show; all by default. Raises UsageError without matplotlib, for an empty trace, and
    if the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.collections import LineCollection
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise UsageError("pictures need matplotlib: pip install 'meshpipe[telemetry]'") from None
    found = analyse(trace)
    if found is None:
        raise UsageError("the trace has no verify window: there is nothing to show")
    followed = flights(trace)
    bottom = trace.stages + 1  # rows: 0 sent, then the stages, then replies
    figure = Figure(figsize=(11, 1.6 + 0.9 * bottom))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    wires: dict[str, list[list[tuple[float, float]]]] = {}
    for flight in followed:
        colour = COLOURS[flight.outcome.value]
        at = (flight.sent, 0.2)
        for stage, stay in sorted(flight.stays.items()):
            wires.setdefault(colour, []).append([at, (stay.came, stage + 0.7)])
            if stay.end != "dropped":
                bars.setdefault((stage, colour), []).append((stay.began, stay.ended - stay.began))
            at = (stay.ended, stage + 1.3)
        if flight.replied is not None:
            wires.setdefault(colour, []).append([at, (flight.replied, bottom - 0.2)])
    for (stage, colour), spans in bars.items():
        axes.broken_barh(spans, (stage + 0.7, 0.6), facecolor=colour, edgecolor="white", linewidth=0.4)
    for colour, lines in wires.items():
        axes.add_collection(LineCollection(lines, colors=colour, linewidths=0.7, alpha=0.6))
    axes.set_xlim(within or (followed[0].sent, max(f.ended or f.sent for f in followed)))
    axes.set_ylim(bottom + 0.2, -0.2)
    names = [f"stage {stage}\n{work.busy:.0%} busy" for stage, work in enumerate(found.work)]
    axes.set_yticks(range(bottom + 1), ["sent", *names, "reply"])
    axes.set_xlabel("seconds")
    axes.set_title(
        f"{found.tokens_per_second:.1f} tokens/s, two or more stages computing {found.at_least(2):.0%} of the time"
    )
    seen = {flight.outcome.value for flight in followed}
    axes.legend(
        handles=[Patch(color=colour, label=name) for name, colour in COLOURS.items() if name in seen],
        loc="upper right", fontsize=8, ncols=len(seen),
    )  # fmt: skip
    figure.tight_layout()
    try:
        drawn = io.BytesIO()
        figure.savefig(drawn, format=Path(path).suffix.removeprefix(".") or "png", dpi=140)
        write_whole(path, drawn.getvalue())
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write the picture to {path}: {error}") from None
