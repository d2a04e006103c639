"""`meshpipe trace`: what a recorded trace says, in words, as a page, as a picture."""

from __future__ import annotations

import argparse
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from meshpipe.cli.arguments import Commands, command
from meshpipe.errors import UsageError
from meshpipe.pipeline.coordinator import Coordinator
from meshpipe.portal import Opener
from meshpipe.telemetry.html import write_html
from meshpipe.telemetry.live import LiveView
from meshpipe.telemetry.overlap import analyse
from meshpipe.telemetry.perfetto import read_trace, write_trace
from meshpipe.telemetry.plot import write_plot
from meshpipe.telemetry.summary import summary


def add_commands(commands: Commands) -> None:
    """Adds `trace`."""
    parser = command(
        commands,
        "trace",
        "Analyse a trace that --trace has recorded.",
        "meshpipe trace run.json",
        "meshpipe trace run.json --html run.html --png run.png",
        "meshpipe trace run.json --json > run-analysis.json",
    )
    parser.add_argument("file", metavar="FILE", help="the trace; ui.perfetto.dev opens it too")
    parser.add_argument("--html", metavar="FILE", help="write a report with a timeline to zoom and hover")
    parser.add_argument("--png", metavar="FILE", help="draw the timeline (or .svg, .pdf); needs matplotlib")
    parser.add_argument(
        "--otlp",
        metavar="URL",
        help="send OpenTelemetry spans to a collector: http://127.0.0.1:4318/v1/traces",
    )
    parser.add_argument("--json", action="store_true", help="print the analysis as one JSON object")
    parser.set_defaults(run=run)


def add_trace(parser: argparse.ArgumentParser) -> None:
    """`--trace`, for commands that run a pipeline."""
    parser.add_argument(
        "--trace", metavar="FILE", help="record what every stage did when, to this file: see meshpipe trace"
    )


def recorded(open_pipeline: Opener, path: str | None, views: list[LiveView] | None = None) -> Opener:
    """The same pipeline, of which a trace is written when it is closed, however that comes about; None: it is not.

    A `LiveView` of it is put into `views`, if that is given. Raises UsageError if the trace's folder does not exist.
    """
    if path is None and views is None:
        return open_pipeline
    if path is not None and not (folder := Path(path).resolve().parent).is_dir():
        raise UsageError(f"cannot write the trace to {path}: there is no folder {folder}")  # not after hours

    @asynccontextmanager
    async def opened() -> AsyncIterator[Coordinator]:
        async with open_pipeline() as pipeline:
            trace, listener = None, None
            if views is not None:
                views.append(LiveView(len(pipeline.descriptors)))
                pipeline.observers.append(views[0])
                listener = views[0].note
            try:
                async with pipeline.tracing(listener) as trace:
                    yield pipeline
            finally:
                if trace is not None and path is not None:
                    with trio.CancelScope(shield=True):
                        await trio.to_thread.run_sync(write_trace, trace, path)

    return opened


def run(options: argparse.Namespace) -> int:
    """Prints the analysis and writes what was asked for."""
    trace = read_trace(options.file)
    found = analyse(trace)
    if found is None:
        raise UsageError(
            f"{options.file} has no verify window: nothing was generated beyond the prompt's first token"
        )
    print(json.dumps(found.to_dict()) if options.json else summary(found))
    if options.html:
        write_html(trace, options.html)
    if options.png:
        write_plot(trace, options.png)
    if options.otlp:
        try:
            from meshpipe.telemetry.otel import export_otlp
        except ImportError:
            raise UsageError("--otlp needs OpenTelemetry: pip install 'meshpipe[telemetry]'") from None
        export_otlp(trace, options.otlp)
    return 0
