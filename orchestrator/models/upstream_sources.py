"""Find in the engine's sources which architectures have experts: the denominator of our tables. PURE.

In the pinned llama.cpp every graph with experts calls ``llm_graph_context::build_moe_ffn``, from the file of its
model in ``src/models``. Which architecture uses which graph stands in three other places: the names
(``llama-arch.cpp``), the factory (``llama-model.cpp``) and the class declarations (``models/models.h``), where a
class may take another one's graph by ``using graph = ...`` or by inheriting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from orchestrator.errors import InputError

CALL: Final = "build_moe_ffn"
"""The function that every architecture with experts calls."""

_NAME: Final = re.compile(r'\{\s*(LLM_ARCH_\w+)\s*,\s*"([^"]+)"')
_FACTORY: Final = re.compile(r"case (LLM_ARCH_\w+):\s*return new (llama_model_\w+)\(")
_CLASS: Final = re.compile(r"^struct (llama_model_\w+) : public (\w+) \{(.*?)^\};", re.MULTILINE | re.DOTALL)
_OWN_GRAPH: Final = re.compile(r"\b(?:struct|using) graph\w*\b")
_BORROWED_GRAPH: Final = re.compile(
    r"using graph\w*\s*=\s*(llama_model_\w+)::|struct graph\w* : public (llama_model_\w+)::"
)
_GRAPH_CODE: Final = re.compile(r"^[\w\s*:<>]*?\b(llama_model_\w+)::graph\w*(?:<\w+>)?::\w+\(", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class SourceInventory:
    """What the sources say: files that call :data:`CALL`, and for each architecture those its graph is built from."""

    files: tuple[str, ...]
    calls: int
    architectures: Mapping[str, tuple[str, ...]]


def wanted_source(path: str) -> bool:
    """Tell whether a file of ``llama.cpp/src`` (path below it) is needed for :func:`take_inventory`."""
    return path in _TABLES or (path.startswith("models/") and path.endswith(".cpp"))


def take_inventory(sources: Mapping[str, str]) -> SourceInventory:
    """Read the sources, path below ``llama.cpp/src`` -> text; raise :class:`InputError` where one is missing."""
    missing = [path for path in _TABLES if path not in sources]
    if missing:
        raise InputError(f"the engine's sources lack {missing[0]}")
    names = dict(_NAME.findall(sources["llama-arch.cpp"]))
    classes = {name: (base, body) for name, base, body in _CLASS.findall(sources["models/models.h"])}
    code: dict[str, set[str]] = {}
    calls: dict[str, int] = {}
    for path, text in sources.items():
        if not path.startswith("models/") or not path.endswith(".cpp"):
            continue
        file = path.removeprefix("models/")
        count = text.count(f"{CALL}(")
        if count:
            calls[file] = count
        for name in _GRAPH_CODE.findall(text):
            code.setdefault(name, set()).add(file)
    architectures = {}
    for constant, name in _FACTORY.findall(sources["llama-model.cpp"]):
        files = sorted(file for file in _graph_files(name, classes, code) if file in calls)
        if files and constant in names:
            architectures[names[constant]] = tuple(files)
    return SourceInventory(tuple(sorted(calls)), sum(calls.values()), architectures)


_TABLES: Final = ("llama-arch.cpp", "llama-model.cpp", "models/models.h")


def _graph_files(name: str, classes: Mapping[str, tuple[str, str]], code: Mapping[str, set[str]]) -> set[str]:
    """Return the files that hold the code of a class's graphs, borrowed ones included."""
    files: set[str] = set()
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current in seen or current not in classes:
            continue
        seen.add(current)
        base, body = classes[current]
        files |= code.get(current, set())
        waiting += [first or second for first, second in _BORROWED_GRAPH.findall(body)]
        if not _OWN_GRAPH.search(body):
            waiting.append(base)
    return files
