"""Stages as children of this process: started, started again when they end, ended with the pipeline."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio

from meshpipe.actors.scope import owned_nursery, run_all
from meshpipe.errors import StageLostError
from meshpipe.llama.progress import report
from meshpipe.topology.layout import StagePlace

log = logging.getLogger("meshpipe.children")

READY_DEADLINE = 120.0
"""Seconds in which a child has to have loaded its stage."""
PAUSES = (0.1, 10.0)
"""Seconds before a child is started again: at first and at most; a child that got ready begins anew."""
GOODBYE = 3.0
"""Seconds that children have to end by themselves."""


def stage_command(layers: tuple[int, int], arguments: Sequence[str]) -> list[str]:
    """A stage on a loopback port that the kernel chooses, which ends when its standard input does."""
    return [
        sys.executable, "-m", "meshpipe", "stage", "--layers", f"{layers[0]}:{layers[1]}",
        "--listen", "127.0.0.1:0", "--json", "--exit-with-parent", *arguments,
    ]  # fmt: skip


class Children:
    """Where the children are now (`places`), and their process numbers, each by stage."""

    def __init__(
        self,
        layers: Sequence[tuple[int, int]],
        commands: Sequence[Sequence[str]],
        ready_deadline: float,
    ) -> None:
        self.places = [StagePlace("", range_) for range_ in layers]
        self.pids = [0] * len(layers)
        self._commands = commands
        self._ready_deadline = ready_deadline
        self._running: dict[int, trio.Process] = {}
        self._ready: set[int] = set()
        self._closing = False

    async def keep(
        self, index: int, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Starts the child, and starts it again whenever it has ended, until cancelled.

        Raises StageLostError if it does not get ready the first time.
        """
        pause, longest = PAUSES
        was_ready = False
        while True:
            try:
                async with owned_nursery() as nursery:
                    await self._start(index, nursery)
                    if not was_ready:
                        task_status.started()
                    was_ready, pause = True, PAUSES[0]
                    self._ready.add(index)
                    status = await self._running[index].wait()
                    self._ready.discard(index)
                    await _close_pipes(self._running[index])
                    if self._closing:
                        return
                    log.warning("stage %d has ended with status %d; starting it again", index, status)
            except StageLostError as error:
                if index in self._running:
                    await _close_pipes(self._running[index])
                if not was_ready:
                    raise
                log.warning("stage %d: %s", index, error)
            await trio.sleep(pause)
            if self._closing:
                return
            pause = min(longest, 2 * pause)

    async def _start(self, index: int, nursery: trio.Nursery) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MESHPIPE_")}
        run = partial(
            trio.run_process,
            self._commands[index],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            check=False,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the parent, whose end they notice
        )
        try:
            process: trio.Process = await nursery.start(run)
        except OSError as error:  # no memory, no process, no descriptor: for the moment, perhaps
            raise StageLostError(f"stage {index} cannot be started: {error}") from None
        self._running[index], self.pids[index] = process, process.pid
        layers = self.places[index].layers
        with trio.move_on_after(self._ready_deadline) as scope:
            ready = await _ready_line(process)
        if scope.cancelled_caught:
            raise StageLostError(f"stage {index} was not ready within {self._ready_deadline:g} s")
        self.places[index] = StagePlace(ready["address"], layers)

    def kill(self, index: int) -> None:
        """Ends a child that is ready and hangs; it is started again."""
        if index in self._ready:
            log.warning("stage %d hangs; starting it anew", index)
            self._running[index].kill()

    async def say_goodbye(self) -> None:
        """Ends their standard input, upon which they end by themselves, and waits for that a little."""
        self._closing = True
        with trio.CancelScope(shield=True), trio.move_on_after(GOODBYE):
            for child in self._running.values():
                if child.stdin is not None:
                    await child.stdin.aclose()
            for child in self._running.values():
                await child.wait()
                await _close_pipes(child)


@asynccontextmanager
async def open_children(
    layers: Sequence[tuple[int, int]], commands: Sequence[Sequence[str]], ready_deadline: float
) -> AsyncIterator[Children]:
    """A child for each stage, all ready; they are kept running inside the block and end with it."""
    children = Children(layers, commands, ready_deadline)
    async with owned_nursery() as nursery:
        try:
            count = len(children.places)
            report("stages loaded", 0, count)

            async def start(index: int) -> None:
                await nursery.start(children.keep, index)
                report("stages loaded", sum(place.address != "" for place in children.places), count)

            await run_all(partial(start, index) for index in range(count))
            yield children
        finally:
            await children.say_goodbye()


async def _close_pipes(process: trio.Process) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            await pipe.aclose()


async def _ready_line(process: trio.Process) -> dict[str, Any]:
    """The one line of JSON by which a stage says that it serves."""
    assert process.stdout is not None
    line = b""
    while not line.endswith(b"\n"):
        chunk = await process.stdout.receive_some(4096)
        if not chunk:
            status = await process.wait()
            raise StageLostError(
                f"a stage ended before it was ready (exit status {status}); its messages say why"
            )
        line += chunk
    ready: dict[str, Any] = json.loads(line)
    return ready
