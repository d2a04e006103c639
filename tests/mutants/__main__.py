"""Mutation proof for the ledger: deliberate faults, each of which its fast tests must catch.

    python -m tests.mutants            all faults
    python -m tests.mutants epoch      those whose name contains a word

Each fault is one replaced piece of `meshpipe/speculation/ledger.py`, made in a copy; then the ledger's fast
tests run against the copy. Prints, for each fault, the test that caught it. Exits with 1 if one survives, and
refuses to go on if the unchanged copy fails or a piece to replace is not there exactly once.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEDGER = Path("meshpipe/speculation/ledger.py")
NEEDED = (Path("meshpipe/errors.py"), Path("meshpipe/messages.py"))
TESTS = (Path("tests/test_ledger.py"), Path("tests/test_ledger_adversary.py"))

FAULTS: dict[str, tuple[str, str]] = {
    "the correction is not committed": (
        "            self._append(token)\n            sources.append(",
        "            if draft is None or agrees:\n                self._append(token)\n            sources.append(",
    ),
    "the epoch is not raised": ("        self.epoch += 1\n", ""),
    "off by one at the boundary between windows": (
        "diverged = not agrees and position < self._sent\n",
        "diverged = not agrees and position < self._sent - 1\n",
    ),
    "an undispatched mismatch raises the epoch": (
        "diverged = not agrees and position < self._sent\n",
        "diverged = not agrees\n",
    ),
    "the walk goes on after a mismatch": (
        "            if not agrees or self.finished is not None:\n",
        "            if draft is None or self.finished is not None:\n",
    ),
    "the walk goes on after the end": (
        "            if not agrees or self.finished is not None:\n",
        "            if not agrees:\n",
    ),
    "uncommitted tokens are shown as committed": (
        "        return self._committed\n",
        "        return [*self._committed, *self.optimistic]\n",
    ),
    "a credit is returned twice": (
        "        self._due += 1\n",
        "        self._due += 2 if len(self._windows) > 1 else 1\n",
    ),
    "a duplicate returns a credit": (
        "            self.counters.duplicates += 1\n",
        "            self.counters.duplicates += 1\n            self._due = min(self._due + 1, self._next_number)\n",
    ),
    "one window more than the credits": ("self.in_flight >= self._credits", "self.in_flight > self._credits"),
    "replies retire as they come": (
        "self._held.pop(self._due, None)",
        "self._held.pop(min(self._held, default=-1), None)",
    ),
    "only one held reply retires": (
        "            commits.append(self._retire(ready))\n",
        "            commits.append(self._retire(ready))\n            break\n",
    ),
    "held replies survive a divergence": ("        self._held.clear()\n", ""),
    "windows survive a divergence": ("        self._windows.clear()\n", ""),
    "the suffix survives a divergence": (
        "            self._suffix.clear()\n        if diverged",
        "        if diverged",
    ),
    "a late reply is believed": ("        if reply.epoch < self.epoch:\n", "        if reply.epoch < 0:\n"),
    "the new epoch starts above the correction": (
        "        self._sent = self._confirmed\n",
        "        self._sent = self._confirmed + 1\n",
    ),
    "the new epoch starts where the old one had got to": (
        "        self._sent = self._confirmed\n",
        "        self._sent = min(self._sent, self.frontier - 1)\n",
    ),
    "confirmed is what was committed, run or not": (
        "        self._confirmed = self.frontier - 1\n",
        "        self._confirmed = self.frontier\n",
    ),
    "nothing is ever confirmed": ("        self._confirmed = self.frontier - 1\n", ""),
    "a reroute trusts that the prompt arrived": (
        "        self.counters.reroutes += 1\n",
        "        self.counters.reroutes += 1\n        self._confirmed = self.frontier - 1\n",
    ),
    "a resume trusts caches that are lost": (
        "        self._confirmed = cached\n",
        "        self._confirmed = max(cached, self._confirmed)\n",
    ),
    "windows overlap by one": (
        "        self._sent = stop\n",
        "        self._sent = max(stop - 1, start + 1)\n",
    ),
    "the last prefill window wants no reply": ("wanted = 1 if stop == frontier else 0", "wanted = 0"),
    "every prefill window wants a reply": ("wanted = 1 if stop == frontier else 0", "wanted = 1"),
    "a proposal that disagrees is joined on": (
        "any(self._token(position) != token for position, token in repeated)",
        "False",
    ),
    "a proposal's overlap is not cut off": (
        "proposal.tokens[known : known + max(room, 0)]",
        "proposal.tokens[: max(room, 0)]",
    ),
    "an old epoch's proposal is taken": (
        "if self.finished is not None or proposal.epoch != self.epoch:",
        "if self.finished is not None:",
    ),
    "a gap is closed up": ("if not 0 <= proposal.start <= reach:", "if not 0 <= proposal.start:"),
    "a reroute forgets what the suffix reached": (
        "        self._reach = self.horizon\n",
        "        self._reach = 0\n",
    ),
    "a divergence remembers what the suffix reached": ("        self._reach = self.horizon\n", ""),
    "proposals pass the end": ("min(self._end - 1 - self.horizon,", "min(self._end - self.horizon,"),
    "a short reply need not end in a mismatch": (
        " or reply.tokens[-1] == following[count - 1]:",
        ":",
    ),
    "a short reply may differ early": (
        "reply.tokens[:-1] != following[: count - 1] or ",
        "",
    ),
    "one row too many is let through": (
        "if not 1 <= count <= window.wanted:",
        "if not 1 <= count <= window.wanted + 1:",
    ),
    "an end token in the window ends the session": (
        "            if not agrees or self.finished is not None:\n",
        "            if set(window.tokens) & self.limits.end_tokens:\n"
        '                self.finished = "end"\n'
        "            if not agrees or self.finished is not None:\n",
    ),
    "max_tokens starts again after a resume": (
        "        elif self.generated == self.limits.max_tokens:\n",
        "        elif self._due and self.generated == self.limits.max_tokens + 1:\n",
    ),
    "stop sequences reach into the prompt": ("            and self.generated >= len(sequence)\n", ""),
    "a finished session still dispatches": (
        "        if self.finished is not None:\n            return None\n        start,",
        "        start,",
    ),
    "stale windows are not reported": (
        "            stale_windows, stale_tokens = self._raise_epoch()\n",
        "            self._raise_epoch()\n",
    ),
}


CONFTEST = """
import sys
from pathlib import Path
import meshpipe

