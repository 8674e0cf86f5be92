"""Tool calls: the syntax learned from templates, its grammar, and reading what such a grammar writes."""

from __future__ import annotations

import json
import random

import pytest
from grammar_twin import Author, Matcher
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.api.constraints.writer import GrammarWriter
from orchestrator.api.tools.grammar import Tool, answer_element, calls_element, with_thoughts
from orchestrator.api.tools.prompting import explain_tools, without_system
from orchestrator.api.tools.reader import AnswerReader, CallBegins, CallContinues, Said, Thought
from orchestrator.api.tools.syntax import HOLE, PLAIN_SYNTAX, CallSyntax, learn_syntax, thoughts_of
from orchestrator.errors import RequestError
from orchestrator.gateway.template import ChatMessage, ChatTemplate, ToolCall

TURNS = """
{%- for m in messages -%}
<|{{ m.role }}|>{{ m.content }}
{%- if m.tool_calls %}%CALLS%{% endif -%}
<|end|>
{% endfor -%}
{% if tools %}Tools: {{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}<|assistant|>%TAIL%{% endif %}"""


def template(calls, tail=""):
    return ChatTemplate(TURNS.replace("%CALLS%", calls).replace("%TAIL%", tail))


EACH = "{% for c in m.tool_calls %}{% set f = c.function %}"
HERMES = (
    EACH + '{{ "\n" }}<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
)
LISTED = (
    "[TOOL_CALLS][{% for c in m.tool_calls %}{% set f = c.function %}"
    '{{ {"name": f.name, "arguments": f.arguments, "id": c.id} | tojson }}{{ ", " if not loop.last }}{% endfor %}]'
)
NAMED = EACH + "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ f.arguments | tojson }}{% endfor %}"
SINGLE = (
    '{% if m.tool_calls | length > 1 %}{{ raise_exception("one call only") }}{% endif %}'
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
)
COUNTED = (
    "<|calls|>{% for c in m.tool_calls %}<|call|>functions.{{ c.function.name }}:{{ loop.index0 }}<|args|>"
    "{{ c.function.arguments | tojson }}<|/call|>{% endfor %}<|/calls|>"
)
SPREAD = (
    EACH + "\n<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments | items %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
)
TYPED = (
    EACH + '<calls><call name="{{ f.name }}">{% for k, v in f.arguments | items %}<arg k="{{ k }}" text="'
    '{{ "yes" if v is string else "no" }}">{{ v if v is string else v | tojson }}</arg>{% endfor %}</call></calls>'
    "{% endfor %}"
)
AS_TEXT = EACH + "<tool_call>{{ f.name }}\n{{ '```' }}{{ f.arguments + '```' }}</tool_call>{% endfor %}"
STYLES = {
    "hermes": HERMES,
    "listed": LISTED,
    "named": NAMED,
    "single": SINGLE,
    "counted": COUNTED,
    "spread": SPREAD,
    "typed": TYPED,
    "as text": AS_TEXT,
}

WEATHER = Tool(
    "get_weather",
    "Tells the weather.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"enum": ["C", "F"]},
            "options": {"type": "object", "properties": {"wind": {"type": "boolean"}}, "required": ["wind"]},
        },
        "required": ["city"],
    },
    False,
)
NOW = Tool("get", "Tells the time.", None, False)
TOOLS = [WEATHER, NOW]


def is_text(tool, argument):
    return next(t for t in TOOLS if t.name == tool).is_text(argument)


def read(reader, text, seed=None):
    """Feed a text, in random pieces with a seed; gives (thoughts, text, calls)."""
    pieces, source = [], random.Random(seed)
    while text:
        length = len(text) if seed is None else source.randint(1, 7)
        pieces += reader.feed(text[:length])
        text = text[length:]
    pieces += reader.finish()
    calls = {}
    for piece in pieces:
        if isinstance(piece, CallBegins):
            assert piece.index == len(calls)
            calls[piece.index] = [piece.name, ""]
        elif isinstance(piece, CallContinues):
            calls[piece.index][1] += piece.text
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
    return thoughts, "".join(piece.text for piece in pieces if isinstance(piece, Said)), list(calls.values())


