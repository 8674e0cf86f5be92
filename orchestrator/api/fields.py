"""Typed reading of one JSON object from a client; every refusal names the field. Pure."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping

from orchestrator.errors import RequestError


def invalid(param: str, problem: str) -> RequestError:
    """Return the error for a field with an unusable value (status 400)."""
    return RequestError(f"{param!r} {problem}", param=param, code="invalid_value")


def unsupported(param: str, problem: str) -> RequestError:
    """Return the error for a field that this server does not implement and must not ignore (status 400)."""
    return RequestError(f"{param!r} {problem}", param=param, code="unsupported_parameter")


class Fields:
    """The fields of one JSON object; ``null`` counts as absent."""

    def __init__(self, value: object, path: str = "") -> None:
        if not isinstance(value, Mapping):
            raise RequestError("the request body is not a JSON object" if not path else f"{path!r} is not an object")
        self._values: Mapping[str, object] = {name: item for name, item in value.items() if item is not None}
        self._path = path

    def name(self, name: str) -> str:
        """Return the name of a field as a client finds it: with the path to this object."""
        return f"{self._path}.{name}" if self._path else name

    def get(self, name: str) -> object:
        """Return a field's value, None where it is absent."""
        return self._values.get(name)

    def refuse_unknown(self, known: Collection[str]) -> None:
        """Refuse fields that are not known: a misspelt one would silently change nothing."""
        for name in self._values:
            if name not in known:
                similar = difflib.get_close_matches(name, known, 1)
                raise RequestError(
                    f"unknown field {self.name(name)!r}" + (f"; did you mean {similar[0]!r}?" if similar else ""),
                    code="unknown_parameter",
                    param=self.name(name),
                )

    def text(self, name: str, default: str = "") -> str:
        """Return a string."""
        value = self._values.get(name, default)
        if not isinstance(value, str):
            raise invalid(self.name(name), "must be a string")
        return value

    def names(self) -> frozenset[str]:
        """Return the names of the fields that are there."""
        return frozenset(self._values)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return a boolean, ``default`` where it is absent."""
        value = self._values.get(name, default)
        if not isinstance(value, bool):
            raise invalid(self.name(name), "must be true or false")
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """Return a finite number between two bounds."""
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not _finite(value):
            raise invalid(self.name(name), "must be a number")
        if not low <= value <= high:
            raise invalid(self.name(name), f"must be between {low:g} and {high:g}")
        return float(value)

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        """Return a whole number between two bounds, None where it is absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # some clients write 1.0
        if isinstance(value, bool) or not isinstance(value, int):
            raise invalid(self.name(name), "must be a whole number")
        if not low <= value <= high:
            raise invalid(self.name(name), f"must be between {low} and {high}")
        return value

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        """Return a whole number between two bounds."""
        value = self.optional_integer(name, low, high)
        return default if value is None else value

    def mapping(self, name: str) -> Mapping[str, object]:
        """Return an object, an empty one where it is absent."""
        value = self._values.get(name, {})
        if not isinstance(value, Mapping):
            raise invalid(self.name(name), "must be an object")
        return value

    def items(self, name: str) -> list[object]:
        """Return a list, an empty one where it is absent."""
        value = self._values.get(name, [])
        if not isinstance(value, list):
            raise invalid(self.name(name), "must be a list")
        return value


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a JSON integer can be of any length
        return False
