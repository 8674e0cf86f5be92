"""The options of `serve` about who may ask, over which connections, and what is written down."""

from __future__ import annotations

import functools
import logging
import ssl
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from orchestrator.api.access import MAX_BODY, Access
from orchestrator.api.logs import JsonFormatter, access_logger
from orchestrator.errors import InputError


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """The conditions of an endpoint; ``request_timeout`` in seconds, ``slot_folder`` is where slots may be saved."""

    access: Access
    tls: ssl.SSLContext | None
    log_json: bool
    request_timeout: float | None
    slot_folder: Path | None

    def begin_log(self) -> None:
        """Write what happens to stderr."""
        handler = logging.StreamHandler(sys.stderr)
        if self.log_json:
            handler.setFormatter(JsonFormatter())
            access_logger.setLevel(logging.INFO)
        else:
            handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
            access_logger.setLevel(logging.WARNING)
        logging.basicConfig(level=logging.WARNING, handlers=[handler])

    def warn_of(self, address: object) -> str | None:
        """Return what to warn of where others than this machine can reach the address."""
        missing = [] if self.access.keys else ["anyone who can reach it"]
        if missing or self.tls is None:
            whom = missing[0] if missing else "those who have a key"
            return f"{address} answers {whom}" + ("" if self.tls else ", without encryption")
        return None


_OPTIONS = (
    click.option("--api-key", "keys", multiple=True, metavar="KEY", help="Ask for this key; may be repeated."),
    click.option(
        "--api-key-file",
        type=click.Path(path_type=Path),
        default=None,
        metavar="FILE",
        help="Ask for one of the keys in this file, one in each line.",
    ),
    click.option(
        "--cors-origin",
        "origins",
        multiple=True,
        metavar="ORIGIN",
        help="Let pages of this site ask, such as https://chat.example; * for all; may be repeated.",
    ),
    click.option(
        "--max-body",
        type=click.IntRange(1, 1024),
        default=MAX_BODY >> 20,
        show_default=True,
        metavar="MIB",
        help="Largest request.",
    ),
    click.option(
        "--tls-cert", type=click.Path(path_type=Path), default=None, metavar="FILE", help="Encrypt with this."
    ),
    click.option(
        "--tls-key",
        type=click.Path(path_type=Path),
        default=None,
        metavar="FILE",
        help="The certificate's key, unless it is in the same file.",
    ),
    click.option("--log-json", is_flag=True, help="Write a line of JSON for each request to stderr."),
    click.option(
        "--request-timeout",
        type=click.FloatRange(0, min_open=True),
        default=None,
        metavar="SECONDS",
        help="End answers that take longer.",
    ),
    click.option(
        "--slot-save-path",
        "slot_folder",
        type=click.Path(path_type=Path),
        default=None,
        metavar="FOLDER",
        help="Let clients save what slots hold here.",
    ),
)


def access_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options to a command, which gets them as one argument ``serving``."""

    @functools.wraps(function)
    def gather(
        *args: Any,
        keys: tuple[str, ...],
        api_key_file: Path | None,
        origins: tuple[str, ...],
        max_body: int,
        tls_cert: Path | None,
        tls_key: Path | None,
        log_json: bool,
        request_timeout: float | None,
        slot_folder: Path | None,
        **others: Any,
    ) -> None:
        if tls_key is not None and tls_cert is None:
            raise click.UsageError("--tls-key needs --tls-cert")
        if slot_folder is not None and not slot_folder.is_dir():
            raise InputError(f"--slot-save-path: there is no folder {slot_folder}")
        known = (*_checked(keys), *(() if api_key_file is None else _read_keys(api_key_file)))
        serving = ServingOptions(
            access=Access(known, tuple(origin.rstrip("/") for origin in origins), max_body << 20),
            tls=None if tls_cert is None else _tls(tls_cert, tls_key),
            log_json=log_json,
            request_timeout=request_timeout,
            slot_folder=slot_folder,
        )
        function(*args, serving=serving, **others)

    command: Callable[..., None] = gather
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def _checked(keys: tuple[str, ...]) -> tuple[str, ...]:
    if any(not key.strip() for key in keys):
        raise click.UsageError("--api-key is empty")
    return keys


def _read_keys(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"cannot read the API keys in {path}: {reason}") from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not keys:
        raise InputError(f"{path} holds no API key", hint="write one in each line")
    return keys


def _tls(certificate: Path, key: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        raise InputError(f"cannot use the certificate {certificate}: {reason or error}") from error
    return context