@pytest.mark.parametrize("style", STYLES)
def test_an_answer_in_the_learned_syntax_is_what_the_template_writes(style):
    chat = template(STYLES[style])
    syntax = learn_syntax(chat, ["<|end|>"])
    assert syntax is not None
    values = {"city": 'a "b" {\\} é', "days": 3, "options": {"wind": True}}
    calls = (ToolCall("get_weather", json.dumps(values), "abcdefghi"), ToolCall("get", "{}", "abcdefghj"))
    calls = calls if syntax.between is not None else calls[:1]
    text = chat.render([ChatMessage("user", "Q"), ChatMessage("assistant", "", tool_calls=calls)], answer_next=False)
    answer = text.partition("<|assistant|>")[2].removesuffix("<|end|>\n").lstrip()
    writer = GrammarWriter()
    inner = calls_element(writer, syntax, TOOLS, parallel=True)
    element = answer_element(writer, body=None, calls=inner, marker=syntax.marker, required=True)
    assert Matcher(writer.text(element)).accepts(answer)
    for seed in (None, *range(20)):
        thoughts, said, found = read(AnswerReader(syntax, is_text=is_text), answer, seed)
        assert (thoughts, said) == ("", "")
        assert [(name, json.loads(arguments)) for name, arguments in found] == [
            (call.name, json.loads(call.arguments)) for call in calls
        ]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("parallel", [False, True])
def test_what_the_grammar_writes_is_read_as_calls(style, parallel):
    syntax = learn_syntax(template(STYLES[style]), ["<|end|>"])
    writer = GrammarWriter()
    inner = calls_element(writer, syntax, TOOLS, parallel=parallel)
    required = writer.text(answer_element(writer, body=None, calls=inner, marker=syntax.marker, required=True))
    writer = GrammarWriter()
    inner = calls_element(writer, syntax, TOOLS, parallel=parallel)
    auto = Matcher(writer.text(answer_element(writer, body=None, calls=inner, marker=syntax.marker, required=False)))
    assert auto.accepts("Just words, also < and [ and {.")
    for seed in range(30):
        text = Author(required, seed, alphabet='ab 1-é"\\{').text()
        assert auto.accepts(f"Let me see. {text}")
        _, said, calls = read(AnswerReader(syntax, is_text=is_text), f"Let me see. {text}", seed)
        assert said == "Let me see."
        assert 1 <= len(calls) <= (99 if parallel and syntax.between is not None else 1)
        for name, arguments in calls:
            values = json.loads(arguments)
            if name == "get":
                assert values == {}
                continue
            assert isinstance(values["city"], str)
            assert values.get("days", 1) in range(1, 10)
            assert values.get("unit", "C") in ("C", "F")
            assert isinstance(values.get("options", {"wind": True})["wind"], bool)


def test_what_is_learned():
    assert learn_syntax(template(HERMES)) == PLAIN_SYNTAX
    listed = learn_syntax(template(LISTED))
    assert listed == CallSyntax(
        '[TOOL_CALLS][{"name": "',
        "[TOOL_CALLS]",
        '", "arguments": ',
        f', "id": "{HOLE}"}}, {{"name": "',
        f', "id": "{HOLE}"}}]',
    )
    assert learn_syntax(template(COUNTED)).middle == f":{HOLE}<|args|>"
    assert learn_syntax(template(SINGLE)).between is None
    assert learn_syntax(template(SPREAD)).arguments.text.end.startswith("\n</parameter>\n")


@pytest.mark.parametrize("calls", ["", "{{ m.tool_calls[0].function.name }}", "{{ m.tool_calls }}"])
def test_templates_without_a_syntax(calls):
    assert learn_syntax(template(calls)) is None


def test_the_end_token_is_no_part_of_a_call():
    chat = template(HERMES.replace("</tool_call>", "</tool_call><|call|>"))
    assert learn_syntax(chat, ["<|call|>"]).end == "}\n</tool_call>"


def test_thoughts_in_front_of_calls():
    chat = template("<think>\n\n</think>\n\n" + HERMES, tail="<think>\n")
    assert learn_syntax(chat) == PLAIN_SYNTAX
    assert thoughts_of(chat) == ("<think>", "</think>")
    assert thoughts_of(template(HERMES)) is None


MARKS = ("<think>", "</think>")


