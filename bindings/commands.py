"""Run the commands of a build, line by line, so that a bar can follow and a failure can be explained."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from bindings.errors import BuildError


class Runner(Protocol):
    """Run ``command`` in ``folder``, hand each line of its output to ``on_line`` and return its exit code."""

    def __call__(
        self, command: Sequence[str], *, folder: Path, environment: Mapping[str, str], on_line: Callable[[str], None]
    ) -> int:
        """Run the command to its end; raise :class:`BuildError` if it cannot be started."""


def run_command(
    command: Sequence[str], *, folder: Path, environment: Mapping[str, str], on_line: Callable[[str], None]
) -> int:
    """Run a command as a child process; stdout and stderr come as one stream of lines."""
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
    except FileNotFoundError as error:
        raise BuildError(f"{command[0]} is not installed", hint=f"apt-get install {command[0]}") from error
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error.strerror}") from error
    with process:
        if process.stdout is not None:
            for line in process.stdout:
                on_line(line.rstrip("\n"))
    return process.returncode


def output_of(
    run: Runner, command: Sequence[str], *, folder: Path, environment: Mapping[str, str]
) -> tuple[int, list[str]]:
    """Run a short command and return its exit code and lines."""
    lines: list[str] = []
    code = run(command, folder=folder, environment=environment, on_line=lines.append)
    return code, lines
