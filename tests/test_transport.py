from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time

import pytest

from orchestrator.errors import InputError
from orchestrator.transport.base import HostPort, LinkLostError, LinkTimeoutError, parse_address
from orchestrator.transport.memory import MemoryListener, link_pair
from orchestrator.transport.sockets import SocketLink, skip_bytes
from orchestrator.transport.tcp import TcpConnector, TcpListener, connect


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")


def tcp_pair() -> tuple[SocketLink, SocketLink]:
    listener = TcpListener("127.0.0.1:0")
    caller = TcpConnector(listener.address).connect(2.0)
    taken = listener.accept(time.monotonic() + 2.0)
    listener.close()
    return caller, taken


@pytest.fixture(params=["memory", "tcp"])
def pair(request: pytest.FixtureRequest):
    first, second = link_pair() if request.param == "memory" else tcp_pair()
    yield first, second
    first.close()
    second.close()


def receive_exactly(link: SocketLink, size: int, deadline: float | None = None) -> bytes:
    data = memoryview(bytearray(size))
    at = 0
    while at < size:
        count = link.receive_into(data[at:], deadline)
        if count == 0:
            break
        at += count
    return bytes(data[:at])


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:9337", "127.0.0.1", 9337),
        ("[::1]:80", "::1", 80),
        ("box.local:0", "box.local", 0),
        (" [2001:db8::1]:65535 ", "2001:db8::1", 65535),
    ],
)
def test_an_address_reads_and_writes_the_same(text: str, host: str, port: int):
    assert parse_address(text) == HostPort(host, port)
    assert parse_address(str(parse_address(text))) == HostPort(host, port)


@pytest.mark.parametrize(
    "text", ["", "host", ":80", "::1:80", "host:", "host:x", "host:70000", "[host:80", "h:8²", "[]:1"]
)
def test_what_is_no_address_is_refused_in_words(text: str):
    with pytest.raises(InputError):
        parse_address(text)


def test_buffers_arrive_in_order(pair: tuple[SocketLink, SocketLink]):
    first, second = pair
    first.send([b"one", memoryview(b"two"), b"", b"three"])
    assert receive_exactly(second, 11) == b"onetwothree"
    second.send([b"back"])
    assert receive_exactly(first, 4) == b"back"


def test_more_than_the_kernel_buffers_is_sent_whole(pair: tuple[SocketLink, SocketLink]):
    first, second = pair
    data = bytes(range(256)) * (4 * 1024 * 16)  # 16 MiB
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(receive_exactly(second, len(data))))
    reader.start()
    first.send([data[:7], memoryview(data)[7:]], time.monotonic() + 30)
    reader.join(30)
    assert received == [data]


def test_send_some_never_waits(pair: tuple[SocketLink, SocketLink]):
    first, second = pair
    data = memoryview(bytes(range(251)) * 100_000)
    rest = first.send_some([data[:100], data[100:]])
    left = sum(map(len, rest))
    assert 0 < left < len(data)
    assert receive_exactly(second, 1000) == bytes(data[:1000])
    assert bytes(b"".join(rest)) == bytes(data[len(data) - left :])


def test_a_deadline_ends_a_receive_and_the_link_lives_on(pair: tuple[SocketLink, SocketLink]):
    first, second = pair
    view = memoryview(bytearray(8))
    begin = time.monotonic()
    with pytest.raises(LinkTimeoutError):
        first.receive_into(view, begin + 0.05)
    assert time.monotonic() - begin >= 0.04
    with pytest.raises(LinkTimeoutError):
        first.receive_into(view, begin)  # passed already
    second.send([b"late"])
    assert receive_exactly(first, 4, time.monotonic() + 5) == b"late"


def test_a_long_deadline_after_a_short_one_waits_longer(pair: tuple[SocketLink, SocketLink]):
    first, second = pair
    view = memoryview(bytearray(8))
    with pytest.raises(LinkTimeoutError):
        first.receive_into(view, time.monotonic() + 0.02)
    timer = threading.Timer(0.15, second.send, ([b"later"],))
    timer.start()
    assert first.receive_into(view, time.monotonic() + 10) > 0
    timer.join()


