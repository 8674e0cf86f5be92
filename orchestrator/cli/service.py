"""What commands have in common that run until they are told to stop: where they listen, and what ends them."""

from __future__ import annotations

import os
import signal
import threading

from orchestrator.errors import InputError
from orchestrator.transport.base import HostPort
from orchestrator.transport.tcp import TcpListener


def listen_on_loopback() -> TcpListener:
    """Listen on any free port of this machine only."""
    try:
        return TcpListener(HostPort("127.0.0.1", 0))
    except InputError:
        # A machine with nothing but IPv6 may lack even the loopback address of IPv4.
        return TcpListener(HostPort("::1", 0))


def stop_on_signals() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set; until now they ended the process at once, which loading may."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: stop.set())
    return stop


def end_with_stdin() -> None:
    """End like on SIGTERM when standard input ends, because whoever started this process is gone then."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="stdin", daemon=True).start()
