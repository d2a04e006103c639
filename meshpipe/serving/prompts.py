"""From a request to what the pipeline is asked: prompt tokens, sampling, stop strings.

Everything here may take a while (templates, tokenizing, grammars): it runs in a thread, never on the event loop.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
from attrs import frozen

from meshpipe.errors import UsageError
from meshpipe.llama.gbnf import json_object, json_schema
from meshpipe.llama.grammar import check_grammar
from meshpipe.llama.vocabulary import Vocabulary
from meshpipe.messages import Sampling
from meshpipe.serving.errors import ApiError
from meshpipe.serving.schemas import (
    INT64,
    ChatRequest,
    CompletionRequest,
    Content,
    Sampled,
    SchemaFormat,
    TextFormat,
)
from meshpipe.serving.tools import Offer, described, knows_tools, offer_of
from meshpipe.speculation.settings import Speculation


@frozen
class Task:
    """One choice of an answer: what `Coordinator.generate` is told."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    speculation: Speculation
    stop: tuple[str, ...]
    ignore_end: bool


@frozen
class Plan:
    """All choices of an answer, in order, `each` for a prompt; `offer` are the tools that it may call."""

    tasks: tuple[Task, ...]
    each: int
    offer: Offer | None = None


def plan_completion(
    request: CompletionRequest, vocabulary: Vocabulary, context: int, speculation: Speculation
) -> Plan:
    """A task for each prompt and choice. Raises ApiError."""
    given = request.prompt
    if isinstance(given, str):
        prompts = [_tokens(vocabulary, given)]
    elif isinstance(given[0], int):
        prompts = [tuple(token for token in given if isinstance(token, int))]
    else:
        prompts = [_tokens(vocabulary, one) if isinstance(one, str) else tuple(one) for one in given]
    for prompt in prompts:
        _check_prompt(prompt, vocabulary, context, "prompt")
    wanted = 0 if request.logprobs is None else request.logprobs + 1
    sampling = _sampling(request, vocabulary, grammar="", logprobs=wanted)
    most = request.max_tokens if request.max_tokens is not None else 16  # OpenAI's default
    tasks = _tasks(request, prompts, most, "max_tokens", context, sampling, speculation)
    return Plan(tasks, request.n or 1)


def plan_chat(request: ChatRequest, vocabulary: Vocabulary, context: int, speculation: Speculation) -> Plan:
    """A task for each choice. Raises ApiError."""
    offer = offer_of(request)
    grammar = _grammar(request, offer)
    if grammar:
        with _blamed("tools" if offer is not None else "response_format"):
            check_grammar(vocabulary.pointer, grammar)
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs")
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise ApiError(400, "give max_completion_tokens or max_tokens, not both.", param="max_tokens")
    with _blamed("messages"):
        prompt = vocabulary.tokenize(_rendered(request, vocabulary, offer), start=False)
    _check_prompt(prompt, vocabulary, context, "messages")
    wanted = 1 + (request.top_logprobs or 0) if request.logprobs else 0
    sampling = _sampling(request, vocabulary, grammar=grammar, logprobs=wanted)
    name = "max_tokens" if request.max_tokens is not None else "max_completion_tokens"
    most = getattr(request, name)
    tasks = _tasks(request, [prompt], most, name, context, sampling, speculation)
    return Plan(tasks, request.n or 1, offer)


def _grammar(request: ChatRequest, offer: Offer | None) -> str:
    wanted = request.response_format
    if offer is not None:
        if wanted is not None and not isinstance(wanted, TextFormat):
            raise ApiError(
                400,
                "response_format cannot be combined with tools, unless tool_choice is 'none'.",
                param="response_format",
            )
        with _blamed("tools"):
            return offer.grammar()
    if wanted is None or isinstance(wanted, TextFormat):
        return ""
    if not isinstance(wanted, SchemaFormat):
        return json_object()
    with _blamed("response_format.json_schema.schema"):
        return json_schema({} if wanted.json_schema.schema_ is None else wanted.json_schema.schema_)


