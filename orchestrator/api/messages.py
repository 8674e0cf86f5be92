"""The messages and tools of a conversation, parsed into native types. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from orchestrator.api.fields import Fields, invalid, unsupported
from orchestrator.api.tools.grammar import Tool
from orchestrator.gateway.template import ChatMessage, ToolCall

MAX_TOOLS: Final = 1024
_NAME: Final = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")

_ROLES: Final = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""Templates know ``system`` only; OpenAI's ``developer`` is its later name."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request.

    ``offered`` are told to the model; it may call those in ``callable``, must with ``required``, and may call several
    at once with ``parallel``.
    """

    offered: tuple[Tool, ...] = ()
    callable: tuple[Tool, ...] = ()
    required: bool = False
    parallel: bool = True


NO_TOOLS: Final = ToolUse()


def parse_messages(fields: Fields) -> tuple[ChatMessage, ...]:
    """Parse ``messages``; at least one."""
    items = fields.items("messages")
    if not items:
        raise invalid("messages", "must hold at least one message")
    return tuple(_message(Fields(item, f"messages[{number}]")) for number, item in enumerate(items))


def parse_content(fields: Fields, kinds: frozenset[str] = frozenset({"text"})) -> str:
    """Parse ``content``: a text, or a list of parts of some kinds that are text."""
    content = fields.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(fields.name("content"), "must be a string or a list of text parts")
    texts = []
    for number, item in enumerate(content):
        part = Fields(item, f"{fields.name('content')}[{number}]")
        if part.text("type") not in kinds:
            raise unsupported(
                part.name("type"), f"{part.text('type')!r} is not supported: this server reads text only"
            )
        texts.append(part.text("text"))
    return "".join(texts)


def parse_tools(fields: Fields) -> ToolUse:
    """Parse ``tools``, ``tool_choice`` and ``parallel_tool_calls``."""
    items = fields.items("tools")
    if len(items) > MAX_TOOLS:
        raise invalid("tools", f"holds more than {MAX_TOOLS} tools")
    tools = tuple(_tool(Fields(item, f"tools[{number}]")) for number, item in enumerate(items))
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("tools", "holds two tools of the same name")
    parallel = fields.flag("parallel_tool_calls", default=True)
    choice = fields.get("tool_choice")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "needs 'tools'")
        return ToolUse()
    if choice == "none":
        return ToolUse(parallel=parallel)
    if choice in (None, "auto", "required"):
        return ToolUse(tools, tools, choice == "required", parallel)
    chosen, required = _choice(choice, {tool.name: tool for tool in tools})
    return ToolUse(tools, chosen, required, parallel)


def _choice(value: object, tools: Mapping[str, Tool]) -> tuple[tuple[Tool, ...], bool]:
    """Return the tools that ``tool_choice`` leaves, and whether one must be called."""
    if isinstance(value, str):
        raise invalid("tool_choice", "must be 'none', 'auto', 'required' or name a tool")
    fields = Fields(value, "tool_choice")
    if fields.text("type") == "allowed_tools":
        allowed = Fields(fields.mapping("allowed_tools") or value, "tool_choice.allowed_tools")
        mode = allowed.text("mode", "auto")
        if mode not in ("auto", "required"):
            raise invalid(allowed.name("mode"), "must be 'auto' or 'required'")
        found = [_named(Fields(item, allowed.name("tools")), tools) for item in allowed.items("tools")]
        if not found:
            raise invalid(allowed.name("tools"), "holds no tool")
        return tuple(found), mode == "required"
    return (_named(fields, tools),), True


def _named(fields: Fields, tools: Mapping[str, Tool]) -> Tool:
    if fields.text("type") != "function":
        raise unsupported(fields.name("type"), "must be 'function'")
    inner = Fields(fields.mapping("function") or {"name": fields.get("name")}, fields.name("function"))
    name = inner.text("name")
    if name not in tools:
        raise invalid(inner.name("name"), f"{name!r} is not one of the tools")
    return tools[name]


def _tool(fields: Fields) -> Tool:
    if fields.text("type") != "function":
        raise unsupported(fields.name("type"), "must be 'function': this server runs no tools of its own")
    function = Fields(fields.mapping("function"), fields.name("function"))
    name = function.text("name")
    if not _NAME.fullmatch(name):
        raise invalid(function.name("name"), "must be 1 to 128 letters, digits or _ . : -")
    parameters = None if function.get("parameters") is None else function.mapping("parameters")
    if parameters is not None and not parameters:
        parameters = None
    return Tool(name, function.text("description"), parameters, function.flag("strict"))


def _message(fields: Fields) -> ChatMessage:
    role = fields.text("role")
    if role == "function" or fields.get("function_call"):
        raise unsupported(fields.name("role"), "belongs to function calls of old; use tools")
    if role not in _ROLES:
        raise invalid(fields.name("role"), f"must be one of {', '.join(_ROLES)}")
    name = fields.text("name") if fields.get("name") is not None else None
    if role == "tool":
        identifier = fields.text("tool_call_id")
        if not identifier:
            raise invalid(fields.name("tool_call_id"), "is missing")
        return ChatMessage("tool", parse_content(fields), name, tool_call_id=identifier)
    calls = _calls(fields) if role == "assistant" else ()
    content = "" if calls and fields.get("content") is None else parse_content(fields)
    reasoning = fields.text("reasoning_content") if role == "assistant" else ""
    return ChatMessage(_ROLES[role], content, name, reasoning or None, calls)


def _calls(fields: Fields) -> tuple[ToolCall, ...]:
    calls = []
    for number, item in enumerate(fields.items("tool_calls")):
        call = Fields(item, f"{fields.name('tool_calls')}[{number}]")
        if call.text("type", "function") != "function":
            raise unsupported(call.name("type"), "must be 'function'")
        function = Fields(call.mapping("function"), call.name("function"))
        if not function.text("name"):
            raise invalid(function.name("name"), "is missing")
        calls.append(ToolCall(function.text("name"), function.text("arguments", "{}") or "{}", call.text("id")))
    return tuple(calls)
