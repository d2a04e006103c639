"""How often the block's drafts are accepted, measured with llama.cpp's own two contexts.

The model writes texts to prompts that were never trained on. At every token of its own, the block gets the hidden
row that confirmed the token, as it would after a verified window, and drafts three tokens, chaining its output; a draft
counts if it and those before it are what the model went on to pick. Then the block's cache is trimmed and the next
token is taken.

Of text that the model only reads (the prompts, and documentation and sources of meshpipe) the first draft after every
token is compared with the model's greedy choice there.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from bench.models.smollm2_mtp.contexts import Context, Model
from bench.models.smollm2_mtp.prompts import held_out
from bench.prompts import chat
from bench.texts import QUESTIONS
from meshpipe.llama.vocabulary import Vocabulary

DRAFTS = 3
LANES = 8
LONGEST = 512  # tokens of a prompt; longer ones are left out
TEMPLATE = 32  # tokens at the start of a prompt that are much the same in all, and not counted
READ = "read: "  # begins the kinds of what is only read


@define
class Text:
    """A prompt and what the model wrote."""

    kind: str
    tokens: list[int]
    prompt: int
    hidden: list[NDArray[np.float32]] = field(factory=list)
    choices: list[int] = field(factory=list)
    """The model's greedy choice after each of the prompt's tokens."""
    ended: bool = False


@define
class Count:
    """Anchors, and how many of them had at least 1, 2, 3 drafts accepted (as many as were drafted)."""

    anchors: int = 0
    accepted: list[int] = field(factory=lambda: [0] * DRAFTS)

    def add(self, drafts: Sequence[int], picked: Sequence[int]) -> None:
        """Counts one anchor's drafts against what the model picked."""
        self.anchors += 1
        for depth in range(len(drafts)):
            if drafts[: depth + 1] == picked[: depth + 1]:
                self.accepted[depth] += 1

    def __str__(self) -> str:
        shares = []
        before = self.anchors
        for accepted in self.accepted:
            shares.append(f"{accepted / before:6.1%}" if before else "     -")
            before = accepted
        shares += ["     -"] * (DRAFTS - len(shares))
        return f"{' '.join(shares)}   {sum(self.accepted) / max(self.anchors, 1):5.2f} {self.anchors:7}"


def evaluate(
    path: Path, count: int, each: int, threads: int = 2, kinds: Collection[str] | None = None
) -> dict[str, Count]:
    """Acceptance by kind of text: the `workloads` prompts, answered greedily, open questions, sampled, and files, read.

    The model writes `count` tokens to each of the first `each` prompts of a kind; `kinds` are all by default.
    """
    vocabulary = Vocabulary(path)
    here = Path(__file__).parents[3]
    prompts: list[tuple[str, tuple[int, ...], float | None]] = [
        (kind, chat(vocabulary, text), 0.0) for kind, text in held_out()
    ]
    prompts += [("sampled at 0.8", chat(vocabulary, question), 0.8) for question in QUESTIONS]
    for kind, files in (("prose", here.glob("docs/*.md")), ("code", here.glob("meshpipe/*/*.py"))):
        tokens = (tuple(vocabulary.tokenize(file.read_text("utf-8"))[:LONGEST]) for file in sorted(files))
        prompts += [(READ + kind, some, None) for some in tokens]
    found: dict[str, list[tuple[str, tuple[int, ...], float | None]]] = {}
    for prompt in prompts:
        if len(prompt[1]) <= LONGEST and (kinds is None or prompt[0] in kinds):
            found.setdefault(prompt[0], []).append(prompt)
    prompts = sorted((p for some in found.values() for p in some[:each]), key=lambda p: len(p[1]))
    room = max(len(tokens) for _, tokens, _ in prompts) + count + DRAFTS
    counts: dict[str, Count] = {}
    model = Model(path)
    with (
        Context(model, context=room, lanes=LANES, threads=threads) as target,
        Context(model, context=room, lanes=LANES, threads=threads, mtp=True) as mtp,
    ):
        for start in range(0, len(prompts), LANES):
            some = prompts[start : start + LANES]
            texts = [Text(kind, list(tokens), len(tokens)) for kind, tokens, _ in some]
            _write(target, texts, [t for _, _, t in some], count, vocabulary.end_tokens)
            _draft(mtp, texts, counts)
            for lane in range(len(texts)):
                target.trim(lane, 0)
                mtp.trim(lane, 0)
    model.close()
    return counts


