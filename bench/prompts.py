"""Prompts whose answers are known in kind: draftable, novel, and a mix of both.

*draftable*: the model goes on copying what stands before, at least 1,024 tokens of it, so that the n-gram
proposer is right all the time. *novel*: sampled at temperature 0.8 with a fixed seed, since a small model
repeats itself when it is greedy; nothing in it can be foretold from the text before.
"""

from __future__ import annotations

from bench.measure import Task
from bench.texts import PASSAGES, QUESTIONS
from meshpipe.llama.vocabulary import Vocabulary

DRAFTABLE = (
    """| city | country | river |
|---|---|---|
| Vienna | Austria | Danube |
| Paris | France | Seine |
| Rome | Italy | Tiber |
"""
    * 2
)
LONGEST = 1024


def draftable(vocabulary: Vocabulary, count: int = LONGEST) -> Task:
    """A table twice, of which the model writes copy after copy."""
    return Task("draftable", vocabulary.tokenize(DRAFTABLE), count)


def novel(vocabulary: Vocabulary, count: int, question: int = 0) -> Task:
    """An open question."""
    return Task("novel", chat(vocabulary, QUESTIONS[question % len(QUESTIONS)]), count, temperature=0.8)


def mixed(vocabulary: Vocabulary, number: int, count: int) -> Task:
    """Every fourth one draftable, one greedy (it soon repeats itself), two sampled."""
    if number % 4 == 0:
        passage = list(PASSAGES.values())[number // 4 % len(PASSAGES)]
        return Task("mixed", vocabulary.tokenize(passage * 2), count)
    question = chat(vocabulary, QUESTIONS[number % len(QUESTIONS)])
    return Task("mixed", question, count, temperature=0.0 if number % 4 == 1 else 0.8, seed=number)


def chat(vocabulary: Vocabulary, instruction: str) -> tuple[int, ...]:
    """A conversation's first turn."""
    messages = [{"role": "user", "content": instruction}]
    return vocabulary.tokenize(vocabulary.render_chat(messages), start=False)
