"""Bind an endpoint to an address."""

from __future__ import annotations

import errno
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

from orchestrator.api.app import create_app
from orchestrator.api.endpoint import Endpoint
from orchestrator.errors import InputError
from orchestrator.transport.base import HostPort

GRACE_SECONDS: Final = 3.0
"""How long answers may take to leave after the gateway has closed; by then they are only their last bytes."""


@asynccontextmanager
async def listening(
    endpoint: Endpoint, address: HostPort, tls: ssl.SSLContext | None = None
) -> AsyncIterator[HostPort]:
    """Serve an endpoint while the context is open; gives the address with the port that was bound.

    With ``tls`` connections are encrypted. Raises :class:`InputError` where the address cannot be bound.
    """
    # handler_cancellation: a client that leaves during a long prompt is noticed before the first byte is written.
    runner = web.AppRunner(
        create_app(endpoint),
        handle_signals=False,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=GRACE_SECONDS,
    )
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, address.host, address.port, ssl_context=tls).start()
        except OSError as error:
            raise _bind_error(address, error) from error
        port = int(runner.addresses[0][1])
        yield HostPort(address.host, port)
    finally:
        await runner.cleanup()


def _bind_error(address: HostPort, error: OSError) -> InputError:
    if error.errno == errno.EADDRINUSE:
        return InputError(
            f"cannot listen on {address}: the port is in use",
            hint="choose another with --listen",
        )
    if error.errno == errno.EACCES:
        return InputError(f"cannot listen on {address}: not permitted", hint="choose a port above 1023 with --listen")
    reason = error.strerror or str(error)
    return InputError(f"cannot listen on {address}: {reason}", hint="choose an address of this machine with --listen")
