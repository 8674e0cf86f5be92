"""Unix sockets as a transport: the same links, files that are owned, leftovers that are replaced."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from pathlib import Path

import pytest

from orchestrator.errors import InputError
from orchestrator.transport.base import LinkLostError, LinkTimeoutError
from orchestrator.transport.sockets import SocketLink
from orchestrator.transport.tcp import TcpConnector, TcpListener
from orchestrator.transport.unix import UnixConnector, UnixListener, connector_of, is_unix, listener_of


def receive(link: SocketLink, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        view = memoryview(bytearray(size - len(data)))
        count = link.receive_into(view, time.monotonic() + 5)
        assert count
        data += view[:count]
    return bytes(data)


def test_bytes_go_both_ways_and_the_end_is_seen(tmp_path: Path) -> None:
    with UnixListener(f"unix:{tmp_path}/s") as listener:
        assert listener.address == f"unix:{tmp_path}/s"
        caller = UnixConnector(listener.address).connect(2.0)
        taken = listener.accept(time.monotonic() + 2.0)
        caller.send([b"hello ", memoryview(b"there")])
        assert receive(taken, 11) == b"hello there"
        taken.send([b"x"])
        assert receive(caller, 1) == b"x"
        taken.close()
        assert caller.receive_into(memoryview(bytearray(4)), time.monotonic() + 5) == 0
        with pytest.raises(LinkLostError):
            caller.send([bytes(1_000_000)])
        caller.close()


def test_only_its_user_may_connect_and_the_file_goes_with_the_listener(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listener = UnixListener(f"unix:{path}")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    listener.close()
    listener.close()
    assert not path.exists()
    with pytest.raises(LinkLostError, match="no such file"):
        UnixConnector(f"unix:{path}").connect(1.0)


def test_a_leftover_is_replaced_and_a_living_listener_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    with UnixListener(f"unix:{path}"), pytest.raises(InputError, match="address already in use"):
        UnixListener(f"unix:{path}")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError):
        UnixListener(f"unix:{tmp_path}/file")
    assert (tmp_path / "file").read_text() == "mine"


def test_accept_has_a_deadline_and_close_wakes_it(tmp_path: Path) -> None:
    listener = UnixListener(f"unix:{tmp_path}/s")
    with pytest.raises(LinkTimeoutError):
        listener.accept(time.monotonic() + 0.01)
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            listener.accept()
        except LinkLostError as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    listener.close()
    thread.join(5)
    assert len(ended) == 1


def test_a_full_queue_is_waited_for_until_the_timeout(tmp_path: Path) -> None:
    with UnixListener(f"unix:{tmp_path}/s", backlog=0) as listener:
        link = UnixConnector(listener.address).connect(1.0)
        with pytest.raises(LinkTimeoutError, match="no answer"):
            UnixConnector(listener.address).connect(0.05)
        link.close()


@pytest.mark.parametrize("address", ["unix:", "unix:relative", "unix:/" + "x" * 200])
def test_an_impossible_path_is_refused_in_words(address: str) -> None:
    with pytest.raises(InputError):
        UnixConnector(address)
    with pytest.raises(InputError):
        UnixListener(address)


def test_an_address_says_which_transport_it_is(tmp_path: Path) -> None:
    assert isinstance(connector_of(f"unix:{tmp_path}/s"), UnixConnector)
    assert isinstance(connector_of("127.0.0.1:1"), TcpConnector)
    with listener_of(f"unix:{tmp_path}/s") as one, listener_of("127.0.0.1:0") as two:
        assert isinstance(one, UnixListener)
        assert isinstance(two, TcpListener)
        assert [is_unix(one.address), is_unix(two.address)] == [True, False]
    with pytest.raises(InputError):
        connector_of("nowhere")