def _rendered(request: ChatRequest, vocabulary: Vocabulary, offer: Offer | None) -> str:
    """The prompt, by the model's chat template."""
    messages: list[dict[str, Any]] = []
    for message in request.messages:
        plain = message.model_dump(exclude_none=True, include={"role", "name", "tool_calls", "tool_call_id"})
        plain["role"] = "system" if message.role == "developer" else message.role
        plain["content"] = _text(message.content)
        messages.append(plain)
    if not knows_tools(vocabulary.chat_template):
        return vocabulary.render_chat(described(messages, offer))
    tools = [tool.model_dump(exclude_none=True) for tool in offer.tools] if offer is not None else None
    return vocabulary.render_chat(messages, tools=tools)


def _text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def _tokens(vocabulary: Vocabulary, text: str) -> tuple[int, ...]:
    with _blamed("prompt"):
        return vocabulary.tokenize(text)


def _check_prompt(prompt: tuple[int, ...], vocabulary: Vocabulary, context: int, param: str) -> None:
    if not prompt:
        raise ApiError(400, "the prompt is empty: the model needs a token to continue.", param=param)
    bad = next((token for token in prompt if not 0 <= token < vocabulary.size), None)
    if bad is not None:
        raise ApiError(400, f"token {bad} is outside the vocabulary of {vocabulary.size}.", param=param)
    if len(prompt) >= context:
        raise ApiError(
            400,
            f"This model's maximum context length is {context} tokens. However, your prompt has {len(prompt)}.",
            param=param,
            code="context_length_exceeded",
        )


def _sampling(request: Sampled, vocabulary: Vocabulary, *, grammar: str, logprobs: int) -> Sampling:
    biases = []
    for name, bias in (request.logit_bias or {}).items():
        if int(name) >= vocabulary.size:
            raise ApiError(
                400, f"token {name} is outside the vocabulary of {vocabulary.size}.", param="logit_bias"
            )
        biases.append((int(name), float(bias)))
    defaults = Sampling(temperature=1.0)
    given = {
        name: getattr(request, name)
        for name in (
            "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repeat_penalty",
        )
        if getattr(request, name) is not None
    }  # fmt: skip
    seed = secrets.randbits(63) if request.seed is None else request.seed % INT64
    return attrs.evolve(
        defaults, **given, seed=seed, logit_bias=tuple(biases), grammar=grammar, logprobs=logprobs
    )


def _tasks(
    request: Sampled,
    prompts: list[tuple[int, ...]],
    most: int | None,
    name: str,
    context: int,
    sampling: Sampling,
    default: Speculation,
) -> tuple[Task, ...]:
    for prompt in prompts:
        if most is not None and len(prompt) + most > context:
            raise ApiError(
                400,
                f"This model's maximum context length is {context} tokens. However, you requested "
                f"{len(prompt) + most}: {len(prompt)} in the prompt and {most} in {name}.",
                param=name,
                code="context_length_exceeded",
            )
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    chosen = request.speculation
    with _blamed("speculation"):
        speculation = (
            attrs.evolve(default, **chosen.model_dump(exclude_none=True)) if chosen is not None else default
        )
    return tuple(
        Task(
            prompt,
            context - len(prompt) if most is None else most,
            # The first choice of every prompt has the seed that was asked for.
            attrs.evolve(sampling, seed=(sampling.seed + number) % INT64),
            speculation,
            stop,
            bool(request.ignore_eos),
        )
        for prompt in prompts
        for number in range(request.n or 1)
    )


@contextmanager
def _blamed(param: str) -> Iterator[None]:
    """A UsageError inside the block is an ApiError that names a field of the request."""
    try:
        yield
    except UsageError as error:
        raise ApiError(400, str(error), param=param, code="invalid_value") from error
