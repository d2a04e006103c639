"""Answers: what a pipeline says of a plan, in OpenAI's shapes, whole or as a stream of events.

Each choice of an answer is one generation. `run` starts them and hands their pieces on as they come; an `Answer`
knows the shape of its endpoint.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import trio
from attrs import define, field, frozen

from meshpipe.actors.scope import owned_nursery
from meshpipe.llama.vocabulary import Vocabulary
from meshpipe.messages import TokenLogprobs
from meshpipe.pipeline.coordinator import Coordinator
from meshpipe.pipeline.report import Report
from meshpipe.pipeline.request import Piece
from meshpipe.serving.prompts import Plan, Task
from meshpipe.serving.schemas import (
    Acceptance,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    CompletionLogprobs,
    FinishReason,
    Metrics,
    TopLogprob,
    Usage,
)
from meshpipe.serving.tools import OPENING, calls_in

# ---- running ------------------------------------------------------------------------------------------


@frozen
class Failed:
    """A choice's generation came to grief."""

    error: Exception


Pieces = trio.MemoryReceiveChannel[tuple[int, Piece | Failed]]


@asynccontextmanager
async def running(pipeline: Coordinator, plan: Plan) -> AsyncIterator[Pieces]:
    """Starts all choices, and gives their pieces as they come, each with its choice's index.

    Leaving the block ends what still runs, and so frees the lanes.
    """
    send, receive = trio.open_memory_channel[tuple[int, Piece | Failed]](0)

    async def one(index: int, task: Task, to: trio.MemorySendChannel[tuple[int, Piece | Failed]]) -> None:
        with to:
            try:
                async with pipeline.generate(
                    task.prompt,
                    max_tokens=task.max_tokens,
                    sampling=task.sampling,
                    speculation=task.speculation,
                    stop=task.stop,
                    ignore_end=task.ignore_end,
                ) as generation:
                    async for piece in generation:
                        await to.send((index, piece))
            except Exception as error:
                await to.send((index, Failed(error)))

    async with owned_nursery() as nursery:
        with send:
            for index, task in enumerate(plan.tasks):
                nursery.start_soon(one, index, task, send.clone())
        yield receive


# ---- shapes -------------------------------------------------------------------------------------------


@define
class Choice:
    """What one generation has said so far; `unsent` of it is not in an event yet."""

    index: int
    text: str = ""
    unsent: str = ""
    logprobs: list[tuple[int, TokenLogprobs]] = field(factory=list)  # with the offset of the token's text
    unsent_logprobs: list[tuple[int, TokenLogprobs]] = field(factory=list)
    offset: int = 0
    report: Report | None = None
    begun: bool = False
    calls: int = 0

    def take(self, piece: Piece, vocabulary: Vocabulary) -> None:
        """Adds a piece."""
        self.text += piece.text
        self.unsent += piece.text
        for token, entry in zip(piece.tokens, piece.logprobs, strict=False):
            if token not in vocabulary.end_tokens:
                self.logprobs.append((self.offset, entry))
                self.unsent_logprobs.append((self.offset, entry))
                self.offset += len(vocabulary.piece(token).decode("utf-8", "replace"))
        if piece.report is not None:
            self.report = piece.report

    @property
    def reason(self) -> FinishReason | None:
        """Why it ended; None while it goes on."""
        if self.report is None:
            return None
        return "length" if self.report.finish_reason in ("length", "context") else "stop"


