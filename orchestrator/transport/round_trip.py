"""How long a packet takes there and back, measured without anything of ours at the other end."""

from __future__ import annotations

import time

from orchestrator.errors import FleetError
from orchestrator.transport.base import HostPort, LinkLostError
from orchestrator.transport.tcp import connect


def measure_round_trip(address: HostPort, *, timeout: float = 2.0, tries: int = 3) -> float | None:
    """Return seconds to a host and back, None where it does not answer or has no such name.

    A connection is tried and it does not matter whether it is taken or refused: both answers come after one round
    trip. The shortest of ``tries`` counts, because a name may have to be looked up first.
    """
    best: float | None = None
    for _ in range(tries):
        begin = time.perf_counter()
        try:
            connect(address, timeout).close()
        except LinkLostError as error:
            if "refused" not in str(error).lower():
                continue
        except FleetError:
            return best
        spent = time.perf_counter() - begin
        best = spent if best is None else min(best, spent)
    return best
