"""Items of a ring as the frames that travel, and back."""

from __future__ import annotations

from orchestrator.ring.items import Item
from orchestrator.wire.codec import pull_message, push_message
from orchestrator.wire.frame import HEADER_SIZE, MAX_PAYLOAD, PREFIX, check_payload, pull_header
from orchestrator.wire.messages import SUPPORTED
from orchestrator.wire.ring_codec import FramedItem, FramedStep


def framed(item: Item) -> FramedStep:
    """Make a frame; it is called a step whatever it is."""
    return FramedStep(item.sequence, memoryview(b"".join(push_message(SUPPORTED.highest, item))))


def thawed(item: FramedItem) -> Item:
    """Read a frame as a receiver does."""
    data = memoryview(b"".join(item.buffers))
    header = pull_header(data, 0, MAX_PAYLOAD)
    assert header.length == len(data) - HEADER_SIZE
    check_payload(header, data[: PREFIX.size], data[HEADER_SIZE:])
    message = pull_message(header, data[HEADER_SIZE:])
    assert message.type == item.type
    return message
