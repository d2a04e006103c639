"""Tools: how the model is told of them, and how its answer is read.

A call is written as {"name": …, "arguments": {…}} between <tool_call> and </tool_call>, one after the other. That is
what the chat templates of many models ask for (Hermes, Qwen). Where the model's own template does not, the tools
are described in the system message instead. A grammar sees to it that what begins as a call is one.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from meshpipe.llama.gbnf import tool_calls
from meshpipe.serving.errors import ApiError
from meshpipe.serving.schemas import ChatRequest, NamedTool, Tool, ToolCallAnswer

OPENING, CLOSING = "<tool_call>", "</tool_call>"


@frozen
class Offer:
    """The tools of a request that the model may call; `required`: it has to; `several`: more than one."""

    tools: tuple[Tool, ...]
    required: bool
    several: bool

    def grammar(self) -> str:
        """Raises UsageError for parameters that are no schema, or one that is not supported."""
        named = [(tool.function.name, tool.function.parameters) for tool in self.tools]
        return tool_calls(named, OPENING, CLOSING, required=self.required, several=self.several)


def offer_of(request: ChatRequest) -> Offer | None:
    """None if no tool may be called. Raises ApiError for a choice that is not among the tools."""
    tools, choice = tuple(request.tools or ()), request.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice asks for a tool, but there are no tools.", param="tool_choice")
        return None
    if choice == "none":
        return None
    if isinstance(choice, NamedTool):
        named = tuple(tool for tool in tools if tool.function.name == choice.function.name)
        if not named:
            raise ApiError(
                400, f"There is no tool named {choice.function.name!r}.", param="tool_choice.function.name"
            )
        return Offer(named, required=True, several=False)
    return Offer(tools, required=choice == "required", several=request.parallel_tool_calls is not False)


def knows_tools(template: str | None) -> bool:
    """Whether the model's chat template describes tools itself, in the way that is read here."""
    return template is not None and "tools" in template and OPENING in template


def described(messages: Sequence[Mapping[str, Any]], offer: Offer | None) -> list[dict[str, Any]]:
    """The messages for a template that knows no tools: tools, calls and answers as text."""
    result: list[dict[str, Any]] = []
    for message in messages:
        text = str(message.get("content") or "")
        if message["role"] == "tool":
            result.append({"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"})
        elif message.get("tool_calls"):
            calls = "\n".join(
                f"{OPENING}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSING}"
                for call in message["tool_calls"]
            )
            result.append({"role": "assistant", "content": f"{text}\n{calls}".strip()})
        else:
            result.append({"role": message["role"], "content": text})
    if offer is not None:
        functions = "\n".join(
            json.dumps(tool.function.model_dump(exclude_none=True, exclude={"strict"}), ensure_ascii=False)
            for tool in offer.tools
        )
        words = (
            f"You can call these functions:\n{functions}\nTo call one, answer with nothing but\n{OPENING}\n"
            f'{{"name": "…", "arguments": {{…}}}}\n{CLOSING}'
        )
        if result and result[0]["role"] == "system":
            result[0]["content"] += f"\n\n{words}"
        else:
            result.insert(0, {"role": "system", "content": words})
    return result


def calls_in(text: str) -> tuple[list[ToolCallAnswer], str]:
    """The whole calls at the beginning of an answer, and what is left: of a call that was cut off, its beginning."""
    calls: list[ToolCallAnswer] = []
    decoder = json.JSONDecoder()
    rest = text
    while rest.startswith(OPENING):
        body = rest[len(OPENING) :].lstrip()
        try:
            call, end = decoder.raw_decode(body)
            name, arguments = call["name"], call["arguments"]
        except (ValueError, KeyError, TypeError, RecursionError):
            break
        after = body[end:].lstrip()
        if not after.startswith(CLOSING):
            break
        rest = after[len(CLOSING) :].lstrip()
        calls.append(
            {
                "index": len(calls),
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": str(name), "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
        )
    return calls, rest