@pytest.mark.parametrize(
    ("inside", "text", "expected"),
    [
        (True, "Hm.\n</think>\n\nYes.", ("Hm.", "Yes.", [])),
        (True, "\nHm < </thin\n", ("Hm < </thin", "", [])),
        (False, "<think>\nHm.\n</think>Yes.", ("Hm.", "Yes.", [])),
        (False, "\n<think></think>\n", ("", "", [])),
        (False, "Yes <think> no", ("", "Yes <think> no", [])),
        (False, "<thi", ("", "<thi", [])),
        (False, "  Yes ", ("", "  Yes ", [])),
        (True, "a </think> b </think> c", ("a", "b </think> c", [])),
        (True, 'a</think>\n<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>', ("a", "", [["get", "{}"]])),
        (False, '<tool_call>\n{"name": "get", "arguments": {"x": "}', ("", "", [["get", '{"x": "}']])),
        (False, '<tool_call>\n{"name": "ge', ("", "", [])),
        (False, '<tool_call>\n{"name": "get", "arguments": {}}\n</tool', ("", "", [["get", "{}"]])),
        (False, "A <tool_call", ("", "A <tool_call", [])),
    ],
)
def test_answers_are_read_the_same_however_they_are_cut(inside, text, expected):
    for seed in (None, *range(30)):
        thoughts, said, calls = read(AnswerReader(PLAIN_SYNTAX, MARKS, inside=inside), text, seed)
        assert (thoughts.rstrip(), said, calls) == (expected[0], expected[1], expected[2])


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "\n", '{"name": "', "a", '"', "}", "{", " "]))
)
def test_no_text_breaks_the_reader(parts):
    text = "".join(parts)
    for inside in (False, True):
        whole = read(AnswerReader(PLAIN_SYNTAX, MARKS, inside=inside), text)
        assert read(AnswerReader(PLAIN_SYNTAX, MARKS, inside=inside), text, 1) == whole
    assert read(AnswerReader(), text) == ("", text, [])


def test_grammars_with_thoughts():
    for inside in (False, True):
        writer = GrammarWriter()
        grammar = Matcher(writer.text(with_thoughts(writer, '"yes"', MARKS, inside=inside)))
        assert grammar.accepts("yes") is not inside
        assert grammar.accepts(("" if inside else "<think>") + "Hm, no </thin yes\n</think>\n\nyes")
        assert not grammar.accepts(("" if inside else "<think>") + "Hm</think>no")


def test_a_schema_that_cannot_be_enforced_is_an_error_only_for_strict_tools():
    loose = Tool("f", "", {"type": "object", "properties": {"a": {"type": "number", "multipleOf": 2}}}, False)
    writer = GrammarWriter()
    grammar = Matcher(writer.text(calls_element(writer, PLAIN_SYNTAX, [loose], parallel=False)))
    assert grammar.accepts('\n{"name": "f", "arguments": {"b": []}}\n</tool_call>')
    with pytest.raises(RequestError, match="multipleOf"):
        calls_element(GrammarWriter(), PLAIN_SYNTAX, [Tool("f", "", loose.parameters, True)], parallel=False)
    spread = learn_syntax(template(SPREAD))
    strict = Tool("f", "", {"type": "object", "properties": {"a": {"type": "string", "maxLength": 2}}}, True)
    with pytest.raises(RequestError, match="plain text"):
        calls_element(GrammarWriter(), spread, [strict], parallel=False)


def test_many_tools_with_similar_names():
    tools = [Tool(f"server_tool_{n}", "", None, False) for n in range(200)]
    writer = GrammarWriter()
    grammar = Matcher(writer.text(calls_element(writer, PLAIN_SYNTAX, tools, parallel=True)))
    assert len(grammar.after(grammar.stacks, '\n{"name": "server_tool_1')) <= 11
    assert grammar.accepts('\n{"name": "server_tool_123", "arguments": {}}\n</tool_call>')


def test_tools_explained_in_the_prompt():
    messages = [
        ChatMessage("user", "Weather?"),
        ChatMessage("assistant", "", tool_calls=(ToolCall("get", '{"a": 1}', "1"), ToolCall("get", "{}", "2"))),
        ChatMessage("tool", "sunny", tool_call_id="1"),
        ChatMessage("tool", "12:00", tool_call_id="2"),
    ]
    system, user, calls, results = explain_tools(messages, TOOLS, required=False)
    assert (system.role, user.content, results.role) == ("system", "Weather?", "user")
    assert '"name": "get_weather"' in system.content
    assert calls.content.count("<tool_call>") == 2
    assert results.content == "<tool_response>\nsunny\n</tool_response>\n<tool_response>\n12:00\n</tool_response>"
    _, _, found = read(AnswerReader(PLAIN_SYNTAX), calls.content)
    assert found == [["get", '{"a": 1}'], ["get", "{}"]]
    joined = without_system([ChatMessage("system", "S"), ChatMessage("user", "U")])
    assert joined == [ChatMessage("user", "S\n\nU")]
    kept = explain_tools([ChatMessage("system", "Be kind"), ChatMessage("user", "Hi")], TOOLS, required=True)
    assert kept[0].content.startswith("Be kind\n\nYou can call")
    assert explain_tools(messages[:1], [], required=False) == messages[:1]
