"""Numbers between two bounds as grammars of their digits. Pure."""

from __future__ import annotations

from typing import Final

MAX_DIGITS: Final = 16
"""Most digits of a number without upper bound, as in the rule for any number."""


def integers_between(low: int | None, high: int | None) -> str:
    """Return an element for the whole numbers from ``low`` to ``high``, both included; None: no bound."""
    parts = []
    if low is None or low < 0:
        smallest = 1 if high is None or high >= 0 else -high
        parts.append(f'"-" ({_naturals(smallest, None if low is None else -low)})')
    if high is None or high >= 0:
        parts.append(_naturals(max(0, low or 0), high))
    return "(" + " | ".join(parts) + ")"


def numbers_between(low: int | None, high: int | None, *, above: bool, below: bool) -> str:
    """Return an element for the decimal numbers between two whole ones; ``above`` and ``below`` leave them out."""
    parts = []
    if low is None or low < 0:
        # Mirrored: the number behind the minus sign is between -high and -low.
        nearest, without = (0, False) if high is None or high > 0 else (-high, below)
        parts.append(f'"-" ({_decimals(nearest, None if low is None else -low, without, above)})')
    if high is None or high > 0 or (high == 0 and not below):
        nearest, without = (0, False) if low is None or low < 0 else (low, above)
        parts.append(_decimals(nearest, high, without, below))
    return "(" + " | ".join(parts) + ")"


def _decimals(low: int, high: int | None, above: bool, below: bool) -> str:
    """Return the decimal numbers from ``low`` (0 or more) to ``high``."""
    nothing, any_part = '("." "0"{1,16})?', '("." [0-9]{1,16})?'
    something = '"." [0-9]{0,15} [1-9]'
    parts = []
    if high is None:
        parts.append(f"({_naturals(low + 1, None)}) {any_part}")
        parts.append(f'"{low}" {something if above else any_part}')
    elif low < high:
        parts.append(f'"{low}" {something if above else any_part}')
        if high - low > 1:
            parts.append(f"({_naturals(low + 1, high - 1)}) {any_part}")
        if not below:
            parts.append(f'"{high}" {nothing}')
    else:
        parts.append(f'"{low}" {nothing}')
    return " | ".join(parts)


def _naturals(low: int, high: int | None) -> str:
    """Return the whole numbers from ``low`` (0 or more) to ``high`` without leading zeros."""
    if high is None:
        digits = len(str(low))
        parts = [*_same_length(str(low), "9" * digits)]
        if digits < MAX_DIGITS:
            parts.append(f"[1-9] [0-9]{{{digits},{MAX_DIGITS - 1}}}")
        return " | ".join(parts)
    parts = []
    for digits in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (digits - 1) if digits > 1 else 0)
        parts += _same_length(str(first), str(min(high, 10**digits - 1)))
    return " | ".join(parts)


def _same_length(low: str, high: str) -> list[str]:
    """Return the numbers between two of the same length, as alternatives."""
    if low == high:
        return [f'"{low}"'] if low else ['""']
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        rest = len(low) - 1
        return [f"[{low[0]}-{high[0]}]" + (f" [0-9]{{{rest}}}" if rest else "")]
    if low[0] == high[0]:
        return [f'"{low[0]}" ({" | ".join(_same_length(low[1:], high[1:]))})']
    parts = [f'"{low[0]}" ({" | ".join(_same_length(low[1:], "9" * (len(low) - 1)))})']
    if int(high[0]) - int(low[0]) > 1:
        rest = len(low) - 1
        parts.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}] [0-9]{{{rest}}}")
    parts.append(f'"{high[0]}" ({" | ".join(_same_length("0" * (len(high) - 1), high[1:]))})')
    return parts