def test_a_long_wait_costs_no_more_than_its_first_milliseconds(pair: tuple[SocketLink, SocketLink]):
    first, second = pair
    spent = []
    for _ in range(3):
        timer = threading.Timer(0.08, first.send, [[b"x"]])
        timer.start()
        begin = time.thread_time()
        assert receive_exactly(second, 1) == b"x"
        spent.append(time.thread_time() - begin)
        timer.join()
    assert spent[0] < 0.02  # it looked for 5 ms and slept for 75
    assert max(spent[1:]) < 0.004  # the wait before was long: no looking at all


def test_after_a_long_wait_one_brief_wait_and_the_link_looks_again(pair: tuple[SocketLink, SocketLink]):
    first, second = pair

    def receive_after(delay: float) -> float:
        timer = threading.Timer(delay, first.send, [[b"x"]])
        timer.start()
        begin = time.thread_time()
        assert receive_exactly(second, 1) == b"x"
        timer.join()
        return time.thread_time() - begin

    receive_after(0.05)
    first.send([b"x"])
    receive_exactly(second, 1)  # there already: brief
    # It may be robbed of its core on a busy machine, so that it sleeps after all: one of several must look.
    for _ in range(200):
        if receive_after(0.05) > 0.001:
            return
        first.send([b"x"])
        receive_exactly(second, 1)
    pytest.fail("it never looked")


def test_a_deadline_ends_a_send_that_nobody_reads(pair: tuple[SocketLink, SocketLink]):
    with pytest.raises(LinkTimeoutError):
        pair[0].send([bytes(64 * 1024 * 1024)], time.monotonic() + 0.05)


def test_the_end_of_the_stream_is_zero_bytes_and_sending_on_is_a_loss(pair: tuple[SocketLink, SocketLink]):
    first, second = pair
    second.close()
    assert first.receive_into(memoryview(bytearray(8))) == 0
    with pytest.raises(LinkLostError):
        first.send([bytes(64 * 1024 * 1024)])


def test_close_wakes_a_thread_that_waits(pair: tuple[SocketLink, SocketLink]):
    first, _ = pair
    ended = threading.Event()

    def wait():
        with contextlib.suppress(LinkLostError):
            first.receive_into(memoryview(bytearray(8)))
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    first.close()
    first.close()
    assert ended.wait(5)
    thread.join()
    with pytest.raises(LinkLostError):
        first.send([b"x"])


def test_skip_bytes_cuts_at_any_place():
    buffers = [b"abc", memoryview(b"defg"), b"", b"h"]
    for count in range(9):
        assert b"".join(skip_bytes(buffers, count)) == b"abcdefgh"[count:]


# --- listeners and connectors -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "tcp"])
def test_a_listener_takes_links_and_its_close_wakes_accept(kind: str):
    listener = MemoryListener() if kind == "memory" else TcpListener("127.0.0.1:0")
    connector = listener.connector() if isinstance(listener, MemoryListener) else TcpConnector(listener.address)
    assert connector.address == listener.address
    with pytest.raises(LinkTimeoutError):
        listener.accept(time.monotonic() + 0.01)
    caller = connector.connect(2.0)
    taken = listener.accept(time.monotonic() + 5)
    caller.send([b"hello"])
    assert receive_exactly(taken, 5) == b"hello"
    outcome: list[BaseException] = []

    def wait():
        try:
            listener.accept()
        except LinkLostError as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    listener.close()
    thread.join(5)
    assert [type(error) for error in outcome] == [LinkLostError]
    with pytest.raises(LinkLostError):
        connector.connect(2.0)
    taken.send([b"on"])  # what was taken before lives on
    assert receive_exactly(caller, 2) == b"on"
    caller.close()
    taken.close()


def test_a_port_in_use_is_an_input_error_in_words():
    with TcpListener("127.0.0.1:0") as first, pytest.raises(InputError, match=r"cannot listen on .*in use"):
        TcpListener(first.address)


