"""The grammar of an answer that may think, talk and call tools. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from orchestrator.api.constraints.json_schema import add_schema
from orchestrator.api.constraints.schema_values import ANNOTATIONS
from orchestrator.api.constraints.writer import GrammarWriter, Words, literal, text_until, union
from orchestrator.api.tools.syntax import HOLE, ArgumentSyntax, CallSyntax, ValueSyntax
from orchestrator.errors import RequestError

MAX_CALLS: Final = 32
"""Most calls in one answer: small models repeat themselves without end."""

_IDENTIFIER: Final = "[a-zA-Z0-9._-]{1,40}"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    ``parameters`` is the JSON Schema of its arguments, None for a function without any. Arguments follow it as far as
    it can be enforced, or, with ``strict``, as a whole.
    """

    name: str
    description: str
    parameters: Mapping[str, object] | None
    strict: bool

    def properties(self) -> Mapping[str, object]:
        """Return the schemas of the arguments by name."""
        found = (self.parameters or {}).get("properties")
        return found if isinstance(found, Mapping) else {}

    def is_text(self, argument: str) -> bool:
        """Tell whether an argument is text and nothing else, so that what looks like JSON is still text."""
        schema = self.properties().get(argument)
        return isinstance(schema, Mapping) and _texts(schema) == (True, False)


def calls_element(writer: GrammarWriter, syntax: CallSyntax, tools: Sequence[Tool], *, parallel: bool) -> str:
    """Return an element for what follows the marker: one call, or more with ``parallel``, to their end.

    Raises :class:`RequestError` (400) for a strict tool whose parameters cannot be enforced.
    """
    arguments = syntax.arguments
    if arguments is None:
        middle = _fixed(syntax.middle)
        words = {tool.name: f"{middle} {json_arguments(writer, tool)}".lstrip() for tool in tools}
    else:
        words = {tool.name: _spread_arguments(writer, arguments, tool) for tool in tools}
    call = Words(words).any_of(writer, "call")
    parts = [_fixed(syntax.begin[len(syntax.marker) :]), call]
    if parallel and syntax.between is not None:
        call = writer.add("call", call)
        parts = [parts[0], call, f"({_fixed(syntax.between)} {call}){{0,{MAX_CALLS - 1}}}"]
    return writer.add("calls", " ".join(part for part in [*parts, _fixed(syntax.end)] if part))


def answer_element(writer: GrammarWriter, *, body: str | None, calls: str | None, marker: str, required: bool) -> str:
    """Return an element for an answer without its thoughts.

    ``body`` is what a text must look like, None for any; ``calls`` what follows a marker of calls, None where there
    are no tools. With ``required`` there is no text.
    """
    if calls is None:
        return body if body is not None else ".*"
    if required or body is not None:
        begin = f"[ \\n]{{0,2}} {literal(marker)} {calls}"
        return begin if required or body is None else f"({begin} | {body})"
    return text_until(writer, marker, calls, may_end=True)


def with_thoughts(writer: GrammarWriter, answer: str, marks: tuple[str, str] | None, *, inside: bool) -> str:
    """Return an element for an answer that may begin with thoughts; ``inside``: the prompt has begun them."""
    if marks is None:
        return answer
    thought = text_until(writer, marks[1], f"[ \\n]{{0,4}} {writer.add('answer', answer)}", may_end=False)
    if inside:
        return thought
    return f"({literal(marks[0])} {thought} | {answer})"


def json_arguments(writer: GrammarWriter, tool: Tool) -> str:
    """Return an element for a tool's arguments as one JSON object."""
    if tool.parameters is None:
        return f'"{{" {writer.json("space")} "}}"'
    schema = dict(tool.parameters)
    if schema.get("type", "object") == "object" and not any(name in schema for name in ("$ref", "anyOf", "allOf")):
        schema["type"] = "object"
    try:
        return add_schema(writer, schema, "tools")
    except RequestError:
        if tool.strict:
            raise
        return writer.json("object")


