"""The command `linkcpp`: finds each command when it is used, owns the terminal, turns errors into exit codes.

Exit codes: 0 done, 1 failed (a gate, a check), 2 unusable input or usage, 3 the engine, 4 another machine,
70 a defect in linkcpp itself, 130 interrupted.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn, Protocol

import click
from click.shell_completion import CompletionItem
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from orchestrator.errors import EngineError, EngineMissingError, LinkcppError

COMMANDS: Final = {
    "demo": "Show the whole way once: workers, proof, answer, figures.",
    "doctor": "Check compiler, engine, cores, memory, disk and ports.",
    "engine": "Build, inspect and verify the patched engine.",
    "model": "Get, make and inspect models.",
    "models": "List the models: status, sizes, wire, context, machines.",
    "worker": "Compute experts of a model for other machines.",
    "stage": "Compute some layers of a model as a stage of a ring.",
    "plan": "Lay a model over machines, and say why so.",
    "deploy": "Start the processes of a deployment.",
    "onboard": "Prove that a model gives the same answers over workers.",
    "serve": "Answer OpenAI-style requests with a model over workers.",
    "chat": "Talk with a model in the terminal.",
    "top": "Watch the fleet behind a gateway.",
    "bench": "Measure what the distribution costs.",
    "completion": "Print the completion script of a shell.",
}
"""Every command and its line in the overview, which is printed without importing any of them."""

EXIT_DEFECT: Final = 70
EXIT_INTERRUPTED: Final = 130

WIDTH_OF_FILES: Final = 240
"""Columns of a table that goes to a file or a pipe: nothing is cut for the sake of a screen that is not there."""


class ProgressCallback(Protocol):
    """Take the state of a long task: ``done`` of ``total`` (None: not known) and what it is doing."""

    def __call__(self, done: float, total: float | None, note: str = "") -> None:
        """Show this state."""


class Terminal:
    """The one owner of the terminal: results go to stdout, progress and errors to stderr."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, markup=False)
        self.error_console = Console(stderr=True, highlight=False, markup=False)

    def print(self, text: str = "", *, style: str | None = None) -> None:
        """Print a line of text as it is, without wrapping or markup."""
        self.console.print(text, style=style, soft_wrap=True)

    def error(self, text: str) -> None:
        """Print a line to stderr."""
        self.error_console.print(text, soft_wrap=True)

    def json(self, value: object) -> None:
        """Print one JSON value; NaN and infinity raise ValueError because JSON has none."""
        self.console.file.write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
        self.console.file.flush()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table; cells are plain text."""
        table = Table(
            title=title or None,
            title_justify="left",
            title_style="bold",
            header_style="bold",
            box=None,
            pad_edge=False,
        )
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*row)
        console = self.console
        if not console.is_terminal:
            console = Console(file=console.file, width=WIDTH_OF_FILES, highlight=False, markup=False)
        console.print(table)

    @contextmanager
    def progress(self, description: str) -> Iterator[ProgressCallback]:
        """Give a callback that draws a bar on a terminal and prints a line now and then elsewhere."""
        if not self.error_console.is_terminal:
            yield _SparseProgress(description, self.error, time.monotonic)
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
        )
        with Progress(*columns, console=self.error_console, transient=True) as bar:
            task = bar.add_task(description, total=None, note="")

            def show(done: float, total: float | None, note: str = "") -> None:
                bar.update(task, completed=done, total=total, note=note)

            yield show


class _SparseProgress:
    """Progress as lines: each further tenth or kind of note, and a sign of life each half minute."""

    SILENCE = 30.0

    def __init__(self, description: str, write: Callable[[str], None], now: Callable[[], float]) -> None:
        self._description = description
        self._write = write
        self._now = now
        self._tenth = -1
        self._kind = ""
        self._last = float("-inf")

    def __call__(self, done: float, total: float | None, note: str = "") -> None:
        tenth = int(10 * done / total) if total else 0
        kind = "" if total else re.sub(r"\d+", "", note)  # a count in the note is no news
        news = tenth > self._tenth or kind != self._kind
        if not news and self._now() - self._last < self.SILENCE:
            return
        self._kind = kind
        self._tenth = max(tenth, self._tenth)
        self._last = self._now()
        share = f" {100 * done / total:.0f} %" if total else ""
        self._write(f"{self._description}{share}{f' ({note})' if note else ''}")


class CommandGroup(click.Group):
    """A group whose commands live in ``orchestrator.cli.<name>`` and are imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name the commands without importing them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command; raise :class:`EngineError` if this installation lacks a part of it."""
        if cmd_name not in COMMANDS:
            return None
        module_name = f"orchestrator.cli.{cmd_name}"
        try:
            command = importlib.import_module(module_name).command
        except ModuleNotFoundError as error:
            if error.name == module_name:
                raise EngineError(f"this installation of linkcpp has no command {cmd_name!r}") from error
            if str(error.name).partition(".")[0] == "llama_cpp":
                raise EngineMissingError("the engine is not installed", hint="run `linkcpp engine build`") from error
            raise EngineError(
                f"command {cmd_name!r} needs the Python module {error.name!r}, which is not installed",
                hint="run `make setup` in a clone, or `pip install linkcpp` again",
            ) from error
        if not isinstance(command, click.Command):
            raise TypeError(f"{module_name}.command is a {type(command).__name__}, not a click command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the overview from the table, so that `--help` is quick and cannot fail."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete command names from the table."""
        names = [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line and exit with its code: what it returned or passed to ``ctx.exit``, else 0."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        try:
            result = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
            sys.stdout.flush()
        except (Exception, KeyboardInterrupt) as error:
            _exit_with(error)
        sys.exit(result if isinstance(result, int) else 0)


def _exit_with(error: BaseException) -> NoReturn:
    if isinstance(error, BrokenPipeError):
        # The reader has gone (`linkcpp ... | head`). Python flushes stdout once more at exit: into nowhere.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        sys.exit(1)
    terminal = Terminal()
    if isinstance(error, KeyboardInterrupt | click.Abort):
        if isinstance(error.__cause__, EOFError):
            terminal.error("error: the input ended")
            sys.exit(1)
        sys.exit(EXIT_INTERRUPTED)
    if isinstance(error, LinkcppError):
        terminal.error(f"error: {error}")
        if error.hint:
            terminal.error(f"hint: {error.hint}")
        sys.exit(error.exit_code)
    if isinstance(error, click.ClickException):
        terminal.error(f"error: {' '.join(error.format_message().split())}")
        if isinstance(error, click.UsageError) and error.ctx is not None:
            terminal.error(f"hint: `{error.ctx.command_path} --help` shows how it is used")
        sys.exit(error.exit_code)
    terminal.error(f"error: linkcpp failed unexpectedly: {type(error).__name__}: {error}".splitlines()[0])
    terminal.error(f"hint: this is a defect; the traceback is {_store_traceback(error)}")
    sys.exit(EXIT_DEFECT)


def _store_traceback(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error))
    try:
        descriptor, path = tempfile.mkstemp(prefix="linkcpp-traceback-", suffix=".txt")
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        sys.stderr.write(text)
        return "above, because no temporary file could be written"
    return f"in {path}"


def version() -> str:
    """Return the version of this installation, or say that it runs from a folder without one."""
    try:
        return importlib.metadata.version("linkcpp")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _print_version(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(f"linkcpp {version()}")
        ctx.exit()


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print the version."
)
@click.pass_context
def main(ctx: click.Context) -> None:
    """Run one big Mixture-of-Experts GGUF over several machines, with a proof that the answer is the same."""
    ctx.obj = Terminal()
