"""Requests of the OpenAI API, parsed into native types. Pure.

Three kinds of fields: those that are implemented; those that ask for nothing, or for something that cannot change the
answer, which are ignored; and those that would change the answer and are not implemented, which are refused with
status 400, because an answer that ignores them is wrong. Unknown names are refused as well: most are spelling errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from orchestrator.api.fields import Fields, invalid, unsupported
from orchestrator.errors import RequestError
from orchestrator.gateway.sampling import SamplingParameters
from orchestrator.gateway.template import ChatMessage

MAX_STOPS: Final = 16
MAX_STOP_LENGTH: Final = 1024
MAX_TOKENS: Final = 1 << 31
MAX_LOGPROBS: Final = 20
MAX_BIASES: Final = 1024

SAMPLING_FIELDS: Final = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repeat_penalty",
        "repetition_penalty",
        "repeat_last_n",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "seed",
    }
)
"""``top_k``, ``min_p``, ``repeat_penalty`` (also ``repetition_penalty``) and ``repeat_last_n`` extend OpenAI's."""

COMMON_FIELDS: Final = SAMPLING_FIELDS | frozenset(
    {
        "model",
        "stream",
        "stream_options",
        "max_tokens",
        "stop",
        "logprobs",
        "n",
        "ignore_eos",
    }
)


IGNORED_FIELDS: Final = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "parallel_tool_calls",
        "prediction",
        "verbosity",
        "cache_prompt",
    }
)
"""Fields that cannot make the answer wrong: bookkeeping, hints for speed, and switches of things not asked for."""

REFUSED_FIELDS: Final = frozenset(
    {
        "tools",
        "functions",
        "tool_choice",
        "function_call",
        "response_format",
        "grammar",
        "json_schema",
        "guided_json",
        "modalities",
        "audio",
        "web_search_options",
        "suffix",
        "echo",
        "best_of",
        "moderation",
    }
)
"""Fields that change the answer and are not implemented; their neutral values are accepted (:data:`_NEUTRAL`)."""

_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "suffix": ("",),
    "echo": (False,),
    "best_of": (1,),
}

_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Templates know ``system`` only; OpenAI's ``developer`` is its later name."""


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """What both kinds of requests share; fields as in :class:`orchestrator.gateway.sequence.GenerationRequest`."""

    max_tokens: int | None
    sampling: SamplingParameters
    stop: tuple[str, ...]
    top_logprobs: int | None
    ignore_end: bool
    stream: bool
    include_usage: bool


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation to continue; ``variables`` are further names for the chat template."""

    messages: tuple[ChatMessage, ...]
    options: GenerationOptions
    variables: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A text, or its tokens, to continue."""

    prompt: str | tuple[int, ...]
    options: GenerationOptions


class ModelNames:
    """The names by which a client may call the served model; the first is its own."""

    def __init__(self, name: str, *aliases: str) -> None:
        self.name = name
        self._accepted = {name, *aliases, ""}

    def check(self, wanted: str) -> None:
        """Raise :class:`RequestError` (404) for another model: its client would take this model's answer for that."""
        if wanted not in self._accepted:
            raise RequestError(
                f"this server has no model {wanted!r}; it serves {self.name!r}",
                status=404,
                code="model_not_found",
                param="model",
            )


def parse_chat_request(body: object, names: ModelNames, fresh_seed: int) -> ChatRequest:
    """Parse the body of ``/v1/chat/completions``; ``fresh_seed`` serves requests that bring no seed.

    Raises :class:`RequestError` with the field's name.
    """
    fields = Fields(body)
    own = {"messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs", "reasoning_effort"}
    _check_fields(fields, own)
    top_logprobs = fields.optional_integer("top_logprobs", 0, MAX_LOGPROBS)
    if fields.flag("logprobs"):
        top_logprobs = top_logprobs or 0
    elif top_logprobs is not None:
        raise invalid("top_logprobs", "needs 'logprobs' to be true")
    max_tokens = fields.optional_integer("max_completion_tokens", 1, MAX_TOKENS)
    variables = dict(fields.mapping("chat_template_kwargs"))
    if fields.get("reasoning_effort") is not None:
        variables["reasoning_effort"] = fields.text("reasoning_effort")
    options = _options(fields, names, fresh_seed, max_tokens, top_logprobs)
    return ChatRequest(_messages(fields), options, variables)


def parse_completion_request(body: object, names: ModelNames, fresh_seed: int) -> CompletionRequest:
    """Parse the body of ``/v1/completions``; see :func:`parse_chat_request`."""
    fields = Fields(body)
    _check_fields(fields, {"prompt"})
    top_logprobs = fields.optional_integer("logprobs", 0, MAX_LOGPROBS)
    options = _options(fields, names, fresh_seed, None, top_logprobs)
    return CompletionRequest(_prompt(fields.get("prompt")), options)


