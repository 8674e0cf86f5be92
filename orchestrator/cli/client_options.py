"""The option of commands that ask a server: the key that it may want."""

from __future__ import annotations

from typing import Final

import click

from orchestrator import config


def _chosen(_context: click.Context, _parameter: click.Parameter, given: str | None) -> str | None:
    key = (config.api_key() if given is None else given.strip()) or None
    if key is not None and not key.isprintable():
        raise click.BadParameter("a key has no control characters")  # they would end the header that carries it
    return key


api_key_option: Final = click.option(
    "--api-key",
    default=None,
    metavar="KEY",
    callback=_chosen,
    help="The server's API key. [default: LINKCPP_API_KEY of the environment, which other users cannot see]",
)