@frozen
class Answer(ABC):
    """An endpoint's shapes. `with_usage`: a stream ends with one more event."""

    model: str
    vocabulary: Vocabulary
    with_logprobs: bool
    with_usage: bool
    plan: Plan
    id: str = field(init=False)
    created: int = field(init=False, factory=lambda: int(time.time()))

    KIND: ClassVar[str]
    PREFIX: ClassVar[str]

    @id.default
    def _new_id(self) -> str:
        return f"{self.PREFIX}-{secrets.token_hex(16)}"

    @abstractmethod
    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The answer when all choices have ended."""

    @abstractmethod
    def events(self, choice: Choice) -> list[dict[str, Any]]:
        """The events for what the choice has not sent yet, if there is anything to say."""

    def usage_event(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The last event, if the usage was asked for; the others then say that they have none."""
        return self._head(self.KIND, []) | self._totals(choices)

    def _head(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _event(self, choices: list[Any]) -> dict[str, Any]:
        return self._head(self.KIND, choices) | ({"usage": None} if self.with_usage else {})

    def _totals(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {"usage": usage_of(choices, self.plan.each), "metrics": metrics_of(choices)}

    def _text(self, token: int) -> tuple[str, bytes]:
        data = self.vocabulary.piece(token, special=True)
        return data.decode("utf-8", "replace"), data


class ChatAnswer(Answer):
    """`/v1/chat/completions`."""

    KIND = "chat.completion.chunk"
    PREFIX = "chatcmpl"

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """See `Answer.whole`."""
        made = []
        for choice in choices:
            message: ChatMessage = {"role": "assistant", "content": choice.text, "refusal": None}
            reason = choice.reason
            if self.plan.offer is not None and choice.text.startswith(OPENING):
                calls, rest = calls_in(choice.text)
                if calls:
                    for call in calls:
                        del call["index"]
                    message["tool_calls"] = calls
                    message["content"] = rest or None
                    reason = reason if rest else "tool_calls"
            logprobs = self._logprobs(choice.logprobs)
            made.append(
                {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": reason}
            )
        return self._head("chat.completion", made) | self._totals(choices)

    def events(self, choice: Choice) -> list[dict[str, Any]]:
        """See `Answer.events`."""
        deltas: list[tuple[ChatDelta, FinishReason | None]] = []
        reason = choice.reason
        if not choice.begun:
            choice.begun = True
            deltas.append(({"role": "assistant", "content": ""}, None))
        if self.plan.offer is not None and OPENING.startswith(choice.text[: len(OPENING)]):
            # A call is told as a whole: the grammar says that what begins like one will be one.
            if reason is not None:
                calls, rest = calls_in(choice.text)
                deltas += [({"tool_calls": [call]}, None) for call in calls]
                deltas += [({"content": rest}, None)] if rest else []
                reason = "tool_calls" if calls and not rest else reason
                choice.unsent = ""
        elif choice.unsent:
            deltas.append(({"content": choice.unsent}, None))
            choice.unsent = ""
        if reason is not None:
            deltas.append(({}, reason))
        elif choice.unsent_logprobs and not deltas:
            return []  # they go with the text that they belong to
        events = []
        for number, (delta, finish) in enumerate(deltas):
            logprobs = None
            if number == len(deltas) - 1:
                logprobs = self._logprobs(choice.unsent_logprobs)
                choice.unsent_logprobs = []
            made = {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            events.append(self._event([made]))
        return events

    def _logprobs(self, entries: Sequence[tuple[int, TokenLogprobs]]) -> ChatLogprobs | None:
        if not self.with_logprobs:
            return None
        return {
            "content": [
                {**self._one(*entry[0]), "top_logprobs": [self._one(*other) for other in entry[1:]]}
                for _, entry in entries
            ],
            "refusal": None,
        }

    def _one(self, token: int, logprob: float) -> TopLogprob:
        text, data = self._text(token)
        return {"token": text, "logprob": logprob, "bytes": list(data)}


class CompletionAnswer(Answer):
    """`/v1/completions`."""

    KIND = "text_completion"
    PREFIX = "cmpl"

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """See `Answer.whole`."""
        made = [self._choice(choice, choice.text, choice.logprobs, choice.reason) for choice in choices]
        return self._head(self.KIND, made) | self._totals(choices)

    def events(self, choice: Choice) -> list[dict[str, Any]]:
        """See `Answer.events`."""
        if not choice.unsent and choice.reason is None:
            return []
        made = self._choice(choice, choice.unsent, choice.unsent_logprobs, choice.reason)
        choice.unsent, choice.unsent_logprobs = "", []
        return [self._event([made])]

    def _choice(
        self,
        choice: Choice,
        text: str,
        entries: Sequence[tuple[int, TokenLogprobs]],
        reason: FinishReason | None,
    ) -> dict[str, Any]:
        logprobs = self._logprobs(entries) if self.with_logprobs else None
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, entries: Sequence[tuple[int, TokenLogprobs]]) -> CompletionLogprobs:
        return {
            "tokens": [self._text(entry[0][0])[0] for _, entry in entries],
            "token_logprobs": [entry[0][1] for _, entry in entries],
            "top_logprobs": [
                {self._text(token)[0]: logprob for token, logprob in entry[1:]} for _, entry in entries
            ],
            "text_offset": [offset for offset, _ in entries],
        }


def usage_of(choices: Sequence[Choice], each: int) -> Usage:
    """Tokens and speculation of all choices, of which `each` in a row have the same prompt: that counts once."""
    reports = [choice.report for choice in choices if choice.report is not None]
    prompt = sum(report.prompt_tokens for report in reports[::each])
    completion = sum(report.completion_tokens for report in reports)
    sources = [source for report in reports for source in report.sources.values()]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(report.cached_tokens for report in reports[::each])},
        "speculation": {
            "drafted": sum(source.drafted for source in sources),
            "accepted": sum(source.accepted for source in sources),
            "windows": sum(report.windows for report in reports),
            "stale_windows": sum(report.stale_windows for report in reports),
            "stale_tokens": sum(report.stale_tokens for report in reports),
        },
    }


def metrics_of(choices: Sequence[Choice]) -> Metrics | None:
    """vLLM's per-request acceptance of a single choice that decoded in windows; None otherwise.

    A step is a window that retired: it gives one token however it ends, and drafts one less than its width.
    """
    report = choices[0].report if len(choices) == 1 else None
    if report is None or not report.steps:
        return None
    steps = sum(count for _, _, count in report.steps)
    drafted = sum((width - 1) * count for width, _, count in report.steps)
    accepted = sum((tokens - 1) * count for _, tokens, count in report.steps)
    most = max(width for width, _, _ in report.steps) - 1
    histogram = [0] * (most + 1)
    for _, tokens, count in report.steps:
        histogram[tokens - 1] += count
    acceptance: Acceptance = {
        "mean_acceptance_length": 1 + accepted / steps,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": most,
    }
    return {"speculative_decoding": acceptance}
