"""From a parsed request to what the gateway generates and how its text is read. Pure, but for the tokenizer.

The template decides how a model writes tool calls and thoughts. What an answer must look like (a schema, calls of
tools) becomes one grammar for the whole answer, thoughts included, so that nothing asked for can be ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from orchestrator.api.constraints.gbnf import parse_grammar
from orchestrator.api.constraints.json_schema import add_schema
from orchestrator.api.constraints.writer import GrammarWriter
from orchestrator.api.formats import AnswerFormat
from orchestrator.api.messages import ToolUse
from orchestrator.api.schema import ChatRequest
from orchestrator.api.tools.channels import MARKS, ChannelReader, channels_element, has_channels
from orchestrator.api.tools.grammar import answer_element, calls_element, declarations, with_thoughts
from orchestrator.api.tools.prompting import explain_tools, one_call_each, without_system
from orchestrator.api.tools.reader import AnswerReader, Reader
from orchestrator.api.tools.syntax import PLAIN_SYNTAX, CallSyntax, learn_syntax, thoughts_of
from orchestrator.errors import ChatTemplateError, InputError, RequestError
from orchestrator.gateway.sampling import Constraint
from orchestrator.gateway.template import ChatMessage, ChatTemplate


class Tokenizer(Protocol):
    """The part of a model that turns text into tokens."""

    @property
    def bos(self) -> int:
        """The token that begins a text, negative where there is none."""

    @property
    def n_vocab(self) -> int:
        """Number of tokens."""

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the tokens of a text."""

    def piece(self, token: int, special: bool = False) -> bytes:
        """Return a token's bytes; control tokens have none unless ``special``."""

    def is_end_of_generation(self, token: int) -> bool:
        """Tell whether the model ends its answer with this token."""

    def constrain(self, grammar: str, visible: Collection[int] = ()) -> Constraint:
        """Return the beginning of an answer in a grammar."""


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """The prompt's tokens, the answer's grammar if it has one, and how its text is read.

    ``visible`` are the control tokens that the reader has to see as text.
    """

    prompt: tuple[int, ...]
    grammar: str | None
    visible: frozenset[int]
    new_reader: Callable[[], Reader]


