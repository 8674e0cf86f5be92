"""What the parts of a JSON Schema mean: references, types, merging, and which schemas exclude each other. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Final
from urllib.parse import unquote

TYPES: Final = ("object", "array", "string", "number", "integer", "boolean", "null")

ANNOTATIONS: Final = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "discriminator",
        "contentEncoding",
        "contentMediaType",
        "propertyOrdering",
        "strict",
        "$schema",
        "$id",
        "$comment",
        "$defs",
        "definitions",
    }
)
"""Keywords that describe and forbid nothing."""

_KEYWORDS_OF: Final[Mapping[str, frozenset[str]]] = {
    "object": frozenset(
        {
            "properties",
            "required",
            "additionalProperties",
            "unevaluatedProperties",
            "minProperties",
            "maxProperties",
        }
    ),
    "array": frozenset({"items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
}

KEYWORDS: Final = frozenset(
    {"type", "const", "enum", "anyOf", "oneOf", "allOf", "$ref", "nullable"}.union(*_KEYWORDS_OF.values())
)
"""Keywords that are enforced; a keyword of one type says nothing about values of another."""

_DAY: Final = r"((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
_TIME: Final = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_LABEL: Final = r"[a-z0-9]{1,20}(-[a-z0-9]{1,20}){0,2}"
_HOST: Final = rf"{_LABEL}(\.{_LABEL}){{0,4}}"
_BYTE: Final = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"

FORMATS: Final = {
    "date": rf"^[1-9]\d{{3}}-{_DAY}$",
    "time": rf"^{_TIME}$",
    "date-time": rf"^[1-9]\d{{3}}-{_DAY}T{_TIME}$",
    "duration": r"^P(\d{1,4}[YMWD]|T\d{1,4}[HMS])$",
    "uuid": r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
    "email": rf"^[A-Za-z0-9_+-]{{1,32}}(\.[A-Za-z0-9_+-]{{1,32}}){{0,3}}@{_HOST}\.[a-z]{{2,12}}$",
    "hostname": rf"^{_HOST}$",
    "ipv4": rf"^{_BYTE}\.{_BYTE}\.{_BYTE}\.{_BYTE}$",
    "ipv6": r"^([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}$",
    "uri": rf"^https?://{_HOST}(:[1-9]\d{{0,3}})?(/[A-Za-z0-9._~-]*){{0,16}}(\?[A-Za-z0-9._~=&-]*)?$",
}
"""Formats of strings and the spelling that is written; days of February end at 28."""


class SchemaError(ValueError):
    """A schema that cannot be enforced; says where and why."""

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(f"{place} {problem}")


def resolve(root: object, pointer: object, place: str) -> object:
    """Return what a reference points to, inside of the same document."""
    if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
        raise SchemaError(place, f"refers to {pointer!r}, which is not in this schema")
    target = root
    for part in pointer.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping) and name in target:
            target = target[name]
        elif isinstance(target, list) and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        else:
            raise SchemaError(place, f"refers to {pointer!r}, which is not there")
    return target


def types_of(keywords: Mapping[str, object], place: str) -> tuple[str, ...] | None:
    """Return the types that are written for a schema; None for any.

    Without ``type`` that is the one that its keywords speak of: a value of another type would hold as well, but is
    hardly what was meant.
    """
    declared = keywords.get("type")
    if declared is None:
        return next(((kind,) for kind, names in _KEYWORDS_OF.items() if names & set(keywords)), None)
    types = declared if isinstance(declared, list) else [declared]
    wrong = [kind for kind in types if kind not in TYPES]
    if wrong or not types:
        raise SchemaError(place, f"has the type {wrong[0] if wrong else types!r}, which does not exist")
    if "number" in types:
        types = [kind for kind in types if kind != "integer"]
    return tuple(dict.fromkeys(str(kind) for kind in types))


def type_of(value: object) -> str:
    """Return the narrowest type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def merge(left: Mapping[str, object], right: object, place: str) -> Mapping[str, object]:
    """Return one schema for the values that hold in both. Raises :class:`SchemaError` where that takes more."""
    if right is True:
        return left
    if not isinstance(right, Mapping):
        raise SchemaError(place, "combines schemas of which one allows nothing")
    for mine, theirs in ((left, right), (right, left)):
        added = set(_properties(theirs)) - set(_properties(mine))
        if added and mine.get("additionalProperties", True) is not True:
            raise SchemaError(place, "combines objects of which one says what else they may hold")
    merged = dict(left)
    for name, value in right.items():
        if name not in merged or name in ANNOTATIONS or merged[name] == value:
            merged[name] = value
        else:
            merged[name] = _both(name, merged[name], value, place)
    return merged


def _both(name: str, left: object, right: object, place: str) -> object:
    if name == "properties" and isinstance(left, Mapping) and isinstance(right, Mapping):
        both: dict[str, object] = dict(left)
        for key, value in right.items():
            mine = both.get(key)
            both[key] = merge(mine, value, f"{place}/{key}") if isinstance(mine, Mapping) else value
        return both
    if name == "required" and isinstance(left, list) and isinstance(right, list):
        return list(dict.fromkeys([*left, *right]))
    if name in ("type", "enum"):
        lefts, rights = (value if isinstance(value, list) else [value] for value in (left, right))
        common = [value for value in lefts if value in rights]
        if name == "type" and "integer" in (*lefts, *rights) and "number" in (*lefts, *rights):
            common = list(dict.fromkeys([*common, "integer"]))
        if common:
            return common
    if isinstance(left, int | float) and isinstance(right, int | float):
        if name.startswith("min") or name == "exclusiveMinimum":
            return max(left, right)
        if name.startswith("max") or name == "exclusiveMaximum":
            return min(left, right)
    raise SchemaError(place, f"combines schemas that both use {name!r}")


def are_disjoint(schemas: Sequence[object], place: str) -> bool:
    """Tell whether what is written for one of some schemas surely does not hold in another."""
    return all(_exclude(one, other, place) for one, other in combinations(schemas, 2))


def _exclude(one: object, other: object, place: str) -> bool:
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return False
    values, others = _fixed(one), _fixed(other)
    if values is not None and others is not None:
        return not {json.dumps(value, sort_keys=True) for value in values} & {
            json.dumps(value, sort_keys=True) for value in others
        }
    kinds, other_kinds = _kinds(one, values, place), _kinds(other, others, place)
    if kinds is None or other_kinds is None:
        return False
    if not kinds & other_kinds:
        return True
    if kinds | other_kinds != {"object"}:
        return False
    return _exclude_objects(one, other, place)


def _exclude_objects(one: Mapping[str, object], other: Mapping[str, object], place: str) -> bool:
    for mine, theirs in ((one, other), (other, one)):
        required = mine.get("required")
        names = required if isinstance(required, list) else []
        if theirs.get("additionalProperties") is False and not set(names) <= set(_properties(theirs)):
            return True
        shared = set(_properties(mine)) & set(_properties(theirs)) & set(names)
        if any(_exclude(_properties(mine)[name], _properties(theirs)[name], place) for name in shared):
            return True
    return False


def _fixed(schema: Mapping[str, object]) -> list[object] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _kinds(schema: Mapping[str, object], values: list[object] | None, place: str) -> set[str] | None:
    if values is not None:
        types = tuple(type_of(value) for value in values)
    elif "type" in schema:
        types = types_of(schema, place) or ()
    else:
        return None
    return {"number" if kind == "integer" else kind for kind in types}


def _properties(schema: Mapping[str, object]) -> Mapping[str, object]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}
