"""The submitter's side of a request: its events, for a thread or for an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from orchestrator.gateway.sequence import Event, Failed, Finished, GenerationRequest, TextDelta


class Generation:
    """A submitted request; iterate it (``for`` in a thread, ``async for`` in an event loop) for its events.

    The iteration ends after :class:`Finished`, or raises the error that ended the request. Only one reader at a
    time. ``submitted`` is the moment of submission on the gateway's clock, in seconds.
    """

    def __init__(self, request: GenerationRequest, submitted: float) -> None:
        self.request = request
        self.submitted = submitted
        self._cancelled = False
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()
        self._listener: Callable[[], None] | None = None
        self._ended = False  # the reader has had the last event
        self._delivered_last = False

    @property
    def ended(self) -> bool:
        """Tell whether the gateway has delivered the last event."""
        return self._delivered_last

    @property
    def cancelled(self) -> bool:
        """Tell whether the submitter has lost interest."""
        return self._cancelled

    def cancel(self) -> None:
        """Ask the gateway to stop before its next step; harmless when the answer is complete."""
        self._cancelled = True

    def deliver(self, event: Event) -> None:
        """Hand an event to the reader; called by the gateway, from any thread."""
        with self._changed:
            self._events.append(event)
            self._delivered_last = isinstance(event, Finished | Failed)
            listener, self._listener = self._listener, None
            self._changed.notify_all()
        if listener is not None:
            listener()

    def __iter__(self) -> Iterator[TextDelta | Finished]:
        while not self._ended:
            with self._changed:
                while not self._events:
                    self._changed.wait()
                event = self._events.popleft()
            yield self._checked(event)

    async def __aiter__(self) -> AsyncIterator[TextDelta | Finished]:
        loop = asyncio.get_running_loop()
        while not self._ended:
            arrived = asyncio.Event()

            def notify(arrived: asyncio.Event = arrived) -> None:
                # After the loop has closed there is no reader left to tell.
                if not loop.is_closed():
                    loop.call_soon_threadsafe(arrived.set)

            with self._changed:
                event = self._events.popleft() if self._events else None
                self._listener = notify if event is None else None
            if event is None:
                await arrived.wait()
            else:
                yield self._checked(event)

    def _checked(self, event: Event) -> TextDelta | Finished:
        if isinstance(event, Failed):
            self._ended = True
            raise event.error
        if isinstance(event, Finished):
            self._ended = True
        return event
