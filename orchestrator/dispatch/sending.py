"""The rest of a large send, without deadlock and without one worker waiting for another.

A decode step's rows fit into the socket's buffer and never come here. A prefill's may not, and then:

- A worker reads a whole request before it answers, so it always empties its side of the connection, unless it
  is still writing an earlier answer: one that was abandoned after a timeout. It would wait for us to read and
  we for it to read. So a worker whose send is not complete is read from while it is written to; what comes can
  only be late, and is dropped.
- A worker whose send is complete may answer while others are still being sent to. It is not read here: its
  answer waits in its own socket's buffers, at worst it waits itself, and it waits for nobody but us.
- The sends go on side by side, each as its socket takes data: a worker behind a slow line does not keep the
  others from starting, and the whole takes as long as the slowest, not as the sum.
"""

from __future__ import annotations

import select
from collections.abc import Sequence

from orchestrator.dispatch.link import WorkerLink
from orchestrator.errors import FleetError
from orchestrator.transport.base import Buffer, LinkTimeoutError
from orchestrator.transport.sockets import poll_timeout


def finish_sends(unsent: dict[WorkerLink, Sequence[Buffer]], deadline: float, layer: int) -> None:
    """Send what is left to each worker, and take those that are done out of the dictionary.

    Raises:
        WorkerError: for the first that fails or takes no data in time; the dictionary has those not done.
    """
    poller = select.poll()
    links = {link.fileno(): link for link in unsent}
    for descriptor in links:
        poller.register(descriptor, select.POLLIN | select.POLLOUT)
    while unsent:
        events = poller.poll(poll_timeout(deadline))
        if not events:
            next(iter(unsent)).lose(LinkTimeoutError("it took no data until the deadline"), layer)
        for descriptor, event in events:
            link = links[descriptor]
            if event & ~select.POLLOUT:
                try:
                    link.absorb(deadline)
                except FleetError as error:
                    link.lose(error, layer)
            if event & select.POLLOUT:
                unsent[link] = link.push_rest(unsent[link], layer)
                if not unsent[link]:
                    poller.unregister(descriptor)
                    del unsent[link]
