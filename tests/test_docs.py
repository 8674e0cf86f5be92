"""The documents keep up with the code: commands, options and paths that they name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from orchestrator.cli import reference
from orchestrator.cli.app import main

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
TEXT = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}
ALL_TEXT = "\n".join(TEXT.values())

TOP = ("orchestrator", "bindings", "patches", "tests", "docs", ".ci")
PATH_IN_TEXT = re.compile(rf"`((?:{'|'.join(map(re.escape, TOP))})/[\w./*-]*|[\w-]+\.(?:toml|md)|Makefile)`")
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#]+)(?:#[^)]*)?\)")


def commands(command: click.Command, context: click.Context) -> Iterator[tuple[str, click.Command]]:
    yield context.command_path, command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from commands(child, click.Context(child, info_name=name, parent=context))


def names_in(text: str, name: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text) is not None


def test_the_page_of_the_command_line_is_what_the_commands_say() -> None:
    assert TEXT[ROOT / "docs" / "cli.md"] == reference.render(), "run `make docs`"


def test_every_command_and_option_is_explained() -> None:
    missing = []
    for path, command in commands(main, click.Context(main, info_name="linkcpp")):
        if not names_in(ALL_TEXT, path):
            missing.append(path)
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                missing += [f"{path} {name}" for name in parameter.opts if not names_in(ALL_TEXT, name)]
    assert missing == []


def test_every_option_has_words() -> None:
    wordless = [
        f"{path} {parameter.name}"
        for path, command in commands(main, click.Context(main, info_name="linkcpp"))
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.help and not parameter.hidden
    ]
    assert wordless == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_in_documents_exist(document: Path) -> None:
    missing = []
    for name in PATH_IN_TEXT.findall(TEXT[document]):
        if not (list(ROOT.glob(name.rstrip("/"))) or (document.parent / name).exists()):
            missing.append(name)
    for link in LINK.findall(TEXT[document]):
        if not (document.parent / link.strip()).exists():
            missing.append(link)
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tests_in_documents_exist(document: Path) -> None:
    missing = [
        f"{path}::{name}"
        for path, name in re.findall(r"`(tests/\w+\.py)::(\w+)`", TEXT[document])
        if not re.search(rf"^(?:async )?def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_targets_of_make_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)", TEXT[document]))
    assert named <= targets
