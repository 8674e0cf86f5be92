"""Render a conversation into a prompt with the chat template that the GGUF carries.

Templates are Jinja2 programs written for the `transformers` library, so the environment offers what that library
documents: ``tojson`` without HTML escapes, ``strftime_now``, ``raise_exception``, loop controls, a ``generation``
block, trimmed blocks. They come from a downloaded file and therefore run in Jinja2's immutable sandbox.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from orchestrator.errors import ChatTemplateError

_PROBE: Final = "Which word is this?"
_PROBE_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Probe description.",
        "parameters": {
            "type": "object",
            "properties": {"probe_name": {"type": "string", "description": "Probe."}},
            "required": ["probe_name"],
        },
    },
}
_IDENTIFIER_LENGTH: Final = 9
_OVERRIDE_HINT: Final = "pass a template of your own with --chat-template FILE"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the assistant calls; ``arguments`` is JSON as text."""

    name: str
    arguments: str
    identifier: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation: who says it (system, user, assistant, tool) and its text.

    An assistant may also have thought (``reasoning``) and called tools; a tool answers the call ``tool_call_id``.
    """

    role: str
    content: str
    name: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


class ChatTemplate:
    """A compiled chat template.

    Raises :class:`ChatTemplateError` from the constructor when the source does not compile, or cannot render the
    simplest conversation there is, one message of a user.
    """

    def __init__(
        self, source: str, *, bos: str = "", eos: str = "", now: Callable[[], datetime] = datetime.now
    ) -> None:
        environment = _environment(now)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the model's chat template is broken: line {error.lineno}: {error.message}", hint=_OVERRIDE_HINT
            ) from error
        except (jinja2.TemplateError, RecursionError) as error:
            raise ChatTemplateError(f"the model's chat template is broken: {error}", hint=_OVERRIDE_HINT) from error
        self._special = {"bos_token": bos, "eos_token": eos}
        self.source = source
        self.bos = bos
        self._typed_content = False
        self._typed_content = self._wants_typed_content()
        self._arguments_as_text = False
        self.knows_tools = self._finds_tools()

    def render(
        self,
        messages: Sequence[ChatMessage],
        variables: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] = (),
        *,
        answer_next: bool = True,
    ) -> str:
        """Return the prompt up to where the assistant's answer begins, or only the messages without ``answer_next``.

        ``variables`` are further names for the template, such as ``enable_thinking``; ``tools`` are those of the
        OpenAI API. Raises :class:`ChatTemplateError` with the template's own words when it refuses the conversation.
        """
        try:
            return self._render(messages, variables, tools, answer_next)
        except ChatTemplateError:
            # Some refuse an earlier thought beside a text, and none of them shows earlier thoughts anyway.
            if not any(message.reasoning for message in messages):
                raise
            silent = [replace(message, reasoning=None) for message in messages]
            return self._render(silent, variables, tools, answer_next)

    def _render(
        self,
        messages: Sequence[ChatMessage],
        variables: Mapping[str, object] | None,
        tools: Sequence[Mapping[str, object]],
        answer_next: bool,
    ) -> str:
        try:
            return self._template.render(
                {
                    **(variables or {}),
                    **self._special,
                    "messages": [self._message(message) for message in messages],
                    "tools": list(tools) or None,
                    "documents": None,
                    "add_generation_prompt": answer_next,
                }
            )
        except jinja2.TemplateError as error:
            raise ChatTemplateError(
                f"the model's chat template refuses this conversation: {error.message}"
            ) from error
        # A template is a program from outside: whatever it raises is its own fault and not ours.
        except Exception as error:
            raise ChatTemplateError(
                f"the model's chat template fails on this conversation: {type(error).__name__}: {error}"
            ) from error

    def _message(self, message: ChatMessage) -> dict[str, object]:
        content: object = message.content
        if self._typed_content:
            content = [{"type": "text", "text": message.content}]
        rendered = {"role": message.role, "content": content}
        if message.name is not None:
            rendered["name"] = message.name
        if message.reasoning:
            rendered["reasoning_content"] = rendered["thinking"] = message.reasoning
        if message.tool_calls:
            rendered["tool_calls"] = [self._tool_call(call) for call in message.tool_calls]
        if message.tool_call_id is not None:
            rendered["tool_call_id"] = _short_identifier(message.tool_call_id)
        return rendered

    def _tool_call(self, call: ToolCall) -> dict[str, object]:
        arguments: object = call.arguments
        if not self._arguments_as_text:
            with suppress(ValueError):
                arguments = json.loads(call.arguments)
        return {
            "id": _short_identifier(call.identifier),
            "type": "function",
            "function": {"name": call.name, "arguments": arguments},
        }

    def _finds_tools(self) -> bool:
        """Find out whether the template shows tools, calls and their results, and how it wants arguments.

        Most templates take a call's arguments as an object and write its JSON; some only put text together.
        """
        call = ToolCall("probe_tool", json.dumps({"probe_name": "probe value"}), "abcdefghi")
        messages = [
            ChatMessage("user", _PROBE),
            ChatMessage("assistant", "", tool_calls=(call,)),
            ChatMessage("tool", "probe result", name="probe_tool", tool_call_id=call.identifier),
        ]
        for as_text in (False, True):
            self._arguments_as_text = as_text
            with suppress(ChatTemplateError):
                prompt = self.render(messages, tools=[_PROBE_TOOL])
                told = "Probe description." in self.render(messages[:1], tools=[_PROBE_TOOL])
                shown = all(part in prompt for part in ("probe_name", "probe value", "probe result"))
                # Backslashes mean that text became JSON a second time, single quotes that JSON became Python.
                if told and shown and '\\"probe' not in prompt and "'probe value'" not in prompt:
                    return True
        return False

    def _wants_typed_content(self) -> bool:
        """Find out whether text must come as a list of parts; a template that drops the text is broken."""
        try:
            prompt = self.render([ChatMessage("user", _PROBE)])
        except ChatTemplateError as error:
            raise ChatTemplateError(
                f"the model's chat template is broken: it cannot render one user message ({error.__cause__})",
                hint=_OVERRIDE_HINT,
            ) from error
        if _PROBE in prompt:
            return False
        self._typed_content = True
        if _PROBE in self.render([ChatMessage("user", _PROBE)]):
            return True
        raise ChatTemplateError(
            "the model's chat template is broken: it leaves out what the user says", hint=_OVERRIDE_HINT
        )


def missing_template() -> ChatTemplateError:
    """Return the error for a model without chat template."""
    return ChatTemplateError(
        "this model's GGUF has no chat template, so it can complete text but not chat", hint=_OVERRIDE_HINT
    )


def _short_identifier(identifier: str) -> str:
    """Return a call's identifier in the form that the strictest templates ask for: nine letters or digits."""
    if len(identifier) == _IDENTIFIER_LENGTH and identifier.isascii() and identifier.isalnum():
        return identifier
    return hashlib.sha256(identifier.encode("utf-8", "surrogatepass")).hexdigest()[:_IDENTIFIER_LENGTH]


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training; here the block is only its body."""

    tags = {"generation"}  # noqa: RUF012  (Jinja2's own declaration is a plain set)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the nodes of the block's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime]) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)
