"""What the engine would not survive in a grammar, or would notice too late. Pure."""

from __future__ import annotations

from typing import Final

from orchestrator.api.constraints.rules import Choice, Element, Reference, Repeat, Rules

MAX_ELEMENTS: Final = 1 << 20
"""Most elements after repetitions are written out."""
MAX_VISITS: Final = 1 << 22
"""Most steps of the engine's search for left recursion, which looks at a shared beginning once per use."""


def check_rules(rules: Rules) -> str | None:
    """Return what is wrong with a grammar, None if nothing is.

    Rules must exist where they are used, none may begin with itself, and neither beginnings nor repetitions may grow
    without measure.
    """
    for name, rule in rules.items():
        for wanted in sorted(_references(rule)):
            if wanted not in rules:
                return f"has no rule {wanted!r}, which {name!r} uses"
    problem = _check_recursion(rules)
    if problem is None and sum(_size(rule) for rule in rules.values()) > MAX_ELEMENTS:
        problem = "repeats too much"
    return problem


def _references(element: Element) -> set[str]:
    if isinstance(element, Reference):
        return {element.name}
    if isinstance(element, Repeat):
        return _references(element.element)
    if isinstance(element, Choice):
        return {name for sequence in element.alternatives for item in sequence for name in _references(item)}
    return set()


def _check_recursion(rules: Rules) -> str | None:
    """Find left recursion, and beginnings that branch so often that the engine's own check would not end."""
    nullable = _nullable_rules(rules)
    first = {name: _first_references(rule, nullable) for name, rule in rules.items()}
    visits: dict[str, int] = {}
    for start in rules:
        path = [(start, 0)]  # a stack of our own: chains of rules may be longer than Python's
        active = {start}
        while path:
            name, position = path.pop()
            if name in visits or position == len(first[name]):
                visits.setdefault(name, 1 + sum(visits.get(other, 0) for other in first[name]))
                active.discard(name)
                continue
            path.append((name, position + 1))
            other = first[name][position]
            if other in active:
                return f"is left-recursive: rule {other!r} can begin with itself"
            if other not in visits:
                active.add(other)
                path.append((other, 0))
    if sum(visits.values()) > MAX_VISITS:
        return "has rules that can begin in too many ways"
    return None


def _nullable_rules(rules: Rules) -> set[str]:
    """Return the rules that may be empty; a rule is looked at again only when one that it uses turns out so."""
    users: dict[str, set[str]] = {name: set() for name in rules}
    for name, rule in rules.items():
        for used in _references(rule):
            users[used].add(name)
    nullable: set[str] = set()
    waiting = list(rules)
    while waiting:
        name = waiting.pop()
        if name not in nullable and _is_nullable(rules[name], nullable):
            nullable.add(name)
            waiting.extend(users[name])
    return nullable


def _is_nullable(element: Element, nullable: set[str]) -> bool:
    if isinstance(element, Reference):
        return element.name in nullable
    if isinstance(element, Repeat):
        return element.low == 0 or _is_nullable(element.element, nullable)
    if isinstance(element, Choice):
        return any(all(_is_nullable(item, nullable) for item in sequence) for sequence in element.alternatives)
    return False


def _first_references(element: Element, nullable: set[str]) -> list[str]:
    """Return the rules that this element may begin with, one entry per way."""
    if isinstance(element, Reference):
        return [element.name]
    if isinstance(element, Repeat):
        return _first_references(element.element, nullable)
    found: list[str] = []
    if isinstance(element, Choice):
        for sequence in element.alternatives:
            for item in sequence:
                found += _first_references(item, nullable)
                if not _is_nullable(item, nullable):
                    break
    return found


def _size(element: Element) -> int:
    if isinstance(element, Repeat):
        return max(element.low, element.high or 1) * _size(element.element)
    if isinstance(element, Choice):
        return 1 + sum(_size(item) for sequence in element.alternatives for item in sequence)
    return 1