class ChatPlanner:
    """What a model's chat template makes possible, found out once."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer
        ends = [token for token in range(tokenizer.n_vocab) if tokenizer.is_end_of_generation(token)]
        endings = [tokenizer.piece(token, special=True).decode(errors="replace") for token in ends]
        self._channels = has_channels(template.source)
        learned = learn_syntax(template, endings)
        self._is_native = learned is not None or (self._channels and template.knows_tools)
        self._syntax = learned or PLAIN_SYNTAX
        self._thoughts = None if self._channels else thoughts_of(template)
        self._visible = frozenset(
            token
            for text in (MARKS if self._channels else _texts(self._syntax, self._thoughts))
            for token in tokenizer.tokenize(text, add_special=False, parse_special=True)
            if not tokenizer.piece(token) and not tokenizer.is_end_of_generation(token)
        )

    def plan(self, request: ChatRequest) -> ChatPlan:
        """Return the plan of a request.

        Raises :class:`ChatTemplateError` for a conversation that the template refuses, and :class:`RequestError`
        (400) for a schema or grammar that cannot be enforced.
        """
        prompt = self._render(request)
        thoughts = self._thoughts if request.reads_thoughts else None
        inside = self._thoughts is not None and prompt.rstrip().endswith(self._thoughts[0])
        grammar = self._grammar(request, inside=inside)
        syntax = self._syntax if request.tools.callable else None
        by_name = {tool.name: tool for tool in request.tools.callable}
        # A grammar of the client's own describes all that the model writes, so there are no thoughts to tell apart.
        reads = thoughts if request.options.format.grammar is None else None

        def new_reader() -> AnswerReader:
            return AnswerReader(
                syntax,
                reads,
                inside=inside and reads is not None,
                is_text=lambda name, argument: name in by_name and by_name[name].is_text(argument),
            )

        tokens = self._tokens(prompt)
        if self._channels and request.options.format.grammar is None:
            return ChatPlan(tokens, grammar, self._visible, ChannelReader)
        visible = self._visible if syntax is not None or thoughts is not None else frozenset[int]()
        return ChatPlan(tokens, grammar, visible, new_reader)

    def tokens(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Return the prompt of a conversation without tools."""
        return self._tokens(self._template.render(messages))

    def _tokens(self, prompt: str) -> tuple[int, ...]:
        # A template that writes the begin token itself must not get a second one from the tokenizer.
        add_special = not (self._template.bos and prompt.startswith(self._template.bos))
        return tokenize(self._tokenizer, prompt, add_special=add_special)

    def _render(self, request: ChatRequest) -> str:
        tools = request.tools
        if self._is_native:
            # Some templates show one call in a message and refuse, or forget, the others.
            single = self._channels or self._syntax.between is None
            messages = one_call_each(request.messages) if single else request.messages
            return self._template.render(messages, request.variables, declarations(tools.offered))
        if not tools.offered and not any(
            message.tool_calls or message.role == "tool" for message in request.messages
        ):
            return self._template.render(request.messages, request.variables)
        messages = explain_tools(request.messages, tools.offered, required=tools.required)
        try:
            return self._template.render(messages, request.variables)
        except ChatTemplateError:
            return self._template.render(without_system(messages), request.variables)

    def _grammar(self, request: ChatRequest, *, inside: bool) -> str | None:
        tools, wanted = request.tools, request.options.format
        if wanted.grammar is not None or (wanted.is_free and not tools.callable):
            return wanted.grammar
        writer = GrammarWriter()
        if self._channels:
            body = None if wanted.schema is None else add_schema(writer, wanted.schema, wanted.param)
            return writer.text(channels_element(writer, body=body, tools=tools.callable, required=tools.required))
        calls = None
        if tools.callable:
            calls = calls_element(writer, self._syntax, tools.callable, parallel=tools.parallel)
        body = None if wanted.schema is None else add_schema(writer, wanted.schema, wanted.param)
        answer = answer_element(writer, body=body, calls=calls, marker=self._syntax.marker, required=tools.required)
        return writer.text(with_thoughts(writer, answer, self._thoughts, inside=inside))


def format_grammar(wanted: AnswerFormat) -> str | None:
    """Return the grammar of an answer without thoughts and tools; None where anything goes."""
    if wanted.schema is None:
        return wanted.grammar
    writer = GrammarWriter()
    return writer.text(add_schema(writer, wanted.schema, wanted.param))


def check_grammar(tokenizer: Tokenizer, grammar: str | None, param: str) -> None:
    """Make sure that a grammar can be used; raise :class:`RequestError` (400) with what is wrong with it."""
    if grammar is None:
        return
    parse_grammar(grammar, param)
    try:
        tokenizer.constrain(grammar)
    except InputError as error:
        raise RequestError(str(error), code="invalid_grammar", param=param) from error


def param_of_grammar(tools: ToolUse, wanted: AnswerFormat) -> str:
    """Return the field that is at fault when a grammar cannot be used."""
    return wanted.param or ("tools" if tools.callable else "")


def tokenize(tokenizer: Tokenizer, text: str, *, add_special: bool, parse_special: bool = True) -> tuple[int, ...]:
    """Return the tokens of a prompt, control tokens by their names included."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can carry half of a surrogate pair
        raise RequestError("the prompt is not valid Unicode text", code="invalid_value") from error
    return tuple(tokenizer.tokenize(text, add_special=add_special, parse_special=parse_special))


def _texts(syntax: CallSyntax, thoughts: tuple[str, str] | None) -> list[str]:
    """Return the texts that a reader looks for."""
    texts = [syntax.marker, syntax.begin, syntax.middle, syntax.between or "", syntax.end, *(thoughts or ())]
    spread = syntax.arguments
    if spread is not None:
        texts += [spread.first, spread.none, spread.following, spread.last]
        texts += [part for value in (spread.text, spread.other) for part in (value.middle, value.end)]
    return texts