def _check_fields(fields: Fields, own: set[str]) -> None:
    fields.refuse_unknown(COMMON_FIELDS | IGNORED_FIELDS | REFUSED_FIELDS | own)
    for name in sorted(REFUSED_FIELDS):
        value = fields.get(name)
        if value is not None and value not in _NEUTRAL.get(name, ()):
            raise unsupported(name, "is not supported by this server")
    if fields.integer("n", 1, 1, 128) != 1:
        raise unsupported("n", "must be 1: this server gives one answer per request")


def _options(
    fields: Fields, names: ModelNames, fresh_seed: int, max_tokens: int | None, top_logprobs: int | None
) -> GenerationOptions:
    names.check(fields.text("model"))
    if max_tokens is None:
        max_tokens = fields.optional_integer("max_tokens", 1, MAX_TOKENS)
    stream = fields.flag("stream")
    stream_options = Fields(fields.mapping("stream_options"), "stream_options")
    stream_options.refuse_unknown({"include_usage", "include_obfuscation"})
    if fields.get("stream_options") is not None and not stream:
        raise invalid("stream_options", "needs 'stream' to be true")
    return GenerationOptions(
        max_tokens=max_tokens,
        sampling=_sampling(fields, fresh_seed),
        stop=_stop(fields.get("stop")),
        top_logprobs=top_logprobs,
        ignore_end=fields.flag("ignore_eos"),
        stream=stream,
        include_usage=stream_options.flag("include_usage"),
    )


def _sampling(fields: Fields, fresh_seed: int) -> SamplingParameters:
    default = SamplingParameters()
    penalty = "repetition_penalty" if fields.get("repetition_penalty") is not None else "repeat_penalty"
    return SamplingParameters(
        temperature=fields.number("temperature", default.temperature, 0, 2),
        top_k=max(0, fields.integer("top_k", default.top_k, -1, MAX_TOKENS)),  # -1 is "off" for some clients
        top_p=fields.number("top_p", default.top_p, 0, 1),
        min_p=fields.number("min_p", default.min_p, 0, 1),
        repeat_penalty=fields.number(penalty, default.repeat_penalty, 0.01, 100),
        repeat_last_n=fields.integer("repeat_last_n", default.repeat_last_n, 0, MAX_TOKENS),
        presence_penalty=fields.number("presence_penalty", default.presence_penalty, -2, 2),
        frequency_penalty=fields.number("frequency_penalty", default.frequency_penalty, -2, 2),
        logit_bias=_logit_bias(fields.mapping("logit_bias")),
        seed=fields.integer("seed", fresh_seed, -(1 << 63), (1 << 64) - 1),
    )


def _logit_bias(value: Mapping[str, object]) -> tuple[tuple[int, float], ...]:
    if len(value) > MAX_BIASES:
        raise invalid("logit_bias", f"holds more than {MAX_BIASES} tokens")
    fields = Fields(value, "logit_bias")
    biases = []
    for token in value:
        if not token.isascii() or not token.isdecimal() or len(token) > 9:
            raise invalid(f"logit_bias.{token}", "is not a token id")
        biases.append((int(token), fields.number(token, 0.0, -100, 100)))
    return tuple(biases)


def _stop(value: object) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise invalid("stop", f"must be a string or a list of at most {MAX_STOPS} strings")
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_LENGTH:
            raise invalid("stop", f"holds something other than strings of 1 to {MAX_STOP_LENGTH} characters")
    return tuple(stops)


def _messages(fields: Fields) -> tuple[ChatMessage, ...]:
    items = fields.items("messages")
    if not items:
        raise invalid("messages", "must hold at least one message")
    return tuple(_message(Fields(item, f"messages[{number}]")) for number, item in enumerate(items))


def _message(fields: Fields) -> ChatMessage:
    role = fields.text("role")
    if role in {"tool", "function"} or fields.get("tool_calls") or fields.get("function_call"):
        raise unsupported(fields.name("role"), "belongs to tool calls, which this server does not support")
    if role not in _ROLES:
        raise invalid(fields.name("role"), f"must be one of {', '.join(_ROLES)}")
    name = fields.text("name") if fields.get("name") is not None else None
    return ChatMessage(_ROLES[role], _content(fields), name)


def _content(fields: Fields) -> str:
    content = fields.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(fields.name("content"), "must be a string or a list of text parts")
    texts = []
    for number, item in enumerate(content):
        part = Fields(item, f"{fields.name('content')}[{number}]")
        if part.text("type") != "text":
            raise unsupported(
                part.name("type"), f"{part.text('type')!r} is not supported: this server reads text only"
            )
        texts.append(part.text("text"))
    return "".join(texts)


def _prompt(value: object) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid("prompt", "must be a string or a list of token ids")
    if any(isinstance(token, str | list) for token in value):
        raise unsupported("prompt", "holds several prompts: send one per request")
    if not value or any(isinstance(token, bool) or not isinstance(token, int) for token in value):
        raise invalid("prompt", "must be a string or a list of token ids")
    return tuple(value)
