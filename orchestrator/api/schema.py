"""Requests of the OpenAI API, parsed into native types. Pure.

Three kinds of fields: those that are implemented; those that ask for nothing, or for something that cannot change the
answer, which are ignored; and those that would change the answer and are not implemented, which are refused with
status 400, because an answer that ignores them is wrong. Unknown names are refused as well: most are spelling errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from orchestrator.api.fields import Fields, invalid, unsupported
from orchestrator.api.formats import ANY_FORMAT, FORMAT_FIELDS, AnswerFormat, parse_format
from orchestrator.api.messages import NO_TOOLS, ToolUse, parse_messages, parse_tools
from orchestrator.errors import RequestError
from orchestrator.gateway.sampling import SamplingParameters
from orchestrator.gateway.template import ChatMessage

MAX_STOPS: Final = 16
MAX_STOP_LENGTH: Final = 1024
MAX_TOKENS: Final = 1 << 31
MAX_LOGPROBS: Final = 20
MAX_BIASES: Final = 1024
MAX_ANSWERS: Final = 64
"""Most answers to one request: ``n`` times the number of prompts."""

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

COMMON_FIELDS: Final = (
    SAMPLING_FIELDS
    | FORMAT_FIELDS
    | {
        "model",
        "stream",
        "stream_options",
        "max_tokens",
        "stop",
        "logprobs",
        "n",
        "ignore_eos",
        "min_tokens",
        "prompt_cache_key",
    }
)

CHAT_FIELDS: Final = COMMON_FIELDS | {
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "chat_template_kwargs",
    "reasoning_effort",
    "reasoning_format",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
}

COMPLETION_FIELDS: Final = COMMON_FIELDS | {"prompt", "n_predict"}

IGNORED_FIELDS: Final = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_retention",
        "safety_identifier",
        "prediction",
        "verbosity",
        "cache_prompt",
        "id_slot",
        "timings_per_token",
        "return_progress",
        "return_tokens",
        "return_token_ids",
        "priority",
    }
)
"""Fields that cannot make the answer wrong: bookkeeping, hints for speed, and figures that are not sent."""

_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "suffix": ("",),
    "echo": (False,),
    "best_of": (1,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "prompt_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "guided_regex": ("",),
    "guided_choice": ([],),
    "structured_outputs": ({},),
    "typical_p": (1,),
    "top_n_sigma": (-1, 0),
    "dynatemp_range": (0,),
    "dynatemp_exponent": (1,),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "samplers": ([],),
    "n_probs": (0,),
}

REFUSED_FIELDS: Final = frozenset(_NEUTRAL)
"""Fields that change the answer and are not implemented; their neutral values are accepted."""


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """What both kinds of requests share; fields as in :class:`orchestrator.gateway.sequence.GenerationRequest`.

    ``n`` answers are wanted for each prompt; ``session`` names a conversation whose cache should be found again.
    """

    max_tokens: int | None
    sampling: SamplingParameters
    stop: tuple[str, ...]
    top_logprobs: int | None
    ignore_end: bool
    stream: bool
    include_usage: bool
    n: int = 1
    format: AnswerFormat = ANY_FORMAT
    session: str = ""

    def sampling_of(self, answer: int) -> SamplingParameters:
        """Return the parameters of the ``answer``-th answer: each has a seed of its own."""
        seed = (self.sampling.seed + answer) % (1 << 64) if answer else self.sampling.seed
        return replace(self.sampling, seed=seed)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation to continue; ``variables`` are further names for the chat template.

    ``reads_thoughts``: what the model thinks is told apart from what it says.
    """

    messages: tuple[ChatMessage, ...]
    options: GenerationOptions
    variables: Mapping[str, object]
    tools: ToolUse = NO_TOOLS
    reads_thoughts: bool = True


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Texts, or their tokens, to continue."""

    prompts: tuple[str | tuple[int, ...], ...]
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
    _check_fields(fields, CHAT_FIELDS)
    top_logprobs = fields.optional_integer("top_logprobs", 0, MAX_LOGPROBS)
    if fields.flag("logprobs"):
        top_logprobs = top_logprobs or 0
    elif top_logprobs is not None:
        raise invalid("top_logprobs", "needs 'logprobs' to be true")
    variables = dict(fields.mapping("chat_template_kwargs"))
    if fields.get("reasoning_effort") is not None:
        variables["reasoning_effort"] = fields.text("reasoning_effort")
    reasoning_format = fields.text("reasoning_format", "auto")
    if reasoning_format not in ("auto", "deepseek", "none"):
        raise invalid("reasoning_format", "must be 'auto' or 'none'")
    options = _options(fields, names, fresh_seed, "max_completion_tokens", top_logprobs)
    tools = parse_tools(fields)
    if tools.callable and options.format.grammar is not None:
        raise invalid(options.format.param, "says what the whole answer looks like, so there is no room for 'tools'")
    if tools.callable and options.ignore_end:
        raise invalid("ignore_eos", "cannot be used with 'tools': calls end where they end")
    return ChatRequest(parse_messages(fields), options, variables, tools, reasoning_format != "none")


def parse_completion_request(body: object, names: ModelNames, fresh_seed: int) -> CompletionRequest:
    """Parse the body of ``/v1/completions``; see :func:`parse_chat_request`."""
    fields = Fields(body)
    _check_fields(fields, COMPLETION_FIELDS)
    top_logprobs = fields.optional_integer("logprobs", 0, MAX_LOGPROBS)
    options = _options(fields, names, fresh_seed, "n_predict", top_logprobs)
    prompts = parse_prompts(fields.get("prompt"), "prompt")
    if len(prompts) * options.n > MAX_ANSWERS:
        raise invalid("prompt", f"and 'n' ask for more than {MAX_ANSWERS} answers")
    return CompletionRequest(prompts, options)


def parse_prompts(value: object, param: str) -> tuple[str | tuple[int, ...], ...]:
    """Parse one or more texts, or lists of token ids."""
    if isinstance(value, list) and value and all(isinstance(item, str | list) for item in value):
        return tuple(_prompt(item, param) for item in value)
    return (_prompt(value, param),)


def _check_fields(fields: Fields, own: frozenset[str]) -> None:
    fields.refuse_unknown(own | IGNORED_FIELDS | REFUSED_FIELDS)
    for name in sorted(REFUSED_FIELDS):
        value = fields.get(name)
        if value is not None and value not in _NEUTRAL[name]:
            raise unsupported(name, "is not supported by this server")


def _options(
    fields: Fields, names: ModelNames, fresh_seed: int, other_name: str, top_logprobs: int | None
) -> GenerationOptions:
    names.check(fields.text("model"))
    max_tokens = _max_tokens(fields, other_name) or _max_tokens(fields, "max_tokens")
    stream = fields.flag("stream")
    stream_options = Fields(fields.mapping("stream_options"), "stream_options")
    stream_options.refuse_unknown({"include_usage", "include_obfuscation", "continuous_usage_stats"})
    if stream_options.flag("continuous_usage_stats"):
        raise unsupported("stream_options.continuous_usage_stats", "is not supported by this server")
    if fields.get("stream_options") is not None and not stream:
        raise invalid("stream_options", "needs 'stream' to be true")
    answer_format = parse_format(fields)
    ignore_end = fields.flag("ignore_eos")
    if ignore_end and not answer_format.is_free:
        raise invalid("ignore_eos", f"cannot be used with {answer_format.param!r}: such an answer ends where it ends")
    stop = _stop(fields.get("stop"))
    if fields.integer("min_tokens", 0, 0, MAX_TOKENS) and (stop or not ignore_end):
        raise unsupported("min_tokens", "is supported only with 'ignore_eos' and without 'stop'")
    return GenerationOptions(
        max_tokens=max_tokens,
        sampling=parse_sampling(fields, fresh_seed),
        stop=stop,
        top_logprobs=top_logprobs,
        ignore_end=ignore_end,
        stream=stream,
        include_usage=stream_options.flag("include_usage"),
        n=fields.integer("n", 1, 1, MAX_ANSWERS),
        format=answer_format,
        session=fields.text("prompt_cache_key"),
    )


def _max_tokens(fields: Fields, name: str) -> int | None:
    """Return a limit; None where it is absent or -1, which some clients say for "no limit"."""
    value = fields.get(name)
    return None if value == -1 else fields.optional_integer(name, 1, MAX_TOKENS)


def parse_sampling(fields: Fields, fresh_seed: int) -> SamplingParameters:
    """Parse the fields that say how tokens are chosen."""
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


def _prompt(value: object, param: str) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return value
    tokens = value if isinstance(value, list) else []
    if not tokens or any(isinstance(token, bool) or not isinstance(token, int) for token in tokens):
        raise invalid(param, "must be a string or a list of token ids, or a list of these")
    return tuple(tokens)
