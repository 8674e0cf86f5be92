"""The bodies of requests and answers as JSON Schema, for the OpenAPI document. Pure."""

from __future__ import annotations

from typing import Final

from orchestrator.api.schema import (
    IGNORED_FIELDS,
    MAX_ANSWERS,
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    MAX_TOKENS,
)

Schema = dict[str, object]


def reference(name: str) -> Schema:
    """Return a reference to one of :data:`COMPONENTS`."""
    return {"$ref": f"#/components/schemas/{name}"}


def _number(low: float, high: float) -> Schema:
    return {"type": ["number", "null"], "minimum": low, "maximum": high}


def _integer(low: int, high: int) -> Schema:
    return {"type": ["integer", "null"], "minimum": low, "maximum": high}


def _list(items: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": items, **bounds}


def _object(properties: Schema, required: tuple[str, ...] = (), *, closed: bool = True) -> Schema:
    schema: Schema = {"type": "object", "properties": properties}
    if required:
        schema["required"] = list(required)
    if closed:
        schema["additionalProperties"] = False
    return schema


_FLAG: Final[Schema] = {"type": ["boolean", "null"]}
_TEXT: Final[Schema] = {"type": ["string", "null"]}
_TOKENS: Final[Schema] = _list({"type": "integer", "minimum": 0, "maximum": MAX_TOKENS}, minItems=1)
_JSON_SCHEMA: Final[Schema] = {"type": ["object", "boolean", "null"], "description": "A JSON Schema."}
_PROMPTS: Final[Schema] = {
    "anyOf": [
        {"type": "string"},
        _TOKENS,
        _list({"anyOf": [{"type": "string"}, _TOKENS]}, minItems=1, maxItems=MAX_ANSWERS),
    ]
}
_LIMIT: Final[Schema] = {
    "anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_TOKENS}, {"const": -1}, {"type": "null"}]
}
_FUNCTION_NAME: Final[Schema] = {"type": "string", "pattern": "^[a-zA-Z0-9_.:-]{1,128}$"}
_STOP: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
_CONTENT: Final[Schema] = {
    "anyOf": [
        {"type": "string"},
        _list(_object({"type": {"const": "text"}, "text": {"type": "string"}}, ("type", "text")), minItems=1),
    ]
}

_SAMPLING: Final[Schema] = {
    "temperature": _number(0, 2),
    "top_p": _number(0, 1),
    "top_k": _integer(-1, MAX_TOKENS),
    "min_p": _number(0, 1),
    "repeat_penalty": _number(0.01, 100),
    "repetition_penalty": _number(0.01, 100),
    "repeat_last_n": _integer(0, MAX_TOKENS),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "seed": _integer(-(1 << 63), (1 << 64) - 1),
    "logit_bias": {
        "type": ["object", "null"],
        "patternProperties": {"^[0-9]{1,9}$": {"type": "number", "minimum": -100, "maximum": 100}},
        "additionalProperties": False,
        "maxProperties": MAX_BIASES,
    },
}

_COMMON: Final[Schema] = {
    **_SAMPLING,
    "model": _TEXT,
    "stream": _FLAG,
    "stream_options": {
        **_object({"include_usage": _FLAG, "include_obfuscation": _FLAG, "continuous_usage_stats": {"const": False}}),
        "description": "Only with stream.",
    },
    "max_tokens": _LIMIT,
    "stop": {"anyOf": [{"type": "null"}, _STOP, _list(_STOP, maxItems=MAX_STOPS)]},
    "n": _integer(1, MAX_ANSWERS),
    "ignore_eos": _FLAG,
    "min_tokens": {**_integer(0, MAX_TOKENS), "description": "Other than 0 only with ignore_eos and without stop."},
    "prompt_cache_key": _TEXT,
    "response_format": {"anyOf": [{"type": "null"}, reference("ResponseFormat")]},
    "json_schema": _JSON_SCHEMA,
    "guided_json": _JSON_SCHEMA,
    "grammar": {**_TEXT, "description": "A grammar in GBNF."},
    "guided_grammar": {**_TEXT, "description": "A grammar in GBNF."},
    **{name: {} for name in sorted(IGNORED_FIELDS)},
}

_USAGE: Final = _object(
    {
        "prompt_tokens": {"type": "integer"},
        "completion_tokens": {"type": "integer"},
        "total_tokens": {"type": "integer"},
        "prompt_tokens_details": {"type": "object"},
    },
    ("prompt_tokens", "completion_tokens", "total_tokens"),
)


def _answer(kind: str, choice: Schema) -> Schema:
    return _object(
        {
            "id": {"type": "string"},
            "object": {"const": kind},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "system_fingerprint": {"type": "string"},
            "choices": _list(choice),
            "usage": {"anyOf": [reference("Usage"), {"type": "null"}]},
            "timings": reference("Timings"),
        },
        ("id", "object", "created", "model", "choices"),
    )


def _choice(name: str, schema: Schema) -> Schema:
    return _object(
        {
            "index": {"type": "integer"},
            name: schema,
            "logprobs": {"type": ["object", "null"]},
            "finish_reason": {"enum": ["stop", "length", "tool_calls", "cancelled", None]},
        },
        ("index", name, "finish_reason"),
    )


COMPONENTS: Final[dict[str, Schema]] = {
    "Error": _object(
        {
            "error": _object(
                {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": "string"},
                },
                ("message", "type", "param", "code"),
                closed=False,
            )
        },
        ("error",),
    ),
    "Unavailable": {"anyOf": [reference("Error"), reference("Health")]},
    "ResponseFormat": {
        "anyOf": [
            _object({"type": {"const": "text"}}, ("type",)),
            _object({"type": {"const": "json_object"}, "schema": _JSON_SCHEMA}, ("type",)),
            _object({"type": {"const": "json_schema"}, "schema": {"type": "object"}}, ("type", "schema")),
            _object(
                {
                    "type": {"const": "json_schema"},
                    "json_schema": _object(
                        {
                            "name": {"type": "string"},
                            "description": _TEXT,
                            "schema": {"type": "object"},
                            "strict": _FLAG,
                        },
                        ("name", "schema"),
                    ),
                },
                ("type", "json_schema"),
            ),
        ]
    },
    "Tool": _object(
        {
            "type": {"const": "function"},
            "function": _object(
                {
                    "name": _FUNCTION_NAME,
                    "description": _TEXT,
                    "parameters": {"type": ["object", "null"]},
                    "strict": _FLAG,
                },
                ("name",),
            ),
        },
        ("type", "function"),
    ),
    "ToolChoice": {
        "anyOf": [
            {"enum": ["none", "auto", "required", None]},
            _object(
                {"type": {"const": "function"}, "function": _object({"name": _FUNCTION_NAME}, ("name",))},
                ("type", "function"),
            ),
            _object({"type": {"const": "allowed_tools"}, "allowed_tools": {"type": "object"}}, ("type",)),
        ]
    },
    "Message": {
        "anyOf": [
            _object(
                {"role": {"enum": ["system", "developer", "user"]}, "content": _CONTENT, "name": _TEXT},
                ("role", "content"),
            ),
            _object(
                {
                    "role": {"const": "assistant"},
                    "content": {"anyOf": [_CONTENT, {"type": "null"}]},
                    "reasoning_content": _TEXT,
                    "refusal": _TEXT,
                    "tool_calls": _list(reference("ToolCall")),
                },
                ("role",),
            ),
            _object(
                {
                    "role": {"const": "tool"},
                    "content": _CONTENT,
                    "tool_call_id": {"type": "string", "minLength": 1},
                },
                ("role", "content", "tool_call_id"),
            ),
        ]
    },
    "ToolCall": _object(
        {
            "id": {"type": "string"},
            "type": {"const": "function"},
            "function": _object(
                {"name": {"type": "string", "minLength": 1}, "arguments": {"type": "string"}}, ("name", "arguments")
            ),
        },
        ("id", "type", "function"),
    ),
    "ChatRequest": _object(
        {
            **_COMMON,
            "messages": _list(reference("Message"), minItems=1),
            "max_completion_tokens": _LIMIT,
            "logprobs": _FLAG,
            "top_logprobs": _integer(0, MAX_LOGPROBS),
            "chat_template_kwargs": {"type": ["object", "null"]},
            "reasoning_effort": _TEXT,
            "reasoning_format": {"enum": ["auto", "deepseek", "none", None]},
            "tools": _list(reference("Tool")),
            "tool_choice": reference("ToolChoice"),
            "parallel_tool_calls": _FLAG,
        },
        ("messages",),
    ),
    "CompletionRequest": _object(
        {
            **_COMMON,
            "prompt": _PROMPTS,
            "logprobs": _integer(0, MAX_LOGPROBS),
            "n_predict": _LIMIT,
        },
        ("prompt",),
    ),
    "ResponseRequest": _object(
        {
            "model": _TEXT,
            "input": {"anyOf": [{"type": "string"}, _list(reference("ResponseMessage"), minItems=1)]},
            "instructions": _TEXT,
            "max_output_tokens": _integer(1, MAX_TOKENS),
            "temperature": _number(0, 2),
            "top_p": _number(0, 1),
            "stream": _FLAG,
            "stream_options": {"type": ["object", "null"]},
            "text": _object({"format": {"type": "object"}, "verbosity": _TEXT}),
            "reasoning": {"type": ["object", "null"]},
            "prompt_cache_key": _TEXT,
            "metadata": {"type": ["object", "null"]},
        },
        ("input",),
        closed=False,
    ),
    "ResponseMessage": _object(
        {
            "type": {"const": "message"},
            "role": {"enum": ["user", "assistant", "system", "developer"]},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    _list(
                        _object(
                            {"type": {"enum": ["text", "input_text", "output_text"]}, "text": {"type": "string"}},
                            ("type", "text"),
                            closed=False,
                        )
                    ),
                ]
            },
        },
        ("role", "content"),
        closed=False,
    ),
    "EmbeddingRequest": _object(
        {
            "model": _TEXT,
            "input": _PROMPTS,
            "encoding_format": {"enum": ["float", "base64", None]},
            "dimensions": _integer(1, 1 << 20),
            "user": {},
        },
        ("input",),
    ),
    "Embeddings": _object(
        {
            "object": {"const": "list"},
            "model": {"type": "string"},
            "data": _list(
                _object(
                    {
                        "object": {"const": "embedding"},
                        "index": {"type": "integer"},
                        "embedding": {"anyOf": [_list({"type": "number"}), {"type": "string"}]},
                    },
                    ("object", "index", "embedding"),
                )
            ),
            "usage": {"type": "object"},
        },
        ("object", "model", "data", "usage"),
    ),
    "TokenizeRequest": _object(
        {
            "model": _TEXT,
            "content": _TEXT,
            "prompt": _TEXT,
            "messages": _list(reference("Message"), minItems=1),
            "add_special": _FLAG,
            "add_special_tokens": _FLAG,
            "parse_special": _FLAG,
            "with_pieces": _FLAG,
        }
    ),
    "DetokenizeRequest": _object(
        {"model": _TEXT, "tokens": _list({"type": "integer", "minimum": 0, "maximum": MAX_TOKENS})}, ("tokens",)
    ),
    "SlotRequest": _object({"filename": {"type": "string"}}, closed=False),
    "Usage": _USAGE,
    "Timings": _object(
        {
            **{name: {"type": "integer"} for name in ("cache_n", "prompt_n", "predicted_n")},
            **{name: {"type": "number"} for name in ("prompt_ms", "prompt_per_second", "predicted_ms")},
            "predicted_per_second": {"type": "number"},
            "draft_n": {"type": "integer"},
            "draft_n_accepted": {"type": "integer"},
        },
        ("cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms"),
    ),
    "ChatAnswer": _answer("chat.completion", _choice("message", {"type": "object"})),
    "ChatChunk": _answer("chat.completion.chunk", _choice("delta", {"type": "object"})),
    "CompletionAnswer": _answer("text_completion", _choice("text", {"type": "string"})),
    "Response": _object(
        {"id": {"type": "string"}, "object": {"const": "response"}, "output": _list({"type": "object"})},
        ("id", "object", "output"),
        closed=False,
    ),
    "ResponseEvent": _object({"type": {"type": "string"}, "sequence_number": {"type": "integer"}}, closed=False),
    "Model": _object(
        {
            "id": {"type": "string"},
            "object": {"const": "model"},
            "created": {"type": "integer"},
            "owned_by": {"type": "string"},
            "context_length": {"type": "integer"},
            "max_model_len": {"type": "integer"},
        },
        ("id", "object", "created", "owned_by"),
    ),
    "ModelList": _object({"object": {"const": "list"}, "data": _list(reference("Model"))}, ("object", "data")),
    "Tokens": _object(
        {"tokens": _list({}), "count": {"type": "integer"}, "max_model_len": {"type": "integer"}},
        ("tokens", "count", "max_model_len"),
    ),
    "Text": _object({"content": {"type": "string"}, "prompt": {"type": "string"}}, ("content", "prompt")),
    "Health": _object({"status": {"enum": ["ok", "unavailable"]}, "reason": {"type": "string"}}, ("status",)),
    "Status": _object({}, closed=False),
    "Properties": _object({}, closed=False),
    "Slots": _list(_object({"id": {"type": "integer"}, "n_ctx": {"type": "integer"}}, ("id", "n_ctx"), closed=False)),
    "SlotResult": _object({"id_slot": {"type": "integer"}}, ("id_slot",), closed=False),
    "Document": _object({"openapi": {"type": "string"}}, ("openapi",), closed=False),
}
"""The schemas that the document refers to."""
