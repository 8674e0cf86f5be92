"""JSON Schema as grammars; the oracle is a validator that knows nothing of them."""

from __future__ import annotations

import json
import re

import jsonschema_rs
import pytest
from grammar_twin import Author, Matcher
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.api.constraints.gbnf import parse_grammar
from orchestrator.api.constraints.json_schema import add_schema
from orchestrator.api.constraints.numbers import integers_between, numbers_between
from orchestrator.api.constraints.schema_values import FORMATS
from orchestrator.api.constraints.writer import GrammarWriter, Words, text_until
from orchestrator.engine.model import Model
from orchestrator.errors import RequestError


def grammar_of(schema):
    writer = GrammarWriter()
    return writer.text(add_schema(writer, schema, "response_format"))


def allows(schema, *values):
    """Tell for each value whether the grammar can write it."""
    matcher = Matcher(grammar_of(schema))
    return [matcher.accepts(value if isinstance(value, str) else json.dumps(value)) for value in values]


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "car", "c", 'qu"ote\\', 5, None, "ä😀"]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["age", "kind"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "string", "pattern": "^[a-z]{2,5}(-\\d+)?$"}},
}

SCHEMAS = [
    PERSON,
    {},
    True,
    {"type": "object"},
    {"type": ["string", "null", "integer"], "maxLength": 3, "minimum": 7},
    {"type": "array", "items": {"type": "number"}, "minItems": 2},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "minItems": 1},
    {"type": "array", "items": [{"type": "integer"}, {"const": "x"}], "additionalItems": {"type": "null"}},
    {"type": "array", "prefixItems": [{"type": "null"}], "minItems": 3, "maxItems": 4},
    {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
    {"type": "object", "properties": {"a": {"type": "null"}, "ab": True}, "additionalProperties": {"const": 1}},
    {"type": "object", "properties": {"a": False, "b": {"type": "null"}}, "additionalProperties": True},
    {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "required": ["b", "d"]},
    {"type": "object", "properties": {'we"ird\\': {"type": "null"}}, "required": ['we"ird\\']},
    {"anyOf": [{"type": "string"}, {"type": "integer", "exclusiveMinimum": 5}]},
    {"type": "object", "properties": {"x": {"type": "null"}}, "anyOf": [{"required": ["x"]}, {"maxProperties": 1}]},
    {
        "oneOf": [
            {"type": "object", "properties": {"t": {"const": "a"}, "n": {"type": "integer"}}, "required": ["t", "n"]},
            {"type": "object", "properties": {"t": {"const": "b"}, "s": {"type": "string"}}, "required": ["t", "s"]},
        ]
    },
    {
        "allOf": [{"$ref": "#/definitions/a"}, {"properties": {"y": {"maximum": 3}}}],
        "definitions": {
            "a": {"type": "object", "properties": {"y": {"type": "integer", "minimum": 1}}, "required": ["y"]}
        },
    },
    {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        },
    },
    {"type": "number", "minimum": -3, "exclusiveMaximum": 12},
    {"type": "number", "exclusiveMinimum": 0},
    {"type": "number", "maximum": -2},
    {"type": "integer", "multipleOf": 1, "maximum": 99},
    {"type": "string", "pattern": 'a.c|^x+$|[^\\w"]{2}'},
    {"type": "string", "minLength": 2},
    {"const": {"a": [1, 2.5, "x\n"], "b": None}},
    {"enum": [1, 1.5, "1"], "type": "number"},
    {"type": "boolean", "nullable": True, "title": "T", "description": "d", "default": True},
    *({"type": "string", "format": name} for name in FORMATS),
]


def is_valid(schema, value):
    plain = json.loads(json.dumps(schema).replace('"nullable": true', '"description": "x"'))
    if isinstance(schema, dict) and schema.get("nullable") and value is None:
        return True
    return jsonschema_rs.validator_for(plain, validate_formats=True).is_valid(value)


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_what_the_grammar_writes_is_valid(number):
    schema = SCHEMAS[number]
    if isinstance(schema, dict) and "additionalItems" in schema:
        schema = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
    grammar = grammar_of(schema)
    matcher = Matcher(grammar)
    for seed in range(60):
        text = Author(grammar, seed).text()
        assert matcher.accepts(text)
        assert is_valid(schema, json.loads(text)), text


def test_the_engine_takes_the_grammars(synthetic):
    with Model.open(synthetic("llama")) as model:
        for schema in SCHEMAS:
            model.constrain(grammar_of(schema))


