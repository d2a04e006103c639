"""`meshpipe stage`, whose decodes hang from SIGUSR1 on; the process does not wait as long as usual to end itself."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from meshpipe.cli import main
from meshpipe.llama.decodes import Span
from meshpipe.llama.engine import StageEngine
from meshpipe.pipeline import watchdog

hanging = threading.Event()
compute = StageEngine.run


def run(self: StageEngine, spans: Sequence[Span], **options: Any) -> list[Any]:
    if hanging.is_set():
        threading.Event().wait()
    return compute(self, spans, **options)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda *_: hanging.set())
    StageEngine.run = run  # type: ignore[method-assign]
    watchdog.HOPELESS = 1.5  # type: ignore[assignment]
    sys.exit(main(sys.argv[1:]))
