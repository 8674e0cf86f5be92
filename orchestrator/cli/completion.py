"""`linkcpp completion SHELL`: print the script that completes commands and options in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from orchestrator.cli.app import Terminal, main
from orchestrator.errors import InputError


@click.command(name="completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_obj
def command(terminal: Terminal, shell: str) -> None:
    """Print the completion script of SHELL; load it from the shell's start file.

    In bash: `eval "$(linkcpp completion bash)"` in ~/.bashrc. In zsh the same with `zsh` in ~/.zshrc. In fish:
    `linkcpp completion fish > ~/.config/fish/completions/linkcpp.fish`.
    """
    completion = get_completion_class(shell)
    if completion is None:
        raise InputError(f"no completion is known for {shell}")
    try:
        script = completion(main, {}, "linkcpp", "_LINKCPP_COMPLETE").source()
    except RuntimeError as error:
        raise InputError(f"{shell} completion is not possible here: {error}") from error
    terminal.print(script)
