"""SmolLM2 with a NextN block of our own, so that multi-token prediction can be shown on a real model.

`assemble()` gives the GGUF file; `python -m bench.models.smollm2_mtp --help` says how the block was trained.
"""

from bench.models.smollm2_mtp.assemble import assemble

__all__ = ["assemble"]