def _spread_arguments(writer: GrammarWriter, syntax: ArgumentSyntax, tool: Tool) -> str:
    """Return an element for arguments that are written one by one, in the order of the schema."""
    required = (tool.parameters or {}).get("required")
    names = required if isinstance(required, list) else []
    first, later = _fixed(syntax.none), _fixed(syntax.last)
    for name, schema in reversed(list(tool.properties().items())):
        pair = writer.add(f"{tool.name}-{name}", _spread_argument(writer, syntax, tool, name, schema))
        or_none, or_later = ("", "") if name in names else (f" | {first}", f" | {later}")
        first = writer.add(f"{tool.name}-first", f"{_fixed(syntax.first)} {pair} {later}{or_none}")
        later = writer.add(f"{tool.name}-later", f"{_fixed(syntax.following)} {pair} {later}{or_later}")
    return first


def _spread_argument(writer: GrammarWriter, syntax: ArgumentSyntax, tool: Tool, name: str, schema: object) -> str:
    may_be_text, may_be_other = _texts(schema)
    value: ValueSyntax = syntax.text if may_be_text else syntax.other
    key = literal(name + value.middle)
    if not may_be_text:
        return f"{key} {_json_value(writer, tool, name, schema)} {literal(value.end)}"
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(choices, list) and not may_be_other:
        return f"{key} {union(literal(str(choice)) for choice in choices)} {literal(value.end)}"
    if tool.strict and isinstance(schema, Mapping) and set(schema) - ANNOTATIONS - {"type"}:
        raise RequestError(
            f"the parameter {name!r} of the strict tool {tool.name!r} cannot be enforced: this model writes it as "
            "plain text",
            code="unsupported_schema",
            param="tools",
        )
    return f"{key} {text_until(writer, value.end, '', may_end=False)}"


def _json_value(writer: GrammarWriter, tool: Tool, name: str, schema: object) -> str:
    # The argument's schema may refer to definitions of the whole.
    whole = {
        **{key: value for key, value in (tool.parameters or {}).items() if key in ("$defs", "definitions")},
        **(schema if isinstance(schema, Mapping) else {}),
    }
    try:
        return add_schema(writer, whole, "tools")
    except RequestError:
        if tool.strict:
            raise
        return writer.json("value")


def _texts(schema: object) -> tuple[bool, bool]:
    """Tell whether a value may be text, and whether it may be something else."""
    if not isinstance(schema, Mapping):
        return True, True
    for name in ("anyOf", "oneOf"):
        parts = schema.get(name)
        if isinstance(parts, list):
            found = [_texts(part) for part in parts]
            return any(text for text, _ in found), any(other for _, other in found)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return any(isinstance(value, str) for value in values), not all(isinstance(value, str) for value in values)
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if kinds == [None]:
        speaks_of_others = {"$ref", "allOf", "properties", "items"} & set(schema)
        return not speaks_of_others, True
    return "string" in kinds, kinds != ["string"]


def _fixed(text: str) -> str:
    """Return a text of a syntax as an element; its holes take any identifier."""
    parts: list[str] = []
    for number, part in enumerate(text.split(HOLE)):
        parts += [_IDENTIFIER] * (number > 0) + [literal(part)] * bool(part)
    return " ".join(parts)


def declarations(tools: Sequence[Tool]) -> list[Mapping[str, object]]:
    """Return the tools as templates expect them, which do not ask whether something was left out."""
    return [{"type": "function", "function": _function(tool)} for tool in tools]


def described(tools: Sequence[Tool]) -> str:
    """Return one line of JSON for each tool, for a prompt."""
    return "\n".join(json.dumps(_function(tool), ensure_ascii=False) for tool in tools)


def _function(tool: Tool) -> dict[str, object]:
    parameters = tool.parameters or {"type": "object", "properties": {}}
    return {"name": tool.name, "description": tool.description, "parameters": parameters}
