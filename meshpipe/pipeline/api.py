"""The three ways to a pipeline."""

from __future__ import annotations

from meshpipe.pipeline.local import open_local
from meshpipe.pipeline.remote import open_remote, open_spawned


class Pipeline:
    """Three ways to a `Coordinator`, each an async context manager.

    `local`: all stages in this process. `spawn`: a child process for each stage. `connect`: stages that are
    running already.
    """

    local = staticmethod(open_local)
    spawn = staticmethod(open_spawned)
    connect = staticmethod(open_remote)
