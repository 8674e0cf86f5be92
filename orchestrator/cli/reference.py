"""Write docs/cli.md from the commands themselves: ``python -m orchestrator.cli.reference > docs/cli.md``.

A test compares the file with what this gives, so the page cannot fall behind.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator

import click

from orchestrator.cli.app import main as linkcpp

PREFACE = """# The command line

`make docs` writes this page from the commands; `linkcpp COMMAND --help` says the same in a terminal.

Results go to stdout, progress and errors to stderr; with `--json` stdout is one JSON value. Exit codes:

| code | meaning |
|---|---|
| 0 | done |
| 1 | failed: a gate, a check |
| 2 | unusable input, or wrong usage |
| 3 | the engine is missing, cannot be built, or failed |
| 4 | another machine, or the way to it |
| 70 | a defect of linkcpp; the traceback is in the file that the message names |
| 130 | interrupted |
"""


def render(root: click.Group = linkcpp) -> str:
    """Return the page in Markdown: every command with its arguments and options."""
    return "\n".join([PREFACE, *_describe(root, click.Context(root, info_name="linkcpp"))])


def _describe(command: click.Command, context: click.Context) -> Iterator[str]:
    is_root = context.parent is None
    if not is_root:
        yield f"{'#' * (1 + context.command_path.count(' '))} `{context.command_path}`\n"
        yield f"    {' '.join([context.command_path, *command.collect_usage_pieces(context)])}\n"
        if command.help:
            yield inspect.cleandoc(command.help) + "\n"
    options = [
        _option(parameter)
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.hidden
    ]
    if options:
        if is_root:
            yield "## Options of all commands\n"
        yield "\n".join(options) + "\n"
    if isinstance(command, click.Group):
        for name in sorted(command.list_commands(context)):
            child = command.get_command(context, name)
            if child is not None:
                yield from _describe(child, click.Context(child, info_name=name, parent=context))


def _option(option: click.Option) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    notes = []
    if not option.is_flag and not option.count:
        kind = option.type
        choices = [str(choice) for choice in kind.choices] if isinstance(kind, click.Choice) else []
        names += f" {'|'.join(choices) if choices else option.metavar or kind.name.upper().removesuffix(' RANGE')}"
        default = option.default
        if isinstance(default, str | int | float | tuple) and default not in ("", ()):
            words = ", ".join(map(str, default)) if isinstance(default, tuple) else str(default)
            notes.append(f"default {words}")
        if isinstance(kind, click.IntRange | click.FloatRange):
            bounds = [f"from {kind.min}" * (kind.min is not None), f"to {kind.max}" * (kind.max is not None)]
            notes.append(" ".join(filter(None, bounds)))
    if option.required:
        notes.append("required")
    if option.multiple and "several times" not in (option.help or ""):
        notes.append("may be given several times")
    remarks = f" ({'; '.join(filter(None, notes))})" if notes else ""
    return f"- {names}: {option.help or ''}{remarks}"


if __name__ == "__main__":
    sys.stdout.write(render())
