from __future__ import annotations

import json

import pytest

from orchestrator.api.failures import error_body, retry_after, status_of
from orchestrator.api.formats import ANY_FORMAT, AnswerFormat
from orchestrator.api.messages import NO_TOOLS
from orchestrator.api.schema import ModelNames, parse_chat_request, parse_completion_request
from orchestrator.api.tools.grammar import Tool
from orchestrator.errors import (
    BusyError,
    ChatTemplateError,
    ComputeError,
    ContextLengthError,
    OwnershipError,
    RequestError,
    WorkerTimeoutError,
)
from orchestrator.gateway.sampling import SamplingParameters
from orchestrator.gateway.template import ChatMessage, ToolCall

NAMES = ModelNames("smollm2-moe", "smollm2-moe.gguf")
HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def chat(**fields):
    return parse_chat_request({"messages": HI, **fields}, NAMES, 42)


def test_the_defaults_are_those_of_the_openai_api():
    request = chat()
    assert request.messages == (ChatMessage("user", "Hi"),)
    options = request.options
    assert options.sampling == SamplingParameters(temperature=1.0, top_p=1.0, seed=42)
    assert (options.max_tokens, options.stop, options.stream, options.include_usage) == (None, (), False, False)
    assert options.top_logprobs is None


def test_all_fields_arrive():
    request = chat(
        model="smollm2-moe.gguf",
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repeat_penalty=1.1,
        repeat_last_n=32,
        presence_penalty=-1,
        frequency_penalty=1.5,
        logit_bias={"7": -100, "8": 3.5},
        seed=7,
        max_tokens=9,
        stop=["a", "b"],
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=5,
        ignore_eos=True,
        chat_template_kwargs={"enable_thinking": False},
        reasoning_effort="low",
        user="me",
        tools=[],
        response_format={"type": "text"},
        n=3,
        prompt_cache_key="session",
        typical_p=1.0,
        echo=False,
    )
    options = request.options
    assert options.sampling == SamplingParameters(0.5, 40, 0.9, 0.05, 1.1, 32, -1.0, 1.5, ((7, -100.0), (8, 3.5)), 7)
    assert (options.max_tokens, options.stop, options.stream, options.include_usage) == (9, ("a", "b"), True, True)
    assert (options.top_logprobs, options.ignore_end, options.n, options.session) == (5, True, 3, "session")
    assert [options.sampling_of(answer).seed for answer in range(3)] == [7, 8, 9]
    assert (options.format, request.tools) == (ANY_FORMAT, NO_TOOLS)
    assert request.variables == {"enable_thinking": False, "reasoning_effort": "low"}


def test_null_is_absent():
    assert chat(temperature=None, stop=None, max_tokens=None, stream=None, logit_bias=None, tools=None) == chat()


def test_max_completion_tokens_is_the_newer_name():
    assert chat(max_completion_tokens=5, max_tokens=9).options.max_tokens == 5
    assert chat(max_tokens=-1).options.max_tokens is None


def test_content_in_parts_and_the_developer_role():
    messages = [
        {"role": "developer", "content": "Be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
    ]
    assert chat(messages=messages).messages == (ChatMessage("system", "Be kind"), ChatMessage("user", "ab", "Ann"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, None),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [*HI, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ({"messages": [*HI, {"role": "function", "content": "x", "name": "f"}]}, "messages[1].role"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"seed": 1 << 64}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"1": 200}}, "logit_bias.1"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "no blanks"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [TOOL], "grammar": "root ::= x"}, "grammar"),
        ({"tools": [TOOL], "ignore_eos": True}, "ignore_eos"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": "json"}, None),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"type": "object"}}},
            "response_format.json_schema.type",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "grammar": "root ::= x"}, "response_format"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"json_schema": "object"}, "json_schema"),
        ({"grammar": 5}, "grammar"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"min_tokens": 5, "ignore_eos": True, "stop": "x"}, "min_tokens"),
        ({"min_tokens": -1, "ignore_eos": True}, "min_tokens"),
        ({"mirostat": 2}, "mirostat"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"temprature": 0}, "temprature"),
        ({"prompt": "x"}, "prompt"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_name(fields, param):
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    json.dumps(error_body(caught.value), allow_nan=False)


def test_what_load_generators_send_is_taken_where_it_changes_nothing():
    """llama-benchy asks for token ids, of which it needs none, and for answers of an exact length."""
    wanted = {"max_tokens": 16, "min_tokens": 16, "ignore_eos": True, "return_token_ids": True, "cache_prompt": False}
    options = chat(**wanted).options
    assert (options.max_tokens, options.ignore_end) == (16, True)
    assert chat(min_tokens=0).options.max_tokens is None


def test_a_misspelt_field_gets_a_suggestion():
    with pytest.raises(RequestError, match="did you mean 'temperature'"):
        chat(temprature=0)


def test_another_model_is_404():
    with pytest.raises(RequestError) as caught:
        chat(model="gpt-4o")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    assert "smollm2-moe" in str(caught.value)


@pytest.mark.parametrize("body", [None, [], "x", 3])
def test_a_body_that_is_no_object(body):
    with pytest.raises(RequestError):
        parse_chat_request(body, NAMES, 1)


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("Hi", ("Hi",)),
        ("", ("",)),
        (["Hi"], ("Hi",)),
        ([1, 2], ((1, 2),)),
        ([[1, 2]], ((1, 2),)),
        (["a", "b"], ("a", "b")),
        ([[1], "b"], ((1,), "b")),
    ],
)
def test_prompts_of_completions(prompt, parsed):
    assert parse_completion_request({"prompt": prompt}, NAMES, 1).prompts == parsed