def test_nobody_listening_is_a_quick_loss_with_a_hint():
    with TcpListener("127.0.0.1:0") as listener:
        address = listener.address
    begin = time.monotonic()
    with pytest.raises(LinkLostError, match="refused") as caught:
        TcpConnector(address).connect(5.0)
    assert time.monotonic() - begin < 2
    assert caught.value.hint is not None
    assert address in caught.value.hint


def test_an_unknown_name_is_a_loss_that_names_it():
    def resolve(_: HostPort):
        raise LinkLostError("cannot look up 'nowhere'")

    with pytest.raises(LinkLostError, match="nowhere"):
        connect(HostPort("nowhere", 1), 1.0, resolve=resolve)
    with pytest.raises(LinkLostError, match="look up"):
        connect(HostPort("a" * 70, 1), 1.0)


@needs_ipv6
def test_an_ipv6_only_host_is_reached():
    with TcpListener("[::1]:0") as listener:
        assert listener.address.startswith("[::1]:")
        caller = TcpConnector(listener.address).connect(2.0)
        taken = listener.accept(time.monotonic() + 2)
        assert taken.address.startswith("[::1]:")
        caller.close()
        taken.close()


class BlackHole:
    """A listener whose queue is full: the kernel swallows every further SYN."""

    def __init__(self, host: str, family: socket.AddressFamily):
        self.listener = socket.socket(family, socket.SOCK_STREAM)
        self.listener.bind((host, 0))
        self.listener.listen(0)
        self.target = self.listener.getsockname()
        self.family = family
        self.callers: list[socket.socket] = []
        for _ in range(8):
            caller = socket.socket(family, socket.SOCK_STREAM)
            caller.setblocking(False)
            caller.connect_ex(self.target)
            self.callers.append(caller)
        time.sleep(0.05)
        probe = socket.socket(family, socket.SOCK_STREAM)
        probe.settimeout(0.2)
        try:
            self.swallows = probe.connect_ex(self.target) in (errno.EAGAIN, errno.EINPROGRESS, errno.ETIMEDOUT)
        finally:
            probe.close()

    def close(self):
        for sock in (*self.callers, self.listener):
            sock.close()


@pytest.fixture
def black_hole():
    family = socket.AF_INET6 if has_ipv6() else socket.AF_INET
    hole = BlackHole("::1" if has_ipv6() else "127.0.0.1", family)
    if not hole.swallows:
        hole.close()
        pytest.skip("this kernel does not swallow connections at a full queue")
    yield hole
    hole.close()


def test_a_name_whose_first_address_swallows_packets_is_still_reached_quickly(black_hole: BlackHole):
    with TcpListener("127.0.0.1:0") as listener:
        good = (socket.AF_INET, ("127.0.0.1", listener.host_port.port))
        bad = (black_hole.family, black_hole.target)
        begin = time.monotonic()
        link = connect(HostPort("dual.example", 1), 30.0, resolve=lambda _: [bad, bad, good])
        assert time.monotonic() - begin < 5
        assert link.address == "dual.example:1"
        link.close()


def test_an_address_that_swallows_packets_is_a_timeout(black_hole: BlackHole):
    begin = time.monotonic()
    with pytest.raises(LinkTimeoutError, match="no answer"):
        connect(HostPort("hole.example", 1), 0.3, resolve=lambda _: [(black_hole.family, black_hole.target)])
    assert 0.2 < time.monotonic() - begin < 3


def test_a_refusing_address_does_not_keep_the_next_one_waiting():
    with TcpListener("127.0.0.1:0") as gone:
        dead = (socket.AF_INET, ("127.0.0.1", gone.host_port.port))
    with TcpListener("127.0.0.1:0") as listener:
        good = (socket.AF_INET, ("127.0.0.1", listener.host_port.port))
        link = connect(HostPort("both.example", 1), 5.0, resolve=lambda _: [dead, good])
        link.send([b"x"])
        link.close()
