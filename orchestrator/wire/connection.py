"""One end of a connection, without I/O: bytes in, messages out; messages in, buffers out.

The caller moves the bytes::

    while (message := connection.next_message()) is None:
        connection.received(link.receive_into(connection.receive_buffer()))

Memory follows what has arrived, not what a header announces: the buffer doubles while a frame comes in, so a
peer that announces 256 MiB and sends nothing costs 64 KiB.
"""

from __future__ import annotations

from typing import Final

from orchestrator.errors import ProtocolError
from orchestrator.wire.codec import Buffers, EncodedDispatch, frame_dispatch, pull_message, push_message
from orchestrator.wire.frame import HEADER_SIZE, MAX_PAYLOAD, PREFIX, Header, check_payload, pull_header
from orchestrator.wire.messages import SUPPORTED, Message, MessageType, VersionRange, Welcome
from orchestrator.wire.ring_codec import STEP, FramedItem, FramedStep
from orchestrator.wire.ring_messages import StageWelcome
from orchestrator.wire.state import ConnectionState, Role, State

FIRST_CAPACITY: Final = 64 * 1024
_DISPATCH: Final = MessageType.DISPATCH
_STEP: Final = MessageType.STEP
KEPT_CAPACITY: Final = 32 * 1024 * 1024  # a larger buffer is given back once its frame is used up


class Connection:
    """The protocol's state of one end of one connection; after a :class:`ProtocolError` it is of no more use."""

    def __init__(self, role: Role, *, max_payload: int = MAX_PAYLOAD, versions: VersionRange = SUPPORTED) -> None:
        self.versions = versions
        self.minor = versions.highest  # until the greeting agreed on one
        self.bytes_sent = 0  # in whole frames, headers included
        self.bytes_received = 0
        self._max_payload = max_payload
        self._state = ConnectionState(role)
        self._data = memoryview(bytearray(FIRST_CAPACITY))
        self._start = 0  # of the frame that is next
        self._end = 0  # of what has arrived
        self._header: Header | None = None  # of the frame that is next, once it is there
        self._last: tuple[int, int] | None = None  # where the message before is, if a small step that is still there
        self._agreed = False

    @property
    def own_state(self) -> State:
        """What this end may do."""
        return self._state.own

    @property
    def peer_state(self) -> State:
        """What the peer may do."""
        return self._state.peer

    @property
    def is_idle(self) -> bool:
        """Tell whether nothing has arrived beyond the messages that were given."""
        return self._start == self._end

    # --- sending ---------------------------------------------------------------------------------------------

    def send(self, message: Message | FramedItem) -> Buffers:
        """Give the buffers of a message's frame, to be sent in order before the next call.

        A framed item is of the version that was agreed.

        Raises:
            ProtocolError: this end may not send it now, or it does not fit into a frame.
        """
        if not self._agreed and isinstance(message, (Welcome, StageWelcome)):
            self.minor = message.version
            self._agreed = True
        buffers = message.buffers if isinstance(message, FramedItem) else push_message(self.minor, message)
        size = sum(map(len, buffers))
        if size - HEADER_SIZE > self._max_payload:
            raise ProtocolError(f"a {message.type.name} of {size} bytes is over the limit of {self._max_payload}")
        self._state.sent(message.type)
        self.bytes_sent += size
        return buffers

    def send_dispatch(self, sequence: int, encoded: EncodedDispatch) -> Buffers:
        """Do what :meth:`send` does for a dispatch whose arrays are encoded already."""
        self._state.sent(_DISPATCH)
        buffers = frame_dispatch(self.minor, sequence, encoded)
        size = sum(map(len, buffers))
        if size - HEADER_SIZE > self._max_payload:
            raise ProtocolError(f"a DISPATCH of {size} bytes is over the limit of {self._max_payload}")
        self.bytes_sent += size
        return buffers

    # --- receiving -------------------------------------------------------------------------------------------

    def receive_buffer(self) -> memoryview:
        """Give the room for the next bytes (at least one); arrays of earlier messages are invalid from now on."""
        start, end, capacity = self._start, self._end, len(self._data)
        if start == end:
            if capacity > KEPT_CAPACITY:
                self._data = memoryview(bytearray(FIRST_CAPACITY))
                self._last = None
            self._start = self._end = 0
            return self._data
        needed = HEADER_SIZE if self._header is None else HEADER_SIZE + self._header.length
        if start and start + needed > capacity:
            self._data[: end - start] = self._data[start:end]
            self._start, self._end, self._last = 0, end - start, None
            end -= start
        if end == capacity:
            grown = memoryview(bytearray(max(2 * capacity, FIRST_CAPACITY)))
            grown[:end] = self._data[:end]
            self._data = grown
        return self._data[end:]

    def rehearse(self) -> FramedStep | None:
        """Take the step that came last once more, for the sake of the processor's caches alone.

        None where another message came last, where its bytes are gone, or where it is large: then going through it
        would take longer than this saves.
        """
        if self._last is None:
            return None
        place = self._start, self._end
        self._start, self._end = self._last
        message = self.next_framed()
        self._start, self._end = place
        return message if isinstance(message, FramedStep) else None

    def received(self, count: int) -> None:
        """Take note that so many bytes were written into the buffer; 0 is the end of the stream.

        Raises:
            ProtocolError: the stream ended within a frame, or without goodbye.
        """
        if count == 0:
            inside = self._end > self._start
            raise ProtocolError("the peer closed the connection" + (" within a message" if inside else ""))
        self._end += count
        self._last = None
        self.bytes_received += count

    def insert(self, data: bytes | memoryview) -> None:
        """Take bytes that were read elsewhere, as if they had been received."""
        rest = memoryview(data)
        while rest:
            room = self.receive_buffer()
            count = min(len(room), len(rest))
            room[:count] = rest[:count]
            self.received(count)
            rest = rest[count:]

    def next_message(self) -> Message | None:
        """Give the next whole message, or None while more bytes are needed; raises what :meth:`next_framed` does."""
        message = self.next_framed()
        return message.decode() if isinstance(message, FramedStep) else message

    def next_framed(self) -> Message | FramedStep | None:
        """Do what :meth:`next_message` does, and leave a step as the frame that it is.

        Raises:
            ProtocolError: what came is not the protocol, is damaged, or is not what the peer may send now.
        """
        start = self._start
        header = self._header
        if header is None:
            if self._end - start < HEADER_SIZE:
                return None
            header = self._header = pull_header(self._data, start, self._max_payload)
        body = start + HEADER_SIZE
        end = body + header.length
        if self._end < end:
            return None
        payload = self._data[body:end]
        check_payload(header, self._data[start : start + PREFIX.size], payload)
        if self._agreed and header.minor != self.minor and header.type != MessageType.REFUSE:
            raise ProtocolError(f"a frame of version {header.major}.{header.minor}, agreed was {self.minor}")
        message: Message | FramedStep
        if header.type == _STEP and header.length >= STEP.size:
            message = FramedStep(header.sequence, self._data[start:end])
        else:
            message = pull_message(header, payload)
        self._header = None
        self._start = end
        self._last = (start, end) if isinstance(message, FramedStep) and header.length <= FIRST_CAPACITY else None
        self._state.received(message.type)
        if not self._agreed and isinstance(message, (Welcome, StageWelcome)):
            self._agree(message.version)
        return message

    def _agree(self, version: int) -> None:
        if not self.versions.lowest <= version <= self.versions.highest:
            raise ProtocolError(f"the worker chose version {version}, offered was {self.versions}")
        self.minor = version
        self._agreed = True
