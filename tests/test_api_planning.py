"""From a request to its prompt, grammar and reader, for templates of several kinds."""

from __future__ import annotations

import json

import pytest
from fake_engine import TEMPLATE, FakeModel
from grammar_twin import Author, Matcher
from test_api_schema import NAMES
from test_tools import HERMES, SINGLE, read, template

from orchestrator.api.planning import ChatPlanner
from orchestrator.api.schema import parse_chat_request
from orchestrator.api.tools.channels import ChannelReader
from orchestrator.gateway.template import ChatTemplate

HI = [{"role": "user", "content": "Hi"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"what": {"enum": ["sky", "sea"]}}, "required": ["what"]},
    },
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"what": "sky"}}\n</tool_call>'

CHANNELS = ChatTemplate(
    """
{%- if tools %}{{ "<|start|>developer<|message|>" }}{% for t in tools %}{{ t.function.name + t.function.description }}
{%- endfor %}{{ "<|end|>" }}{% endif %}
{%- for m in messages %}
{%- if m.tool_calls %}{% set f = m.tool_calls[0].function %}{{ "<|start|>assistant to=functions." + f.name }}
{{- "<|channel|>commentary json<|message|>" }}{{ f.arguments | tojson }}{{ "<|call|>" }}
{%- elif m.role == "assistant" %}{{ "<|start|>assistant<|channel|>final<|message|>" + m.content + "<|end|>" }}
{%- else %}{{ "<|start|>" + m.role + "<|message|>" + m.content + "<|end|>" }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
)


def plan(chat, **fields):
    return ChatPlanner(chat, FakeModel()).plan(parse_chat_request({"messages": HI, **fields}, NAMES, 1))


def prompt_of(planned):
    return b"".join(FakeModel().piece(token, special=True) for token in planned.prompt).decode()


def test_a_plain_chat_needs_no_grammar():
    planned = plan(template(HERMES))
    assert planned.grammar is None
    assert read(planned.new_reader(), CALL) == ("", CALL, [])  # without tools there are no calls


@pytest.mark.parametrize("inside", [False, True])
def test_a_schema_behind_thoughts(inside):
    tail = "<think>\n" if inside else ""
    planned = plan(template("{# <think> #}" + HERMES, tail), response_format=FORMAT)
    grammar = Matcher(planned.grammar)
    thought = ("" if inside else "<think>") + "A word or two.</think>\n\n"
    assert grammar.accepts(thought + '{"a": 1}')
    assert grammar.accepts('{"a": 1}') is not inside
    assert not grammar.accepts(thought + "a = 1")
    assert read(planned.new_reader(), thought + '{"a": 1}') == ("A word or two.", '{"a": 1}', [])


def test_a_schema_or_calls():
    chat = template(HERMES)
    grammar = Matcher(plan(chat, response_format=FORMAT, tools=[TOOL]).grammar)
    assert grammar.accepts('{"a": 1}')
    assert grammar.accepts(CALL)
    assert not grammar.accepts("Words")
    only_calls = Matcher(plan(chat, response_format=FORMAT, tools=[TOOL], tool_choice="required").grammar)
    assert only_calls.accepts(CALL)
    assert not only_calls.accepts('{"a": 1}')
    one = Matcher(plan(chat, tools=[TOOL], parallel_tool_calls=False).grammar)
    assert one.accepts(f"See: {CALL}")
    assert not one.accepts(f"See: {CALL}\n{CALL}")
    assert Matcher(plan(chat, tools=[TOOL]).grammar).accepts(f"See: {CALL}\n{CALL}")


def test_a_grammar_of_ones_own_describes_the_whole_answer():
    planned = plan(template("{# <think> #}" + HERMES, "<think>\n"), grammar='root ::= "yes"')
    assert planned.grammar == 'root ::= "yes"'
    assert read(planned.new_reader(), "yes") == ("", "yes", [])


def test_thoughts_may_stay_in_the_text():
    planned = plan(template("{# <think> #}" + HERMES), reasoning_format="none")
    assert read(planned.new_reader(), "<think>a</think>b") == ("", "<think>a</think>b", [])


def test_tools_are_told_by_the_template_or_explained():
    native = plan(template(HERMES), tools=[TOOL])
    assert '"name": "look"' in prompt_of(native)
    assert "You can call functions" not in prompt_of(native)
    explained = plan(ChatTemplate(TEMPLATE, bos="<s>"), tools=[TOOL])
    assert "You can call functions" in prompt_of(explained)
    assert prompt_of(explained).count("<|im_start|>") == 3
    nothing = plan(ChatTemplate(TEMPLATE, bos="<s>"), tools=[TOOL], tool_choice="none")
    assert "look" not in prompt_of(nothing)
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{% endif %}" + TEMPLATE
    assert "You can call functions" in prompt_of(plan(ChatTemplate(refusing, bos="<s>"), tools=[TOOL]))


def conversation():
    calls = [
        {
            "id": f"c{number}",
            "type": "function",
            "function": {"name": "look", "arguments": json.dumps({"what": what})},
        }
        for number, what in enumerate(("sky", "sea"))
    ]
    results = [
        {"role": "tool", "tool_call_id": f"c{number}", "content": text}
        for number, text in enumerate(("blue", "grey"))
    ]
    return [*HI, {"role": "assistant", "content": None, "tool_calls": calls}, *results]


@pytest.mark.parametrize("chat", [template(SINGLE), CHANNELS])
def test_templates_with_one_call_in_a_message_get_one(chat):
    prompt = prompt_of(plan(chat, messages=conversation(), tools=[TOOL]))
    places = [prompt.index(word) for word in ('"sky"', "blue", '"sea"', "grey")]
    assert places == sorted(places)


# --- channels -------------------------------------------------------------------------------------------------

THINK = "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant"
TOLD = THINK + "<|channel|>final<|message|>Hello"
CALLED = THINK + '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"what": "sky"}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TOLD, ("I think.", "Hello", [])),
        (CALLED, ("I think.", "", [["look", '{"what": "sky"}']])),
        (CALLED + "<|call|>", ("I think.", "", [["look", '{"what": "sky"}']])),
        (' to=functions.look<|channel|>commentary json<|message|>{"a": 1}', ("", "", [["look", '{"a": 1}']])),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + CALLED,
            ("I think.", "I look.", [["look", '{"what": "sky"}']]),
        ),
        ("Hello", ("", "Hello", [])),
        ("<|channel|>ana", ("", "", [])),
        (TOLD + "<|en", ("I think.", "Hello<|en", [])),
    ],
)
def test_channels_are_read_the_same_however_they_are_cut(text, expected):
    for seed in (None, *range(20)):
        assert read(ChannelReader(), text, seed) == expected


def test_the_grammar_of_channels():
    assert plan(CHANNELS).grammar is None
    auto = Matcher(plan(CHANNELS, tools=[TOOL]).grammar)
    assert auto.accepts(TOLD)
    assert auto.accepts(CALLED)
    assert not auto.accepts(CALLED.replace("sky", "sun"))
    required = plan(CHANNELS, tools=[TOOL], tool_choice="required")
    assert Matcher(required.grammar).accepts(CALLED)
    assert not Matcher(required.grammar).accepts(TOLD)
    for seed in range(20):
        _, _, ((name, arguments),) = read(required.new_reader(), Author(required.grammar, seed).text(), seed)
        assert (name, json.loads(arguments)["what"] in ("sky", "sea")) == ("look", True)
    formed = Matcher(plan(CHANNELS, response_format=FORMAT).grammar)
    assert formed.accepts(TOLD.replace("Hello", '{"a": 5}'))
    assert not formed.accepts(TOLD)
