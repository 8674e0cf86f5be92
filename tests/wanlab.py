#!/usr/bin/env python3
"""A WAN on one machine: network namespaces joined by a user-space switch.

Each host is a Linux network namespace with one TUN interface. A single process
switches IP packets between the hosts and delays, drops and rate-limits them, so
real TCP, UDP and QUIC stacks see a real RTT, real loss and a real bottleneck.
It needs root, /dev/net/tun and iproute2, and no kernel module (no netem).

    wanlab.py --host gw:0 --host w1:40 --host w2:20:100:0.5 -- bash script.sh

HOST is NAME:ONE_WAY_MS[:RATE_MBIT[:LOSS_PERCENT]]. The delay is that host's own
access link: RTT between two hosts is 2 x (their one-way delays added). Hosts get
10.9.0.1, 10.9.0.2, ... in order. The command runs outside the namespaces with
WANLAB_<NAME>=<ip> set for each host; it enters one with `ip netns exec NAME ...`.
The lab goes away when the command ends, and its exit status is the lab's.

--trace FILE writes a line for each TCP packet that carries data: the time it was sent
(time.perf_counter), the names of both hosts, and how many bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TextIO

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
QUEUE_BYTES = 4 << 20  # a link's buffer; a packet that would overflow it is dropped
libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Host:
    name: str
    delay: float  # seconds, one way
    rate: float  # bytes/s, 0 = unlimited
    loss: float  # 0..1
    ip: str = ""
    fd: int = -1
    busy_until: float = 0.0
    counters: dict[str, int] = field(default_factory=lambda: {"packets": 0, "bytes": 0, "dropped": 0})

    @classmethod
    def parse(cls, text: str) -> Host:
        name, *rest = text.split(":")
        delay, rate, loss = [*map(float, rest), 0.0, 0.0, 0.0][:3]
        return cls(name, delay / 1e3, rate * 1e6 / 8, loss / 100)


def sh(command: str, check: bool = True) -> None:
    subprocess.run(command, shell=True, check=check, stderr=None if check else subprocess.DEVNULL)


def open_tun(host: Host) -> None:
    """Make the namespace and its TUN, and keep the TUN's file descriptor in this process."""
    sh(f"ip netns del {host.name}", check=False)
    sh(f"ip netns add {host.name}")
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    away = os.open(f"/run/netns/{host.name}", os.O_RDONLY)
    if libc.setns(away, 0):
        raise OSError(ctypes.get_errno(), f"setns {host.name}")
    host.fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(host.fd, TUNSETIFF, struct.pack("16sH", b"wan", IFF_TUN | IFF_NO_PI))
    sh(f"ip addr add {host.ip}/24 dev wan; ip link set wan mtu 9000 up; ip link set lo up")
    libc.setns(home, 0)
    os.close(home)
    os.close(away)


def tcp_payload(packet: bytes) -> int:
    """Return how many bytes of data an IPv4 packet carries over TCP."""
    if packet[0] >> 4 != 4 or packet[9] != 6:
        return 0
    header = 4 * (packet[0] & 15)
    return int.from_bytes(packet[2:4], "big") - header - 4 * (packet[header + 12] >> 4)


def switch(hosts: list[Host], running: Callable[[], bool], trace: TextIO | None = None) -> None:
    """Move packets until ``running`` says no."""
    by_ip = {bytes(map(int, h.ip.split("."))): h for h in hosts}
    by_fd = {h.fd: h for h in hosts}
    line: list[tuple[float, int, int, bytes]] = []
    order = 0
    while running():
        now = time.perf_counter()
        while line and line[0][0] <= now:
            _, _, fd, packet = heapq.heappop(line)
            try:
                os.write(fd, packet)
            except OSError:
                by_fd[fd].counters["dropped"] += 1
        wait = min(0.2, max(0.0, line[0][0] - time.perf_counter())) if line else 0.2
        for fd in select.select(list(by_fd), [], [], wait)[0]:
            source = by_fd[fd]
            for _ in range(64):
                try:
                    packet = os.read(fd, 65536)
                except BlockingIOError:
                    break
                target = by_ip.get(packet[16:20]) if packet[0] >> 4 == 4 else None
                if target is None or target is source:
                    continue
                at = time.perf_counter()
                for link in (source, target):  # the two access links, one after the other
                    if link.loss and random.random() < link.loss:
                        link.counters["dropped"] += 1
                        break
                    if link.rate:
                        if (link.busy_until - at) * link.rate > QUEUE_BYTES:
                            link.counters["dropped"] += 1
                            break
                        link.busy_until = max(link.busy_until, at) + len(packet) / link.rate
                        at = link.busy_until
                    at += link.delay
                else:
                    source.counters["packets"] += 1
                    source.counters["bytes"] += len(packet)
                    if trace is not None and (size := tcp_payload(packet)):
                        trace.write(f"{time.perf_counter():.6f} {source.name} {target.name} {size}\n")
                    order += 1
                    heapq.heappush(line, (at, order, target.fd, packet))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", action="append", required=True, type=Host.parse, metavar="HOST")
    parser.add_argument("--stats", action="store_true", help="print what each host sent, at the end")
    parser.add_argument("--trace", type=argparse.FileType("w"), help="write what TCP data is sent")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND [ARG ...]")
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command")
    for number, host in enumerate(options.host, 1):
        host.ip = f"10.9.0.{number}"
    try:
        for host in options.host:
            open_tun(host)
        child = subprocess.Popen(
            command, env={**os.environ, **{f"WANLAB_{h.name.upper()}": h.ip for h in options.host}}
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: child.terminate())
        switch(options.host, lambda: child.poll() is None, options.trace)
        if options.stats:
            for host in options.host:
                print(f"wanlab {host.name} {host.ip} sent {host.counters}", file=sys.stderr)
        return child.returncode
    finally:
        if options.trace is not None:
            options.trace.close()
        for host in options.host:
            sh(f"ip netns del {host.name}", check=False)


if __name__ == "__main__":
    sys.exit(main())
