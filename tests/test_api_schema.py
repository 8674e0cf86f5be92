from __future__ import annotations

import json

import pytest

from orchestrator.api.failures import error_body, status_of
from orchestrator.api.schema import ModelNames, parse_chat_request, parse_completion_request
from orchestrator.errors import (
    ChatTemplateError,
    ComputeError,
    ContextLengthError,
    OwnershipError,
    RequestError,
    WorkerTimeoutError,
)
from orchestrator.gateway.sampling import SamplingParameters
from orchestrator.gateway.template import ChatMessage

NAMES = ModelNames("smollm2-moe", "smollm2-moe.gguf")
HI = [{"role": "user", "content": "Hi"}]


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
        n=1,
    )
    options = request.options
    assert options.sampling == SamplingParameters(0.5, 40, 0.9, 0.05, 1.1, 32, -1.0, 1.5, ((7, -100.0), (8, 3.5)), 7)
    assert (options.max_tokens, options.stop, options.stream, options.include_usage) == (9, ("a", "b"), True, True)
    assert (options.top_logprobs, options.ignore_end) == (5, True)
    assert request.variables == {"enable_thinking": False, "reasoning_effort": "low"}


def test_null_is_absent():
    assert chat(temperature=None, stop=None, max_tokens=None, stream=None, logit_bias=None, tools=None) == chat()


def test_max_completion_tokens_is_the_newer_name():
    assert chat(max_completion_tokens=5, max_tokens=9).options.max_tokens == 5


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
        ({"messages": [*HI, {"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[1].role"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}, "messages[0].role"),
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
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"json_schema": {"type": "object"}}, "json_schema"),
        ({"grammar": "root ::= x"}, "grammar"),
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
    [("Hi", "Hi"), ("", ""), (["Hi"], "Hi"), ([1, 2], (1, 2)), ([[1, 2]], (1, 2))],
)
def test_prompts_of_completions(prompt, parsed):
    assert parse_completion_request({"prompt": prompt}, NAMES, 1).prompt == parsed


@pytest.mark.parametrize("prompt", [None, 3, [], ["a", "b"], [[1], [2]], [1, "a"], [True], {"a": 1}, [1.5]])
def test_prompts_that_are_refused(prompt):
    with pytest.raises(RequestError) as caught:
        parse_completion_request({"prompt": prompt}, NAMES, 1)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("fields", [{"echo": True}, {"suffix": "end"}, {"best_of": 3}, {"logprobs": 21}])
def test_completion_fields_that_are_refused(fields):
    with pytest.raises(RequestError):
        parse_completion_request({"prompt": "x", **fields}, NAMES, 1)
    assert parse_completion_request({"prompt": "x", "echo": False, "suffix": "", "logprobs": 2}, NAMES, 1)


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
    assert (status_of(ChatTemplateError("no")), error_body(ChatTemplateError("no"))["error"]["type"]) == (
        400,
        "invalid_request_error",
    )
    body = error_body(ContextLengthError(700, 512))["error"]
    assert (body["type"], body["code"]) == ("exceed_context_size_error", "context_length_exceeded")
    assert (body["n_prompt_tokens"], body["n_ctx"]) == (700, 512)
    assert "700" in body["message"]
    assert "512" in body["message"]