# The changed copy comes before any installed meshpipe.
assert Path(meshpipe.__file__).parents[1] == Path(__file__).parent, meshpipe.__file__

def pytest_configure(config):
    config.addinivalue_line("markers", "slow: not run here")

def pytest_collection_finish(session):
    if hypothesis := sys.modules.get("hypothesis"):
        # A failure is enough; it need not be made small.
        hypothesis.settings.register_profile("mutants", phases=[hypothesis.Phase.generate])
        hypothesis.settings.load_profile("mutants")
"""


def run(change: tuple[str, str] | None) -> str | None:
    """Runs the ledger's fast tests on a changed copy; returns the name of the first that fails."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        (copy / LEDGER).parent.mkdir(parents=True)
        for package in ("meshpipe", "meshpipe/speculation"):
            (copy / package / "__init__.py").touch()
        for path in (LEDGER, *NEEDED, *TESTS):
            shutil.copy(ROOT / path, copy / path if path.parts[0] == "meshpipe" else copy)
        if change is not None:
            old, new = change
            source = (copy / LEDGER).read_text()
            if source.count(old) != 1:
                raise SystemExit(f"this piece is in {LEDGER} {source.count(old)} times, not once:\n{old}")
            (copy / LEDGER).write_text(source.replace(old, new))
        (copy / "conftest.py").write_text(CONFTEST)
        environment = {
            **os.environ,
            "PYTHONPATH": directory,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # none is needed but the timeout, and each costs time
        }
        # A fault that hangs a test is caught by the timeout.
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider"]
        command += ["-p", "pytest_timeout", "--timeout=60"]
        for path in TESTS:
            result = subprocess.run(
                [*command, path.name], cwd=copy, env=environment, capture_output=True, text=True, check=False
            )
            if result.returncode == 1:
                first = re.search(r"^FAILED \S+::(\w+)", result.stdout, re.MULTILINE)
                return first[1] if first else path.name
            if result.returncode:  # neither passed nor failed: the proof itself is broken
                raise SystemExit(f"pytest ended with {result.returncode}:\n{result.stdout}{result.stderr}")
        return None


def main(word: str = "") -> int:
    """Tries every fault whose name contains `word`; returns the number of those that no test caught."""
    if (broken := run(None)) is not None:
        raise SystemExit(f"the unchanged ledger fails {broken}; nothing can be shown")
    faults = {name: change for name, change in FAULTS.items() if word in name}
    survivors = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, catcher in zip(faults, pool.map(run, faults.values()), strict=True):
            print(f"SURVIVED  {name}" if catcher is None else f"caught    {name}  ({catcher})", flush=True)
            survivors += catcher is None
    print(f"{len(faults) - survivors} of {len(faults)} faults caught")
    return survivors


if __name__ == "__main__":
    sys.exit(1 if main(*sys.argv[1:]) else 0)
