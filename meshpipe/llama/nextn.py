"""A model's own NextN block away from its trunk: drafts on rows that the last stage sends.

The trunk's hidden row of every confirmed position comes to the coordinator with the replies; from the last of them on
the block runs on its own rows (`meshpipe.llama.mtp`). It needs the embedding, its own layers and the head, which
`slice_nextn` writes into a file. Drafts are greedy in any case. Exactness does not concern it; a wrong guess costs time
and nothing else.

Loading and drafting block; `meshpipe.pipeline.proposer` does both in a thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from meshpipe.errors import ModelError
from meshpipe.llama import architectures
from meshpipe.llama.draft import Drafted, DraftEngine
from meshpipe.llama.gguf import read_header
from meshpipe.llama.mtp import load_mtp
from meshpipe.llama.slicing import read_slice, slice_nextn
from meshpipe.messages import Rows
from meshpipe.speculation.run_ahead import DraftJob


class NextnModel(DraftEngine):
    """The NextN block of the model at `path`, with a lane for each of the pipeline's.

    `path` is the model, the slice of its last stage, or a file of the block alone. `lanes` sequences of up to
    `context` tokens each. Raises ModelError if it has no block, or is another model's than `digest` says, and
    CapacityError.
    """

    def __init__(self, path: str | Path, digest: str, *, lanes: int, context: int, threads: int = 1) -> None:
        given = read_slice(path)
        if given.model_digest != digest:
            raise ModelError(
                f"{path} is of another model than the stages run (digest {given.model_digest[:16]}…, theirs is "
                f"{digest[:16]}…): its NextN layers cannot draft for them"
            )
        self.context = self.catch_up = context  # told tokens cost nothing, only the rows that come for them
        self._mtp = load_mtp(slice_nextn(path), lanes=lanes, context=context, threads=threads)

    def trim(self, lane: int, position: int) -> None:
        """Forgets the rows from `position` on."""
        self._mtp.trim(lane, position)

    def keep(self, lane: int, start: int, rows: Rows) -> None:
        """Has them fed when a job wants them."""
        self._mtp.keep(lane, start, rows)

    def run(self, jobs: Sequence[DraftJob], seconds: float) -> list[Drafted]:
        """Drafts for about `seconds` each, on the rows that have come.

        Raises EngineError if llama.cpp fails.
        """
        return [self._run(job, seconds) for job in jobs]

    def _run(self, job: DraftJob, seconds: float) -> Drafted:
        line = job.line[: job.stop]
        if not self._mtp.can_draft(job.lane, len(line)):
            return Drafted(waits=True)
        until = time.perf_counter() + seconds
        drafts = self._mtp.draft(job.lane, line, job.most, until=until)
        return Drafted(tuple(token for token, _ in drafts), tuple(sure for _, sure in drafts))

    def close(self) -> None:
        """Frees the block; safe to call twice."""
        self._mtp.close()


def has_nextn(path: str | Path) -> bool:
    """Whether the file at `path` holds NextN layers with which the coordinator could draft. Raises ModelError."""
    header = read_header(path)
    return architectures.draft_heads(header) > 0 and architectures.gives_hidden_rows(header.architecture)
