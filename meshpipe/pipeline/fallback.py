"""Stages of this process's own, which serve as long as the others cannot be reached."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from attrs import frozen

from meshpipe.actors.scope import owned_nursery
from meshpipe.errors import HandshakeError, UsageError
from meshpipe.llama.options import EngineOptions
from meshpipe.llama.slicing import read_slice
from meshpipe.messages import StageDescriptor
from meshpipe.pipeline.failover import Joined
from meshpipe.pipeline.local import join_stages, load_stages
from meshpipe.pipeline.sink import ReturnSink


@frozen
class LocalFallback:
    """The whole model as this machine has it: the file `model`, and how to load it (`StageEngine`).

    Nothing is loaded before it is needed, and nothing stays loaded after.
    """

    model: str | Path
    threads: int = 1
    options: EngineOptions | None = None

    def check(self, descriptors: Sequence[StageDescriptor]) -> None:
        """Whether it is the stages' model, and whole. Raises ModelError, UsageError, HandshakeError."""
        whole = read_slice(self.model)
        if (whole.start, whole.stop) != (0, whole.layer_count):
            raise UsageError(
                f"{self.model} holds layers {whole.start}:{whole.stop} of {whole.layer_count}: a local fallback needs "
                "the whole model"
            )
        if whole.model_digest != descriptors[0].model_digest:
            raise HandshakeError(
                f"{self.model} has the digest {whole.model_digest}, the stages serve "
                f"{descriptors[0].model_digest}: name their model for the local fallback"
            )

    @asynccontextmanager
    async def joined(self, instead_of: Sequence[StageDescriptor], sink: ReturnSink) -> AsyncIterator[Joined]:
        """Loads the same layer ranges, and joins them by memory. Raises what loading raises (CapacityError, …)."""
        with ExitStack() as opened:
            runners = await load_stages(
                self.model,
                [descriptor.layers for descriptor in instead_of],
                opened,
                mtp=instead_of[-1].mtp > 0,
                lanes=min(descriptor.lanes for descriptor in instead_of),
                context=min(descriptor.context for descriptor in instead_of),
                exact=all(descriptor.exact for descriptor in instead_of),
                threads=self.threads,
                options=self.options,
            )
            async with owned_nursery() as nursery:
                first, _ = join_stages(nursery, runners, sink)
                yield Joined(first, tuple(runner.descriptor for runner in runners), 0.0)
