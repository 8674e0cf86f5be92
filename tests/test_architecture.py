"""The rules of the layout, checked on the syntax trees: who may import what, how long a module may be.

An import inside a function or under ``TYPE_CHECKING`` counts like any other: it is the dependency that matters.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LEVELS = (
    {"errors"},
    {"types", "config"},
    {"wire"},
    {"verification", "planner", "transport", "models"},
    {"dispatch", "ring", "fleet"},
    {"engine"},
    {"status"},
    {"gateway", "workers"},
    {"api", "onboarding"},
    {"monitor", "bench"},
    {"cli"},
    {"__main__"},
)
"""From the bottom up. A package imports from lower levels and from itself, never from its own level's others."""

LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}

PURE = (
    "orchestrator/planner/*.py",
    "orchestrator/verification/*.py",
    "orchestrator/wire/*.py",
    "orchestrator/dispatch/state.py",
    "orchestrator/ring/hop.py",
    "orchestrator/ring/items.py",
    "orchestrator/ring/layout.py",
    "orchestrator/ring/p*.py",
    "orchestrator/ring/replay.py",
    "orchestrator/ring/st*.py",
    "orchestrator/gateway/backend.py",
    "orchestrator/gateway/cost.py",
    "orchestrator/gateway/depth.py",
    "orchestrator/gateway/drafters/ngram.py",
    "orchestrator/gateway/occupancy.py",
    "orchestrator/gateway/prefix.py",
    "orchestrator/gateway/queue.py",
    "orchestrator/gateway/routing.py",
    "orchestrator/gateway/scheduler.py",
    "orchestrator/gateway/sequence.py",
    "orchestrator/gateway/speculation.py",
    "orchestrator/api/schema.py",
    "orchestrator/api/stream.py",
    "orchestrator/monitor/render.py",
)
"""Modules that take time, randomness and bytes as arguments."""

IMPURE_MODULES = {"asyncio", "socket", "threading", "time", "random", "os"}

MAY_IMPORT = {
    "ctypes": ("bindings/",),
    "llama_cpp": ("bindings/",),
    "bindings": ("bindings/", "orchestrator/engine/"),
    "click": ("orchestrator/cli/",),
    "rich": ("orchestrator/monitor/", "orchestrator/bench/", "orchestrator/cli/app.py"),
}
"""Who may import a module that only one place should know."""

MAY_READ_SETTINGS = ("orchestrator/config.py", "orchestrator/models/catalog.py", "bindings/build.py")

MAXIMUM_LINES = 600


@dataclass(frozen=True)
class Module:
    path: str
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """The part of ``orchestrator`` that this module belongs to."""
        return Path(self.path).parts[1].removesuffix(".py")


@dataclass(frozen=True)
class Import:
    module: Module
    name: str
    line: int

    def __str__(self) -> str:
        return f"{self.module.path}:{self.line} imports {self.name}"


def load() -> list[Module]:
    paths = sorted([*ROOT.glob("orchestrator/**/*.py"), *ROOT.glob("bindings/**/*.py")])
    modules = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        modules.append(Module(str(path.relative_to(ROOT)), text, ast.parse(text)))
    return modules


MODULES = load()


def imports_of(module: Module) -> Iterator[Import]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = Path(module.path).with_suffix("").parts[: -node.level]
                base = ".".join([*parts, base]).rstrip(".")
            for alias in node.names:
                yield Import(module, f"{base}.{alias.name}", node.lineno)


IMPORTS = [found for module in MODULES for found in imports_of(module)]


def test_the_checks_see_the_code() -> None:
    assert {"orchestrator/cli/app.py", "bindings/build.py"} <= {module.path for module in MODULES}
    assert any(str(found).endswith("imports rich.console.Console") for found in IMPORTS)


def test_every_package_has_a_level() -> None:
    packages = {module.package for module in MODULES if module.path.startswith("orchestrator/")}
    assert packages - {"__init__"} <= set(LEVEL_OF)


def test_imports_point_down() -> None:
    wrong = []
    for found in IMPORTS:
        parts = found.name.split(".")
        if parts[0] != "orchestrator" or not found.module.path.startswith("orchestrator/") or len(parts) < 2:
            continue
        here, there = found.module.package, parts[1]
        if there in LEVEL_OF and there != here and LEVEL_OF[there] >= LEVEL_OF[here]:
            wrong.append(str(found))
    assert wrong == []


def test_bindings_are_a_leaf() -> None:
    wrong = [
        str(found)
        for found in IMPORTS
        if found.module.path.startswith("bindings/") and found.name.split(".")[0] == "orchestrator"
    ]
    assert wrong == []


@pytest.mark.parametrize("name", sorted(MAY_IMPORT))
def test_one_place_knows(name: str) -> None:
    users = [found for found in IMPORTS if found.name.split(".")[0] == name]
    assert users, f"nobody imports {name}: the rule is out of date"
    assert [str(found) for found in users if not found.module.path.startswith(MAY_IMPORT[name])] == []


@pytest.mark.parametrize("pattern", PURE)
def test_pure_modules_take_what_they_need_as_arguments(pattern: str) -> None:
    paths = {str(path.relative_to(ROOT)) for path in ROOT.glob(pattern)}
    wrong = [
        str(found) for found in IMPORTS if found.module.path in paths and found.name.split(".")[0] in IMPURE_MODULES
    ]
    assert wrong == []


def settings_read(module: Module) -> Iterator[str]:
    """Yield reads of single variables; handing the whole environment on to a child process is none."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            subject, key = node.func, node.args[0]
            reads = subject.attr == "getenv" or (subject.attr == "get" and ast.unparse(subject.value) == "os.environ")
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            reads, key = ast.unparse(node.value) == "os.environ", node.slice
        else:
            continue
        if reads and ast.unparse(key) != "'PYTHONPATH'":
            yield f"{module.path}:{node.lineno} reads {ast.unparse(key)}"


def test_settings_are_read_in_one_place() -> None:
    reads = [read for module in MODULES for read in settings_read(module)]
    assert reads, "not even the settings module reads one: the rule is out of date"
    assert [read for read in reads if not read.startswith(MAY_READ_SETTINGS)] == []


def test_modules_fit_in_one_reading() -> None:
    long = {module.path: count for module in MODULES if (count := module.text.count("\n")) > MAXIMUM_LINES}
    assert long == {}


def test_every_module_says_what_it_is() -> None:
    wordless = [module.path for module in MODULES if len((ast.get_docstring(module.tree) or "").split()) < 3]
    assert wordless == []


def test_no_drawer_for_everything() -> None:
    names = {"utils", "util", "helpers", "helper", "misc", "common"}
    assert [module.path for module in MODULES if Path(module.path).stem in names] == []


def test_assert_never_checks_input() -> None:
    found = [
        f"{module.path}:{node.lineno}"
        for module in MODULES
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Assert)
    ]
    assert found == []


def test_no_pickle() -> None:
    assert [str(found) for found in IMPORTS if found.name.split(".")[0] in {"pickle", "marshal", "shelve"}] == []
