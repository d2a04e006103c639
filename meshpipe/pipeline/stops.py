"""Stop strings, found in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from meshpipe.errors import UsageError


class StopStrings:
    """Lets text through up to the first stop string, and holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            raise UsageError(f"stop is {stops!r}: give a list of texts, [{stops!r}]")
        if any(not stop for stop in stops):
            raise UsageError("a stop string is empty: leave it out")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """The text that is certain now; after a stop string nothing more (`stopped` is then true)."""
        if self.stopped:
            return ""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            out, self._held = self._held[: min(found)], ""
            return out
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        out, self._held = self._held, ""
        return out

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if stop.startswith(self._held[-n:])), 0)
