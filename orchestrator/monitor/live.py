"""Poll a gateway's status route and keep the picture on the terminal true.

One thread does it all: fetch (with a deadline below the promised two seconds), draw, wait for a key.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Final

from rich.console import Console
from rich.live import Live

from orchestrator.errors import FleetError, InputError, LinkcppError, ProtocolError
from orchestrator.monitor.render import View, render
from orchestrator.status.snapshot import FleetSnapshot

FETCH_SECONDS: Final = 1.0
_MOST_BYTES: Final = 8 * 1024 * 1024
"""A status is some kilobytes; a longer answer is not one."""


def status_url(address: str) -> str:
    """Return the status route of a gateway given as ``http://host:port`` or ``host:port``; raise InputError."""
    url = address if "://" in address else f"http://{address}"
    try:
        parts = urllib.parse.urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise InputError(f"{address!r} is not the address of a gateway", hint="write it like http://127.0.0.1:8080")
    return url.rstrip("/") + "/status"


def fetch_snapshot(url: str, *, timeout: float = FETCH_SECONDS, api_key: str | None = None) -> FleetSnapshot:
    """Fetch the status from its route; raise :class:`FleetError` in words, with no proxy in between.

    ``timeout`` in seconds holds for the connection and for each read; ``api_key`` is for a gateway that asks for one.
    """
    request = urllib.request.Request(url)
    if api_key is not None:
        # The library writes headers in Latin-1, and keys are UTF-8.
        request.add_header("Authorization", f"Bearer {api_key}".encode().decode("latin-1"))
    # A fleet's gateway is on this machine or beside it: a proxy set in the environment is never the way there.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as response:
            body = response.read(_MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.UNAUTHORIZED:
            problem = "asks for an API key" if api_key is None else "does not know this API key"
            raise FleetError(problem, hint="give it with --api-key or LINKCPP_API_KEY") from error
        raise FleetError(f"answers HTTP {error.code} to {url}", hint="is it a linkcpp gateway?") from error
    except urllib.error.URLError as error:
        reason = error.reason
        raise FleetError(_reason(reason) if isinstance(reason, OSError) else str(reason)) from error
    except OSError as error:
        raise FleetError(_reason(error)) from error
    except http.client.HTTPException as error:
        raise FleetError("does not speak HTTP", hint="is it a linkcpp gateway?") from error
    if len(body) > _MOST_BYTES:
        raise ProtocolError("the status is too long to be one")
    return FleetSnapshot.from_json(body)


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return (error.strerror or str(error) or type(error).__name__).lower()


class StatusPoller:
    """Remembers the last good snapshot of one gateway, and since when there was no newer one."""

    def __init__(
        self,
        address: str,
        *,
        now: Callable[[], float] = time.monotonic,
        fetch: Callable[[str], FleetSnapshot] = fetch_snapshot,
    ) -> None:
        self.address = address
        self._url = status_url(address)
        self._now = now
        self._fetch = fetch
        self._snapshot: FleetSnapshot | None = None
        self._heard = now()

    def poll(self) -> View:
        """Fetch once and return what is known now; an unreachable gateway is part of the view, not an error."""
        try:
            self._snapshot = self._fetch(self._url)
        except LinkcppError as error:
            return View(self.address, self._snapshot, self._now() - self._heard, str(error))
        self._heard = self._now()
        return View(self.address, self._snapshot)


def watch(poller: StatusPoller, console: Console, interval: float) -> None:
    """Redraw every ``interval`` seconds until q or Ctrl-C."""
    with (
        contextlib.suppress(KeyboardInterrupt),
        _keys() as wait_for_key,
        Live(console=console, screen=True, auto_refresh=False, vertical_overflow="ellipsis") as live,
    ):
        while True:
            view = poller.poll()
            live.update(render(view, console.width, ascii_only=console.options.ascii_only), refresh=True)
            if wait_for_key(interval) in ("q", "Q"):
                return


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Give a function that waits up to some seconds for one key and returns it, or an empty text.

    Without a terminal to read from (or on a system without termios) it only waits.
    """
    try:
        import termios
        import tty
    except ImportError:
        yield _wait
        return
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (OSError, ValueError, termios.error):
        yield _wait
        return
    tty.setcbreak(descriptor)

    def wait_for_key(seconds: float) -> str:
        readable, _, _ = select.select([descriptor], [], [], seconds)
        if not readable:
            return ""
        # Past the text layer: it would take more keys into its buffer, where select cannot see them. An empty
        # read means that the terminal is gone, and with it whoever watched.
        return os.read(descriptor, 1).decode("ascii", "replace") or "q"

    try:
        yield wait_for_key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""
