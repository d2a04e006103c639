"""In the way of a notebook: each cell (`# %%`) is run by itself, nothing is async, the pipeline stays open.

    python examples/notebook.py [MODEL.gguf]

or open it in an editor that knows cells. Interrupting a cell ends its request and leaves the pipeline open.
"""

# %% Open a pipeline
import sys

from meshpipe import Sampling, Speculation
from meshpipe.blocking import Pipeline
from meshpipe.cli.demo import demo_model

model = sys.argv[1] if sys.argv[1:] else demo_model()
try:
    pipeline = Pipeline.local(model, split=2, lanes=2, context=1024).open()
except Exception as error:
    sys.exit(str(error))

# %% Watch text come
with pipeline.generate("The three primary colours are", max_tokens=30) as generation:
    for piece in generation:
        print(piece.text, end="", flush=True)
print()

# %% Ask, and look at the report
done = pipeline.complete(
    messages=[{"role": "user", "content": "Name a fruit."}],
    max_tokens=30,
    sampling=Sampling(temperature=0.7, seed=3),
)
print(done.text.strip())
print(f"[{done.report.completion_tokens} tokens, first after {done.report.ttft:.2f} s]")

# %% Compare two ways to speculate
table = "Month | Days\nJanuary | 31\nFebruary | 28\nMarch | 31\nApril | 30\n\n" * 2 + "Month | Days\n"
for speculation in (Speculation(mode="off"), Speculation(depth=4, width=4)):
    report = pipeline.complete(table, max_tokens=24, speculation=speculation).report
    print(f"{speculation.mode:>5}: {report.windows} windows, acceptance {report.acceptance}")

# %% Close it
pipeline.close()
