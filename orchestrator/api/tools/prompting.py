"""Explain tools to a model whose chat template does not know them. Pure.

Calls and their results then stand in the conversation as text, in the form that the explanation asks for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from orchestrator.api.tools.grammar import Tool, described
from orchestrator.gateway.template import ChatMessage, ToolCall

_EXPLANATION: Final = """\
You can call functions. These are they, one in each line, with the JSON schema of their arguments:
{tools}
To call functions, answer with nothing but the calls, each one in this form:
<tool_call>
{{"name": "the function's name", "arguments": {{the arguments as JSON}}}}
</tool_call>
The results come in <tool_response> tags. {when}"""
_MAY: Final = "Call functions only when they help; answer in plain words otherwise."
_MUST: Final = "Now call at least one function."


def explain_tools(messages: Sequence[ChatMessage], tools: Sequence[Tool], *, required: bool) -> list[ChatMessage]:
    """Return the conversation with the tools explained in its first message, a system message."""
    plain = calls_as_text(messages)
    if not tools:
        return plain
    explanation = _EXPLANATION.format(tools=described(tools), when=_MUST if required else _MAY)
    if plain and plain[0].role == "system":
        return [replace(plain[0], content=f"{plain[0].content}\n\n{explanation}"), *plain[1:]]
    return [ChatMessage("system", explanation), *plain]


def without_system(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the conversation with its system message in front of the user's first, for templates without one."""
    if len(messages) < 2 or messages[0].role != "system" or messages[1].role != "user":
        return list(messages)
    return [replace(messages[1], content=f"{messages[0].content}\n\n{messages[1].content}"), *messages[2:]]


def calls_as_text(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the conversation with calls and their results as text, results in a message of the user."""
    plain: list[ChatMessage] = []
    follows_result = False
    for message in messages:
        if message.role == "tool":
            content = f"<tool_response>\n{message.content}\n</tool_response>"
            if follows_result:  # templates want user and assistant in turn
                plain[-1] = replace(plain[-1], content=f"{plain[-1].content}\n{content}")
            else:
                plain.append(ChatMessage("user", content))
        elif message.tool_calls:
            calls = "\n".join(_call(call) for call in message.tool_calls)
            plain.append(replace(message, content=f"{message.content}\n{calls}".lstrip("\n"), tool_calls=()))
        else:
            plain.append(message)
        follows_result = message.role == "tool"
    return plain


def one_call_each(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the conversation with one call in a message, its result behind it: some templates show no more."""
    results = {message.tool_call_id: message for message in messages if message.role == "tool"}
    split: list[ChatMessage] = []
    placed: set[str] = set()
    for message in messages:
        if message.role == "tool" and message.tool_call_id in placed:
            continue
        if len(message.tool_calls) < 2:
            split.append(message)
            continue
        for number, call in enumerate(message.tool_calls):
            content = message.content if number == 0 else ""
            split.append(replace(message, content=content, tool_calls=(call,)))
            if call.identifier in results:
                split.append(results[call.identifier])
                placed.add(call.identifier)
    return split


def _call(call: ToolCall) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n</tool_call>'
