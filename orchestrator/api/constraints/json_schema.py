"""JSON Schema as a grammar: what a schema forbids, the grammar cannot write. Pure.

Every keyword is either enforced or refused with status 400; none is ignored, except those that only describe. The
grammar may allow less than the schema: objects keep the order of ``properties``, unknown properties appear only where
``additionalProperties`` asks for them, and strings of a ``format`` use its common spelling.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Final

from orchestrator.api.constraints.numbers import integers_between, numbers_between
from orchestrator.api.constraints.patterns import UnsupportedPattern, string_pattern
from orchestrator.api.constraints.schema_values import (
    ANNOTATIONS,
    FORMATS,
    KEYWORDS,
    SchemaError,
    are_disjoint,
    merge,
    resolve,
    type_of,
    types_of,
)
from orchestrator.api.constraints.writer import GrammarWriter, Words, literal, union
from orchestrator.errors import RequestError

MAX_DEPTH: Final = 48
MAX_PARTS: Final = 5000
"""Most parts of a schema, counted each time that one is used."""
MAX_COUNT: Final = 1000
"""Most items, characters or properties that a bound may speak of."""
_KEY_LETTERS: Final = r'"\\\x00-\x1F\x7F'


def add_schema(writer: GrammarWriter, schema: object, param: str) -> str:
    """Add the rules of a schema to a grammar and return the element that reads its values.

    Raises :class:`RequestError` (400, code ``unsupported_schema``) with the place and the keyword that cannot be
    enforced; ``param`` is the field that the schema came from.
    """
    try:
        return _Converter(writer, schema).visit(schema, "value", "#")
    except (SchemaError, RecursionError) as error:
        raise RequestError(
            f"the JSON schema cannot be enforced: {error}", code="unsupported_schema", param=param
        ) from error


class _Converter:
    def __init__(self, writer: GrammarWriter, root: object) -> None:
        self._writer = writer
        self._root = root
        self._references: dict[str, str] = {}
        self._depth = self._parts = 0

    def visit(self, schema: object, hint: str, place: str) -> str:
        """Return the element of a schema; ``place`` is its JSON pointer, for errors."""
        if schema is True:
            return self._writer.json("value")
        if schema is False:
            raise SchemaError(place, "allows nothing")
        if not isinstance(schema, Mapping):
            raise SchemaError(place, "is not a schema")
        self._depth += 1
        self._parts += 1
        if self._depth > MAX_DEPTH:
            raise SchemaError(place, f"is nested more than {MAX_DEPTH} deep")
        if self._parts > MAX_PARTS:
            raise SchemaError(place, f"is part {MAX_PARTS + 1} of a schema that is too large")
        keywords = {name: value for name, value in schema.items() if name not in ANNOTATIONS}
        unknown = sorted(set(keywords) - KEYWORDS)
        if unknown:
            raise SchemaError(place, f"uses {unknown[0]!r}, which is not supported")
        element = self._known(keywords, hint, place)
        self._depth -= 1
        return element

    def _known(self, keywords: dict[str, object], hint: str, place: str) -> str:
        if "$ref" in keywords:
            return self._reference(keywords, hint, place)
        if "allOf" in keywords:
            parts = _list(keywords.pop("allOf"), place, "allOf")
            merged: Mapping[str, object] = keywords
            for part in parts:
                merged = merge(merged, self._resolved(part, place), place)
            return self.visit(merged, hint, place)
        for name in ("anyOf", "oneOf"):
            if name in keywords:
                return self._alternatives(keywords, name, hint, place)
        if keywords.pop("nullable", False) is True:
            return union([self.visit(keywords, hint, place), self._writer.json("null")])
        if "const" in keywords or "enum" in keywords:
            return self._constants(keywords, hint, place)
        types = types_of(keywords, place)
        if types is None:
            return self._writer.json("value")
        return union(self._typed(kind, keywords, hint, place) for kind in types)

    def _typed(self, kind: str, keywords: Mapping[str, object], hint: str, place: str) -> str:
        if kind == "object":
            return self._object(keywords, hint, place)
        if kind == "array":
            return self._array(keywords, hint, place)
        if kind == "string":
            return self._string(keywords, hint, place)
        if kind in ("number", "integer"):
            return self._number(kind, keywords, hint, place)
        return self._writer.json(kind)

    # --- schemas made of schemas --------------------------------------------------------------------------------

    def _reference(self, keywords: dict[str, object], hint: str, place: str) -> str:
        pointer = keywords.pop("$ref")
        target = resolve(self._root, pointer, place)
        if keywords:
            return self.visit(merge(keywords, self._resolved(target, place), place), hint, place)
        name = self._references.get(str(pointer))
        if name is None:
            name = self._references[str(pointer)] = self._writer.reserve(str(pointer).rpartition("/")[2])
            self._writer.define(name, self.visit(target, hint, str(pointer)))
        return name

    def _resolved(self, schema: object, place: str) -> object:
        """Follow a schema that is nothing but a reference."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                return schema
            rest = {name: value for name, value in schema.items() if name != "$ref" and name not in ANNOTATIONS}
            schema = resolve(self._root, schema["$ref"], place)
            if rest:
                schema = merge(rest, schema, place)
        raise SchemaError(place, "has a reference that leads to itself")

    def _alternatives(self, keywords: dict[str, object], name: str, hint: str, place: str) -> str:
        parts = _list(keywords.pop(name), place, name)
        whole = [merge(keywords, self._resolved(part, place), place) if keywords else part for part in parts]
        if name == "oneOf" and not are_disjoint([self._resolved(part, place) for part in whole], place):
            raise SchemaError(place, "uses 'oneOf' with alternatives that may both hold; use 'anyOf'")
        return union(self.visit(part, hint, f"{place}/{name}/{number}") for number, part in enumerate(whole))

    def _constants(self, keywords: dict[str, object], hint: str, place: str) -> str:
        values = _list(keywords.pop("enum"), place, "enum") if "enum" in keywords else None
        if "const" in keywords:
            constant = keywords.pop("const")
            if values is not None and constant not in values:
                raise SchemaError(place, "has a 'const' that its 'enum' does not hold")
            values = [constant]
        types = types_of({"type": keywords.pop("type")}, place) if "type" in keywords else None
        if keywords:
            raise SchemaError(place, f"uses {min(keywords)!r} beside fixed values")
        fitting = [value for value in values or [] if types is None or type_of(value) in types]
        fitting += [value for value in values or [] if type_of(value) == "integer" and "number" in (types or ())]
        if not fitting:
            raise SchemaError(place, "allows nothing")
        return Words(json.dumps(value, ensure_ascii=False) for value in fitting).any_of(self._writer, hint)

    # --- types --------------------------------------------------------------------------------------------------

    def _object(self, keywords: Mapping[str, object], hint: str, place: str) -> str:
        declared = keywords.get("properties", {})
        if not isinstance(declared, Mapping):
            raise SchemaError(place, "has 'properties' that are no object")
        required = _list(keywords.get("required", []), place, "required")
        if not all(isinstance(name, str) for name in required):
            raise SchemaError(place, "requires something that is no name")
        others = keywords.get("additionalProperties", keywords.get("unevaluatedProperties"))
        properties = {str(name): value for name, value in declared.items() if value is not False}
        for name in map(str, required):
            if name not in properties:
                if others is False or name in declared:
                    raise SchemaError(place, f"requires {name!r}, which it does not allow")
                properties[name] = True if others is None else others
        low, high = self._counts(keywords, "Properties", place)
        if not properties and not declared:
            return self._map(True if others is None else others, low, high, hint, place)
        if low > len(required) or (high is not None and (high < len(properties) or others not in (None, False))):
            raise SchemaError(place, "bounds the number of properties, which is not supported beside named ones")
        pairs: list[tuple[str, bool | None]] = []
        for name, value in properties.items():
            key = literal(json.dumps(name, ensure_ascii=False))
            pairs.append((self._pair(key, value, f"{hint}-{name}", f"{place}/{name}"), name in required))
        if others not in (None, False):
            names = Words(name for name in {**declared, **properties} if _is_plain(name))
            key = f'"\\"" {names.none_of(self._writer, f"{hint}-key", _KEY_LETTERS)} "\\""'
            pairs.append((self._pair(key, others, f"{hint}-other", f"{place}/additionalProperties"), None))
        return self._writer.add(hint, f'"{{" space {self._members(pairs, hint)} space "}}"')

    def _members(self, pairs: Sequence[tuple[str, bool | None]], hint: str) -> str:
        """Return the pairs in order, some optional; the last may be any number (None), commas between those there."""
        self._writer.json("space")
        comma = '"," space'
        first, later = '""', '""'  # what may follow while no pair is there yet, and when one is
        for pair, is_required in reversed(pairs):
            if is_required is None:
                later = self._writer.add(f"{hint}-more", f"({comma} {pair})*")
                first = self._writer.add(f"{hint}-rest", f"({pair} {later})?")
                continue
            optional_later = "" if is_required else f" | {later}"
            optional_first = "" if is_required else f" | {first}"
            first = self._writer.add(f"{hint}-rest", f"{pair} {later}{optional_first}")
            later = self._writer.add(f"{hint}-more", f"{comma} {pair} {later}{optional_later}")
        return first

    def _map(self, value: object, low: int, high: int | None, hint: str, place: str) -> str:
        """Return an object with any keys."""
        if low > 1:
            raise SchemaError(place, "needs several properties without naming them")
        if value is True and (low, high) == (0, None):
            return self._writer.json("object")
        if value is False or high == 0:
            if low:
                raise SchemaError(place, "allows nothing")
            return self._writer.add(hint, f'"{{" {self._writer.json("space")} "}}"')
        pair = self._pair(self._writer.json("string"), value, f"{hint}-value", f"{place}/additionalProperties")
        return self._writer.add(hint, f'"{{" space {_listed(pair, low, high)} space "}}"')

    def _pair(self, key: str, value: object, hint: str, place: str) -> str:
        self._writer.json("space")
        return self._writer.add(f"{hint}-pair", f'{key} ":" space {self.visit(value, hint, place)}')

    def _array(self, keywords: Mapping[str, object], hint: str, place: str) -> str:
        if keywords.get("uniqueItems") is True and keywords.get("maxItems") not in (0, 1):
            raise SchemaError(place, "uses 'uniqueItems', which is not supported")
        low, high = self._counts(keywords, "Items", place)
        items = keywords.get("items", True)
        prefix = keywords.get("prefixItems", [])
        if isinstance(items, list):  # how drafts up to 2019-09 spelt it
            prefix, items = items, keywords.get("additionalItems", True)
        prefix = _list(prefix, place, "prefixItems")
        if items is False:
            high = len(prefix) if high is None else min(high, len(prefix))
        if high is not None and low > high:
            raise SchemaError(place, "allows nothing")
        self._writer.json("space")
        rest = ""
        if high is None or high > len(prefix):
            item = self.visit(items, f"{hint}-item", f"{place}/items")
            most = None if high is None else high - len(prefix)
            least = max(0, low - len(prefix))
            if not prefix:
                return self._writer.add(hint, f'"[" space {_listed(item, least, most)} space "]"')
            rest = f'("," space {item}){_bounds(least, most)}'
        body = rest
        for number in reversed(range(len(prefix) if high is None else min(high, len(prefix)))):
            item = self.visit(prefix[number], f"{hint}-{number}", f"{place}/prefixItems/{number}")
            separator = "" if number == 0 else '"," space '
            part = f"{separator}{item} {body}".rstrip()
            body = part if number < low else f"({part})?"
        return self._writer.add(hint, f'"[" space {body} space "]"')

    def _string(self, keywords: Mapping[str, object], hint: str, place: str) -> str:
        low, high = self._counts(keywords, "Length", place)
        kind, pattern = keywords.get("format"), keywords.get("pattern")
        if pattern is not None and not isinstance(pattern, str):
            raise SchemaError(place, "has a 'pattern' that is no text")
        if kind is not None:
            if kind not in FORMATS:
                raise SchemaError(place, f"uses the format {kind!r}, which is not supported")
            if pattern is not None:
                raise SchemaError(place, "uses both 'format' and 'pattern'")
            pattern = FORMATS[str(kind)]
        if pattern is None:
            if (low, high) == (0, None):
                return self._writer.json("string")
            return self._writer.add(hint, f'"\\"" {self._writer.json("char")}{_bounds(low, high)} "\\""')
        if (low, high) != (0, None):
            raise SchemaError(place, "bounds the length of a string that also follows a pattern or format")
        try:
            return string_pattern(pattern, self._writer, hint)
        except UnsupportedPattern as error:
            raise SchemaError(place, f"has a pattern that {error}") from error

    def _number(self, kind: str, keywords: Mapping[str, object], hint: str, place: str) -> str:
        step = keywords.get("multipleOf")
        if step is not None and not (step == 1 and kind == "integer"):
            raise SchemaError(place, "uses 'multipleOf', which is not supported")
        low, above = _tighter(keywords, "minimum", "exclusiveMinimum", place, upper=False)
        high, below = _tighter(keywords, "maximum", "exclusiveMaximum", place, upper=True)
        if low is None and high is None:
            return self._writer.json(kind)
        if kind == "integer":
            least = None if low is None else math.floor(low) + 1 if above else math.ceil(low)
            most = None if high is None else math.ceil(high) - 1 if below else math.floor(high)
            if least is not None and most is not None and least > most:
                raise SchemaError(place, "allows nothing")
            return self._writer.add(hint, integers_between(least, most))
        if any(bound is not None and bound != int(bound) for bound in (low, high)):
            raise SchemaError(place, "bounds a number by one that is not whole")
        if low is not None and high is not None and (low > high or (low == high and (above or below))):
            raise SchemaError(place, "allows nothing")
        return self._writer.add(
            hint,
            numbers_between(
                None if low is None else int(low), None if high is None else int(high), above=above, below=below
            ),
        )

    def _counts(self, keywords: Mapping[str, object], what: str, place: str) -> tuple[int, int | None]:
        low, high = keywords.get(f"min{what}", 0), keywords.get(f"max{what}")
        for name, value in ((f"min{what}", low), (f"max{what}", high)):
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT
            ):
                raise SchemaError(place, f"has a {name!r} that is no whole number from 0 to {MAX_COUNT}")
        if isinstance(high, int) and isinstance(low, int) and low > high:
            raise SchemaError(place, "allows nothing")
        return (low if isinstance(low, int) else 0), (high if isinstance(high, int) else None)


