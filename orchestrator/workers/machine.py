"""How much memory processes of this machine may still take: what is free, and what limits leave of it."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

_UNLIMITED: Final = 1 << 60  # control groups of version 1 write a number like this where there is no limit


def usable_memory(*, groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return bytes: the least of what is free, what control groups leave, and what this process may map."""
    limits = [psutil.virtual_memory().available, *_group_limits(groups, own)]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    return max(0, min(limits))


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
            top, names = groups, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = groups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        place = top / path.strip("/")
        for group in (place, *place.parents):
            limit, used = (_number(group / name) for name in names)
            if limit is not None and limit < _UNLIMITED:
                yield limit - (used or 0)
            if group == top:
                break


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