def test_values_that_hold_can_be_written():
    good = [
        {"name": "Ann", "age": 0, "kind": "c", "tags": ["ab-12", "cd"]},
        {"age": 150, "kind": 'qu"ote\\'},
        {"age": 42, "kind": "ä😀", "tags": ["xy"]},
    ]
    assert all(Matcher(grammar_of(PERSON)).accepts(json.dumps(value, ensure_ascii=False)) for value in good)
    assert allows(PERSON, '{\n  "age": 3,\n  "kind": null\n}', '{"age":3,"kind":5}') == [True, True]
    bad = [
        '{"age":151,"kind":5}',
        '{"age":3}',
        '{"age":-1,"kind":5}',
        '{"age":3,"kind":"ca"}',
        '{"age":3,"kind":5,"z":1}',
    ]
    assert allows(PERSON, *bad, '{"name":"","age":3,"kind":5}', '{"age":3,"kind":5,"tags":[]}', "") == [False] * 8
    tree = SCHEMAS[18]
    assert allows(tree, {"value": 1, "children": [{"value": 2}, {"value": 3, "children": []}]}) == [True]
    assert allows({"type": "string"}, '"\\ud83d\\ude00"', '"\\u00e9"', '"a\nb"', '"\\ud83d"') == [
        False,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (False, "allows nothing"),
        (5, "is not a schema"),
        ({"type": "strnig"}, "'strnig'"),
        ({"type": []}, "does not exist"),
        ({"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 3}}}, "#/a uses 'multipleOf'"),
        ({"not": {"type": "string"}}, "'not'"),
        ({"if": {}, "then": {}}, "'if'"),
        ({"type": "object", "patternProperties": {"^a": {}}}, "'patternProperties'"),
        ({"type": "object", "maxlength": 3}, "'maxlength'"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
        ({"type": "array", "contains": {}}, "'contains'"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "allows nothing"),
        ({"type": "array", "minItems": 100000}, "minItems"),
        ({"type": "string", "format": "iri"}, "'iri'"),
        ({"type": "string", "pattern": "^(?=a)"}, "looks ahead"),
        ({"type": "string", "pattern": "a\\b"}, "'\\b'"),
        ({"type": "string", "pattern": "(a"}, "without end"),
        ({"type": "string", "pattern": "*"}, "nothing in front"),
        ({"type": "string", "pattern": "^a$", "minLength": 2}, "length"),
        ({"type": "number", "minimum": 0.5}, "not whole"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "allows nothing"),
        ({"type": "integer", "minimum": "3"}, "'minimum'"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "requires 'a'"),
        ({"type": "object", "minProperties": 2}, "several properties"),
        ({"$ref": "#/$defs/none"}, "not there"),
        ({"$ref": "https://example.com/schema"}, "not in this schema"),
        ({"$ref": "#", "type": "object"}, "leads to itself"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "use 'anyOf'"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "use 'anyOf'"),
        ({"anyOf": []}, "no list"),
        ({"enum": []}, "no list"),
        ({"enum": ["a"], "type": "integer"}, "allows nothing"),
        ({"enum": ["a"], "maxLength": 1}, "beside fixed values"),
        ({"allOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, "both use 'pattern'"),
    ],
)
def test_what_cannot_be_enforced_is_refused(schema, words):
    with pytest.raises(RequestError) as caught:
        add_schema(GrammarWriter(), schema, "response_format")
    assert words in str(caught.value)
    assert (caught.value.status, caught.value.code, caught.value.param) == (
        400,
        "unsupported_schema",
        "response_format",
    )


def test_schemas_that_would_grow_without_end_are_refused():
    nested = {"type": "integer"}
    for _ in range(200):
        nested = {"type": "array", "items": nested}
    doubling = {
        "$defs": {f"d{n}": {"type": "object", "anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    }
    doubling["$defs"]["d40"] = {"type": "object"}
    doubling["$ref"] = "#/$defs/d0"
    long_key = {"properties": {"k" * 5000: {}}, "additionalProperties": True}
    for schema in (nested, doubling, long_key):
        with pytest.raises(RequestError, match="cannot be enforced"):
            add_schema(GrammarWriter(), schema, "response_format")
    with pytest.raises(RequestError, match="left-recursive"):
        parse_grammar(grammar_of({"$ref": "#"}))


LEAF = st.sampled_from(
    [
        {"type": "string"},
        {"type": "integer", "minimum": -20, "maximum": 7},
        {"type": "number", "minimum": 0},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["a", "ab", 1, None]},
        {"const": 'x"y'},
        {"type": "string", "minLength": 1, "maxLength": 3},
        {"type": "string", "format": "date"},
        {"type": ["integer", "string"]},
    ]
)
NAMES = st.sampled_from(["a", "ab", "b", "é", 'q"', "long name"])
ANY_SCHEMA = st.recursive(
    LEAF,
    lambda inner: st.one_of(
        st.builds(
            lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
            inner,
            st.integers(0, 2),
            st.integers(0, 3),
        ),
        st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(
            lambda properties, required, others: {
                "type": "object",
                "properties": properties,
                "required": [name for name in required if name in properties],
                **({} if others is None else {"additionalProperties": others}),
            },
            st.dictionaries(NAMES, inner, max_size=4),
            st.lists(NAMES, unique=True, max_size=3),
            st.one_of(st.none(), st.booleans(), inner),
        ),
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ANY_SCHEMA, st.integers(0, 1000))
def test_any_schema(schema, seed):
    text = Author(grammar_of(schema), seed).text()
    assert is_valid(schema, json.loads(text)), text


@given(st.integers(-12345, 12345), st.integers(0, 3000), st.lists(st.integers(-20000, 20000), max_size=20))
@settings(deadline=None)
def test_integers_between(low, length, others):
    high = low + length
    matcher = Matcher(f"root ::= {integers_between(low, high)}")
    for value in {low - 1, low, low + 1, high - 1, high, high + 1, *others, -low, 0}:
        assert matcher.accepts(str(value)) == (low <= value <= high), value
    assert matcher.accepts("01") is False


@given(
    st.integers(-500, 500),
    st.integers(1, 300),
    st.booleans(),
    st.booleans(),
    st.lists(st.decimals(-999, 999, places=2)),
)
@settings(deadline=None)
def test_numbers_between(low, length, above, below, others):
    high = low + length
    matcher = Matcher(f"root ::= {numbers_between(low, high, above=above, below=below)}")
    for text in {f"{low}", f"{high}", f"{low}.0", f"{high}.00", f"{low}.5", f"{high}.01", *map(str, others)}:
        value = float(text)
        expected = (low < value if above else low <= value) and (value < high if below else value <= high)
        assert matcher.accepts(text) == expected, text


@given(st.sets(st.text("abc", max_size=4), min_size=1, max_size=12), st.lists(st.text("abcd", max_size=6)))
@settings(deadline=None)
def test_sets_of_words(words, others):
    writer = GrammarWriter()
    among = Matcher(writer.text(Words(words).any_of(writer, "w")))
    writer = GrammarWriter()
    without = Matcher(writer.text(Words(words).none_of(writer, "w", '"')))
    for word in {*words, *others}:
        assert among.accepts(word) == (word in words)
        assert without.accepts(word) == (word not in words)


@given(st.text("ab", min_size=1, max_size=5), st.lists(st.text("abc", max_size=12), max_size=20), st.booleans())
@settings(deadline=None)
def test_text_until_a_marker(marker, texts, may_end):
    writer = GrammarWriter()
    grammar = writer.text(text_until(writer, marker, '"!"', may_end=may_end))
    parse_grammar(grammar)
    matcher = Matcher(grammar)
    for text in [*texts, marker, *(text + marker for text in texts)]:
        first = text.find(marker)
        ends_with_it = first >= 0 and first == len(text) - len(marker)
        assert matcher.accepts(text + "!") == (ends_with_it or (may_end and first < 0)), text
        assert matcher.accepts(text) == (may_end and first < 0), text


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("^a+b?$", ["a", "aab"], ["", "b", "xaab"]),
        ("b", ["b", "abc"], ["", "ac"]),
        ("^(ab|c){2}", ["abc", "ccx"], ["ab", "xcc"]),
        (r"^\d{3}-\w\s[^a-c]$", ["123-x d", "000-_ é"], ["12-x d", "123-x a"]),
        (r"^[\]\-a]{1,2}$", ["]", "-a"], ["b", ""]),
        (r"^\$\{x\}\/$", ["${x}/"], ["x"]),
        ('^"\\\\$', ['"\\'], ['"']),
        ("^(?:x|)y+?$", ["y", "xyy"], ["x"]),
        (r"^\u00e9\x41$", ["éA"], ["eA"]),
        ("^.$", ["a", "é", '"'], ["\n", "ab"]),
    ],
)
def test_patterns(pattern, good, bad):
    matcher = Matcher(grammar_of({"type": "string", "pattern": pattern}))
    assert all(re.search(pattern, text) for text in good)
    assert not any(re.search(pattern, text) for text in bad)
    assert [matcher.accepts(json.dumps(text, ensure_ascii=False)) for text in good + bad] == [True] * len(good) + [
        False
    ] * len(bad)
