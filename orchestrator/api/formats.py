"""What an answer must look like: the fields by which clients ask for JSON or for a grammar. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from orchestrator.api.fields import Fields, invalid
from orchestrator.errors import RequestError

FORMAT_FIELDS: Final = frozenset({"response_format", "json_schema", "guided_json", "grammar", "guided_grammar"})
"""``response_format`` is OpenAI's; the others are short ways of other servers to say the same."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """A grammar in GBNF for the whole answer, or a JSON Schema for its text; neither: anything goes.

    ``param`` is the field that asks for it.
    """

    grammar: str | None = None
    schema: Mapping[str, object] | bool | None = None
    param: str = ""

    @property
    def is_free(self) -> bool:
        """Tell whether anything goes."""
        return self.grammar is None and self.schema is None


ANY_FORMAT: Final = AnswerFormat()


def parse_format(fields: Fields) -> AnswerFormat:
    """Parse the fields that say what an answer looks like; at most one of them may say so."""
    found = [
        wanted
        for name in sorted(FORMAT_FIELDS)
        if fields.get(name) is not None and not (wanted := _parse(fields, name)).is_free
    ]
    if len(found) > 1:
        raise RequestError(
            f"{found[0].param!r} and {found[1].param!r} both say what the answer looks like",
            param=found[1].param,
            code="invalid_value",
        )
    return found[0] if found else AnswerFormat()


def parse_response_format(value: object, param: str) -> AnswerFormat:
    """Parse ``response_format``, or ``text.format`` of the Responses API, whose schema is not wrapped.

    The schema stands in ``json_schema.schema``, or, as other servers have it, in ``schema`` beside the type.
    """
    fields = Fields(value, param)
    kind = fields.text("type", "text")
    if kind == "text":
        return AnswerFormat()
    if kind not in ("json_object", "json_schema"):
        raise invalid(f"{param}.type", "must be 'text', 'json_object' or 'json_schema'")
    schema = fields.get("schema")
    wrapper = fields.get("json_schema")
    if wrapper is not None:
        inner = Fields(wrapper, f"{param}.json_schema")
        inner.refuse_unknown({"name", "description", "schema", "strict"})
        if inner.get("schema") is None and "type" in inner.names():
            raise invalid(f"{param}.json_schema", "must hold the schema in its field 'schema'")
        schema = inner.get("schema") if inner.get("schema") is not None else schema
    if schema is None:
        if kind == "json_schema":
            raise invalid(param, "holds no schema")
        schema = {"type": "object"}
    return AnswerFormat(schema=_schema(schema, param), param=param)


def _parse(fields: Fields, name: str) -> AnswerFormat:
    if name in ("grammar", "guided_grammar"):
        text = fields.text(name)
        return AnswerFormat(grammar=text or None, param=name)
    if name == "response_format":
        return parse_response_format(fields.get(name), name)
    return AnswerFormat(schema=_schema(fields.get(name), name), param=name)


def _schema(value: object, param: str) -> Mapping[str, object] | bool:
    if not isinstance(value, Mapping | bool):
        raise invalid(param, "holds no JSON schema")
    return value