def _write(
    target: Context, texts: list[Text], temperatures: list[float | None], count: int, ends: frozenset[int]
) -> None:
    """Lets the model go on with each text that has a temperature."""
    draw = random.Random(1)
    for lane, text in enumerate(texts):
        for start in range(0, text.prompt, target.batch):
            stop = min(start + target.batch, text.prompt)
            where = np.arange(start, stop)
            logits, hidden = target.run(text.tokens[start:stop], where, np.full(len(where), lane))
            text.hidden += list(hidden.copy())
            text.choices += logits.argmax(axis=1).tolist()
        temperature = temperatures[lane]
        text.ended = temperature is None
        if temperature is not None:
            text.tokens.append(_pick(logits[-1], temperature, draw))
    for _ in range(count):
        lanes = [lane for lane, text in enumerate(texts) if not text.ended]
        if not lanes:
            break
        tokens = [texts[lane].tokens[-1] for lane in lanes]
        logits, hidden = target.run(tokens, [len(texts[lane].tokens) - 1 for lane in lanes], lanes)
        for row, lane in enumerate(lanes):
            text = texts[lane]
            text.hidden.append(hidden[row].copy())
            text.tokens.append(_pick(logits[row], temperatures[lane] or 0.0, draw))
            text.ended = text.tokens[-1] in ends


def _pick(logits: NDArray[np.float32], temperature: float, draw: random.Random) -> int:
    if not temperature:
        return int(logits.argmax())
    weights = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    return draw.choices(range(len(weights)), weights.tolist())[0]


def _draft(mtp: Context, texts: list[Text], counts: dict[str, Count]) -> None:
    """Drafts at every token that the model wrote, in all lanes at once."""
    for lane, text in enumerate(texts):
        for start in range(1, text.prompt, mtp.batch):
            stop = min(start + mtp.batch, text.prompt)
            where = np.arange(start, stop)
            before = np.array(text.hidden[start - 1 : stop - 1])
            logits, _ = mtp.run(text.tokens[start:stop], where, np.full(len(where), lane), before)
            read = text.kind if text.kind.startswith(READ) else f"{READ}prompts"
            for at, draft in zip(where.tolist(), logits.argmax(axis=1).tolist(), strict=True):
                if at >= TEMPLATE:
                    counts.setdefault(read, Count(accepted=[0])).add([draft], text.choices[at : at + 1])
    for step in range(max(len(text.tokens) - text.prompt for text in texts)):
        anchors = {lane: text.prompt + step for lane, text in enumerate(texts)}
        # The last tokens have no complete continuation to compare with.
        lanes = [lane for lane, at in anchors.items() if at + DRAFTS < len(texts[lane].tokens)]
        if not lanes:
            break
        tokens = [texts[lane].tokens[anchors[lane]] for lane in lanes]
        rows = np.array([texts[lane].hidden[anchors[lane] - 1] for lane in lanes])
        drafts: list[list[int]] = [[] for _ in lanes]
        for depth in range(DRAFTS):
            logits, out = mtp.run(tokens, [anchors[lane] + depth for lane in lanes], lanes, rows)
            tokens, rows = logits.argmax(axis=1).tolist(), out.copy()
            for row, token in enumerate(tokens):
                drafts[row].append(token)
        for row, lane in enumerate(lanes):
            text, at = texts[lane], anchors[lane]
            mtp.trim(lane, at + 1)
            counts.setdefault(text.kind, Count()).add(drafts[row], text.tokens[at + 1 : at + 1 + DRAFTS])


def table(counts: dict[str, Count]) -> str:
    """Share accepted at chain positions 1, 2, 3, each of those accepted before; accepted per anchor; anchors."""
    greedy = Count()
    for kind, count in counts.items():
        if not kind.startswith(("sampled", READ)):
            greedy.anchors += count.anchors
            greedy.accepted = [a + b for a, b in zip(greedy.accepted, count.accepted, strict=True)]
    lines = {**dict(sorted(counts.items())), "all greedy": greedy}
    head = f"{'':18}     1      2      3     mean anchors"
    return "\n".join([head, *(f"{kind:18} {count}" for kind, count in lines.items())])