@pytest.mark.parametrize("prompt", [None, 3, [], [[]], [1, "a"], [True], {"a": 1}, [1.5], ["a"] * 65])
def test_prompts_that_are_refused(prompt):
    with pytest.raises(RequestError) as caught:
        parse_completion_request({"prompt": prompt}, NAMES, 1)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("fields", [{"echo": True}, {"suffix": "end"}, {"best_of": 3}, {"logprobs": 21}])
def test_completion_fields_that_are_refused(fields):
    with pytest.raises(RequestError):
        parse_completion_request({"prompt": "x", **fields}, NAMES, 1)
    assert parse_completion_request({"prompt": "x", "echo": False, "suffix": "", "logprobs": 2}, NAMES, 1)


def test_tools_and_which_of_them_may_be_called():
    other = {"type": "function", "function": {"name": "g", "description": "G.", "parameters": {}, "strict": True}}
    tools = chat(tools=[TOOL, other]).tools
    assert (
        tools.callable
        == tools.offered
        == (
            Tool("f", "", {"type": "object", "properties": {}}, False),
            Tool("g", "G.", None, True),
        )
    )
    assert (tools.required, tools.parallel) == (False, True)
    assert chat(tools=[TOOL], tool_choice="none").tools == NO_TOOLS
    assert chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=False).tools.required
    named = chat(tools=[TOOL, other], tool_choice={"type": "function", "function": {"name": "g"}}).tools
    assert ([tool.name for tool in named.callable], len(named.offered), named.required) == (["g"], 2, True)
    some = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}
    allowed = chat(tools=[TOOL, other], tool_choice={"type": "allowed_tools", "allowed_tools": some}).tools
    assert ([tool.name for tool in allowed.callable], allowed.required) == (["f"], False)


def test_messages_with_calls_and_their_results():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]},
    ]
    assert chat(messages=messages).messages[1:] == (
        ChatMessage("assistant", "", None, "Hm.", (ToolCall("f", '{"a": 1}', "c1"),)),
        ChatMessage("tool", "42", tool_call_id="c1"),
    )


SCHEMA = {"type": "object", "properties": {"a": {"type": "null"}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"json_schema": SCHEMA},
        {"guided_json": SCHEMA},
    ],
)
def test_every_way_to_ask_for_a_schema(fields):
    assert chat(**fields).options.format == AnswerFormat(schema=SCHEMA, param=next(iter(fields)))


def test_other_formats():
    assert chat(response_format={"type": "json_object"}).options.format.schema == {"type": "object"}
    assert chat(grammar="root ::= [a]").options.format == AnswerFormat(grammar="root ::= [a]", param="grammar")
    assert chat(grammar="").options.format == ANY_FORMAT


def test_errors_in_the_form_of_the_api():
    error = WorkerTimeoutError("no answer within 5 s", worker="w1", layer=3, hint="look at it")
    assert status_of(error) == 503
    assert error_body(error)["error"] == {
        "message": "worker w1, layer 3: no answer within 5 s; look at it",
        "type": "server_error",
        "param": None,
        "code": "worker_unavailable",
        "worker": "w1",
        "layer": 3,
    }
    assert status_of(OwnershipError("layer 3 has no owner")) == 503
    assert status_of(ComputeError("failed")) == 500
    busy = BusyError("full", retry_after=7.4)
    assert (status_of(busy), retry_after(busy), error_body(busy)["error"]["code"]) == (429, 7, "queue_full")
    assert (retry_after(error), retry_after(ComputeError("failed"))) == (1, None)
    assert (status_of(ChatTemplateError("no")), error_body(ChatTemplateError("no"))["error"]["type"]) == (
        400,
        "invalid_request_error",
    )
    body = error_body(ContextLengthError(700, 512))["error"]
    assert (body["type"], body["code"]) == ("exceed_context_size_error", "context_length_exceeded")
    assert (body["n_prompt_tokens"], body["n_ctx"]) == (700, 512)
    assert "700" in body["message"]
    assert "512" in body["message"]
