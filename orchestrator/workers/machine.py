"""How much memory processes of this machine may still take: what is free, and what limits leave of it."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

from orchestrator.errors import PlanError
from orchestrator.models.inspection import size_text

_UNLIMITED: Final = 1 << 60  # control groups of version 1 write a number like this where there is no limit


def usable_memory(*, groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return bytes: the least of what is free, what control groups leave, and what this process may map."""
    limits = [psutil.virtual_memory().available, *_group_limits(groups, own)]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    return max(0, min(limits))


def require_memory(needed: int, what: str, *, hint: str) -> None:
    """Raise :class:`PlanError` if this machine has not so many bytes left; ``hint`` says what to do then."""
    available = usable_memory()
    if needed > available:
        raise PlanError(
            f"{what} takes {size_text(needed)} of memory, and {size_text(available)} are left here: "
            f"{size_text(needed - available)} too much",
            hint=hint,
        )


def _group_limits(groups: Path, own: Path) -> Iterator[int]:
    """Yield what each memory group around this process leaves; unreadable ones leave everything."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":  # version 2
            top, names, cached = groups, ("memory.max", "memory.current"), ("active_file", "inactive_file")
        elif "memory" in controllers.split(","):
            top, names = groups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            cached = ("total_active_file", "total_inactive_file")
        else:
            continue
        place = top / path.strip("/")
        for group in (place, *place.parents):
            limit, used = (_number(group / name) for name in names)
            if limit is not None and limit < _UNLIMITED:
                yield limit - max(0, (used or 0) - _cached(group / "memory.stat", cached))
            if group == top:
                break


def _cached(statistics: Path, names: tuple[str, str]) -> int:
    """Return the bytes of files in the page cache, which count as used and are given up when others need them."""
    try:
        lines = statistics.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    figures = dict(line.split(" ", 1) for line in lines if " " in line)
    return sum(int(figures.get(name, "0")) for name in names)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
