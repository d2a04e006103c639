"""What requests and answers look like: OpenAI's, with meshpipe's own fields marked as such.

Requests are pydantic models: an unknown field, or a value of another type, is an error that names it. Answers are
typed dictionaries. The OpenAPI document is made of both.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import NotRequired, TypedDict

from meshpipe.speculation.policy import DEPTHS, WIDTHS
from meshpipe.speculation.settings import MODES

MAX_TEXT = 1 << 22
"""Characters of a prompt or of one message."""
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_PROMPTS = 64
MAX_CHOICES = 16
MAX_STOPS = 16
INT64 = 2**63

Text = Annotated[str, Field(max_length=MAX_TEXT)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
"""Millions of them may come: of those that are wrong, one is enough."""


class Model(BaseModel):
    """A strict object: nothing is converted, nothing is ignored."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


# ---- requests -----------------------------------------------------------------------------------------


class SpeculationFields(Model):
    """How far to run ahead of the model: changes the speed of an answer, never its tokens."""

    mode: str | None = Field(None, json_schema_extra={"enum": [*MODES, None]})
    depth: Annotated[int, Field(ge=DEPTHS[0], le=DEPTHS[1])] | Literal["auto"] | None = None
    width: Annotated[int, Field(ge=WIDTHS[0], le=WIDTHS[1])] | Literal["auto"] | None = None
    max_width: Annotated[int, Field(ge=WIDTHS[0], le=WIDTHS[1])] | None = None
    mtp_at: Literal["auto", "last", "coordinator"] | None = Field(
        None, description="Where the model's NextN layers draft."
    )


class StreamOptions(Model):
    """`include_usage`: a last chunk with the usage of the whole request."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Sampled(Model):
    """What both endpoints take."""

    model: Annotated[str, Field(max_length=1024)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = Field(
        None, description="The same seed gives the same answer; left out, each answer has a random one."
    )
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        None, description="1 if left out; 0 is greedy."
    )
    top_p: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="0.95 if left out.")
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        None, description="Not OpenAI's. 40 if left out; 0 and -1: all."
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Not OpenAI's. 0.05 if left out."
    )
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = Field(None, description="Not OpenAI's.")
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=1024),
        ]
        | None
    ) = None
    user: Annotated[str, Field(max_length=1024)] | None = Field(None, description="Accepted and not used.")
    ignore_eos: bool | None = Field(None, description="Not OpenAI's: go on past the model's end tokens.")
    speculation: SpeculationFields | None = Field(None, description="Not OpenAI's.")


class CompletionRequest(Sampled):
    """`POST /v1/completions`."""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None


class TextPart(Model):
    """A piece of a message; only text is understood."""

    type: Literal["text"]
    text: Text


Content = Text | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES)]


class CalledFunction(Model):
    """Which function the assistant called, and with what: JSON, as text."""

    name: Annotated[str, Field(max_length=256)]
    arguments: Text


class ToolCall(Model):
    """A call in the assistant's message."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"]
    function: CalledFunction


class Speech(Model):
    """A message of the system, the developer or the user."""

    role: Literal["system", "developer", "user"]
    content: Content
    name: Annotated[str, Field(max_length=256)] | None = None


class AssistantSpeech(Model):
    """What the assistant said earlier."""

    role: Literal["assistant"]
    content: Content | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    refusal: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None


class ToolSpeech(Model):
    """What a tool answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Annotated[str, Field(max_length=256)]


Message = Annotated[Speech | AssistantSpeech | ToolSpeech, Field(discriminator="role")]


class Function(Model):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Model):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class NamedFunction(Model):
    """The name of a function."""

    name: Annotated[str, Field(max_length=64)]


class NamedTool(Model):
    """This function has to be called."""

    type: Literal["function"]
    function: NamedFunction


class TextFormat(Model):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(Model):
    """Any JSON object."""

    type: Literal["json_object"]


class Schema(Model):
    """A JSON schema with a name."""

    name: Annotated[str, Field(max_length=64)]
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: Text | None = None
    strict: bool | None = None


class SchemaFormat(Model):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    json_schema: Schema


class ChatRequest(Sampled):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: (
        Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None
    ) = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    store: Literal[False] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = Field(
        None, description="Accepted and not used."
    )


# ---- answers ------------------------------------------------------------------------------------------


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    error: ErrorDetail


class PromptDetails(TypedDict):
    cached_tokens: int


class SpeculationUsage(TypedDict):
    """Not OpenAI's. Tokens and windows of all choices."""

    drafted: int
    accepted: int
    windows: int
    stale_windows: int
    stale_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    speculation: SpeculationUsage


class Acceptance(TypedDict):
    """As vLLM says it (`--per-request-spec-decode-metrics summary`) and AIPerf reads it."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class Metrics(TypedDict):
    speculative_decoding: Acceptance


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CalledFunctionAnswer(TypedDict):
    name: str
    arguments: str


class ToolCallAnswer(TypedDict):
    index: NotRequired[int]
    id: str
    type: Literal["function"]
    function: CalledFunctionAnswer


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCallAnswer]]


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatAnswer(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: Metrics | None


class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    tool_calls: NotRequired[list[ToolCallAnswer]]


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(TypedDict):
    """One event of a stream; the last one before [DONE] has no choices if the usage was asked for."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    metrics: NotRequired[Metrics | None]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class CompletionAnswer(TypedDict):
    """The whole answer, and each event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
    metrics: NotRequired[Metrics | None]


class ModelAnswer(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelAnswer]


class StageAnswer(TypedDict):
    index: int
    layers: list[int]
    address: str | None
    lanes: int
    context: int
    exact: bool
    milliseconds: dict[str, float]


class LaneCounts(TypedDict):
    total: int
    free: int


class LinksAnswer(TypedDict):
    return_route: str
    round_trip_ms: float
    window_latency_ms: float


class TopologyAnswer(TypedDict):
    """`milliseconds`: measured cost of a decode by its rows. `round_trip_ms`: what the links add."""

    model: str
    layers: int
    exact: bool
    stages: list[StageAnswer]
    links: LinksAnswer
    lanes: LaneCounts
    requests: int


class StatusAnswer(TypedDict):
    status: str
