"""What a caller may say about speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from attrs import field, frozen

from meshpipe.errors import UsageError
from meshpipe.speculation.ngram import NgramConfig
from meshpipe.speculation.policy import DEPTHS, WIDTHS

MODES = ("auto", "mtp", "mtp+ngram", "draft", "draft+ngram", "ngram", "off")
MTP_MAX = (1, 32)
MTP_AT = ("auto", "last", "coordinator")
MTP_TAIL = (1, 2**31 - 1)
THREADS = (1, 512)


@frozen
class Speculation:
    """How far to run ahead of the model. Changes the speed of a generation, never its tokens.

    mode: "off" sends one window at a time with nothing proposed; "ngram" proposes from the text itself; "mtp" from
        the model's own NextN layers; "draft" has a small model run ahead on the coordinator's
        machine; "mtp+ngram" and "draft+ngram" continue these by n-grams that agree with them; "auto" picks what there
        is and what pays.
    mtp_at: where the NextN layers draft: at the "last" stage, whose replies carry the drafts; or at the
        "coordinator", which runs ahead with them on hidden rows that the replies carry; "auto": at the coordinator if
        it has the layers, else at the last stage.
    mtp_max: tokens of native MTP that a reply of the last stage carries at most.
    mtp_tail: of how many of a prompt's last tokens the coordinator is sent the hidden rows.
    draft: the small model, a GGUF with the same vocabulary as the model; computes with `draft_threads`. It is loaded
        at its first use and then serves all requests that name it.
    depth: windows in flight, and width: tokens of a window, both a
    fixed number or "auto", which follows the measured costs of the stages and the links and the acceptance so
    far. `max_width` bounds an automatic width. Raises UsageError for what is out of bounds.
    """

    mode: str = "auto"
    depth: int | Literal["auto"] = "auto"
    width: int | Literal["auto"] = "auto"
    max_width: int = 16
    mtp_at: str = "auto"
    mtp_max: int = 4
    mtp_tail: int = 256
    ngram: NgramConfig = field(factory=NgramConfig)
    draft: str | Path | None = None
    draft_threads: int = 1

    def __attrs_post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(f"speculation mode is {self.mode!r}: it must be one of {', '.join(MODES)}")
        if self.mtp_at not in MTP_AT:
            raise UsageError(f"mtp_at is {self.mtp_at!r}: it must be one of {', '.join(MTP_AT)}")
        if self.uses_draft != (self.draft is not None):
            what = (
                "needs a draft model: name its file (draft)"
                if self.uses_draft
                else f"has no use for {self.draft}"
            )
            raise UsageError(f"speculation mode {self.mode!r} {what}")
        bounds = {
            "depth": DEPTHS,
            "width": WIDTHS,
            "max_width": WIDTHS,
            "mtp_max": MTP_MAX,
            "mtp_tail": MTP_TAIL,
            "draft_threads": THREADS,
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if value == "auto" and name in ("depth", "width"):
                continue
            if not isinstance(value, int) or not low <= value <= high:
                raise UsageError(f"{name} is {value!r}: it must be 'auto' or an integer from {low} to {high}")

    @property
    def uses_mtp(self) -> bool:
        """Whether native MTP may propose, if the model has it."""
        return self.needs_mtp or (self.mode == "auto" and self.draft is None)

    @property
    def needs_mtp(self) -> bool:
        """Whether the model must have native MTP."""
        return self.mode in ("mtp", "mtp+ngram")

    @property
    def uses_draft(self) -> bool:
        """Whether a draft model proposes."""
        return self.mode in ("draft", "draft+ngram") or (self.mode == "auto" and self.draft is not None)

    @property
    def uses_ngram(self) -> bool:
        """Whether the text itself may propose."""
        return self.mode in ("auto", "ngram", "mtp+ngram", "draft+ngram")