def _tighter(
    keywords: Mapping[str, object], plain: str, exclusive: str, place: str, *, upper: bool
) -> tuple[float | None, bool]:
    """Return the bound that matters and whether it is excluded itself."""
    bounds = []
    for name, is_excluded in ((plain, False), (exclusive, True)):
        value = keywords.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e15:
            raise SchemaError(place, f"has a {name!r} that is no number below 10^15")
        bounds.append((value, is_excluded))
    if not bounds:
        return None, False
    # Of equal bounds the one that excludes is tighter.
    return min(bounds, key=lambda bound: ((bound[0] if upper else -bound[0]), not bound[1]))


def _listed(item: str, low: int, high: int | None) -> str:
    """Return an item ``low`` to ``high`` times with commas between."""
    if high == 0:
        return '""'
    more = f'{item} ("," space {item}){_bounds(max(0, low - 1), None if high is None else high - 1)}'
    return more if low else f"({more})?"


def _bounds(low: int, high: int | None) -> str:
    if high is None:
        return "*" if low == 0 else f"{{{low},}}"
    return f"{{{low},{high}}}"


def _list(value: object, place: str, name: str) -> list[object]:
    if not isinstance(value, list) or (not value and name in ("anyOf", "oneOf", "enum")):
        raise SchemaError(place, f"has no list as {name!r}")
    return value


def _is_plain(name: str) -> bool:
    return json.dumps(name, ensure_ascii=False) == f'"{name}"'
