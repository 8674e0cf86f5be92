"""What a stage does while it waits: when it looks and when it sleeps, and rehearsals, which change nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from orchestrator.engine.stage import StageContext, StageSizes
from orchestrator.ring.hop import Hop
from orchestrator.ring.items import step_item
from orchestrator.ring.layout import LayerRange
from orchestrator.ring.steps import one_sequence
from orchestrator.transport.patience import Patience
from orchestrator.wire.connection import FIRST_CAPACITY, Connection
from orchestrator.wire.messages import Message, Ping
from orchestrator.wire.ring_messages import Fault, FaultKind, Step
from orchestrator.wire.state import Role, State
from tests.ring_frames import framed
from tests.ring_models import batches, same, tokens_of, whole
from tests.test_wire_codec import assert_same


class Bytes:
    """Bytes that are there from the n-th look on."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.asked: list[float] = []

    def poll(self, milliseconds: float) -> bool:
        self.asked.append(milliseconds)
        return len(self.asked) >= self.at


def look(before: Sequence[float], at: int = 3) -> tuple[list[float], int]:
    """Wait after waits of so many seconds; give the poll timeouts in milliseconds and the number of rehearsals."""
    patience, bytes_, rehearsals = Patience(lambda: 0.0), Bytes(at), []
    for seconds in before:
        patience.waited(seconds)
    patience.look(bytes_.poll, lambda: rehearsals.append(len(bytes_.asked)))
    return bytes_.asked, len(rehearsals)


def test_after_a_brief_wait_it_looks_without_sleep() -> None:
    assert look([0.0005]) == ([0, 0, 0], 0)
    assert look([0.08, 0.0005]) == ([0, 0, 0], 0)


def test_a_wait_of_some_milliseconds_is_slept_through_until_it_is_due() -> None:
    assert look([0.0125]) == ([10, 0, 0], 1)
    assert look([0.004]) == ([0, 0, 0], 1)
    assert look([0.0125], at=1) == ([10], 0)  # it came early: there is no time for a rehearsal


def test_a_long_wait_sleeps_at_once() -> None:
    assert look([0.08]) == ([], 0)


def connected() -> tuple[Connection, Connection]:
    sender, receiver = Connection(Role.BACKBONE), Connection(Role.WORKER)
    for connection in (sender, receiver):
        connection._state.own = connection._state.peer = State.SERVING
    return sender, receiver


def receive(receiver: Connection, data: bytes) -> Message | None:
    receiver.receive_buffer()[: len(data)] = data
    receiver.received(len(data))
    return receiver.next_message()


def frame(sender: Connection, message: Message) -> bytes:
    return b"".join(sender.send(message))


def step(number: int, size: int = 64) -> Step:
    batch = one_sequence([7], number)
    return Step(number, 2, batch.tokens, batch.positions, batch.sequences, batch.outputs, (5,), bytes(size))


def test_the_last_step_can_be_taken_again_until_new_bytes_come() -> None:
    sender, receiver = connected()
    assert receiver.rehearse() is None
    receive(receiver, frame(sender, step(1)))
    receiver.receive_buffer()
    for _ in range(2):
        assert_same(last_step(receiver), step(1))
    data = frame(sender, step(2))
    assert receive(receiver, data[:30]) is None
    assert receiver.rehearse() is None
    assert_same(receive(receiver, data[30:]), step(2))
    assert_same(last_step(receiver), step(2))


def last_step(receiver: Connection) -> Step:
    found = receiver.rehearse()
    assert found is not None
    return found.decode()


@pytest.mark.parametrize("last", [step(1, FIRST_CAPACITY + 4), Ping(3, 4), Fault(1, 2, FaultKind.FAILED, 0, 2, "")])
def test_large_steps_and_other_messages_are_not_rehearsed(last: Message) -> None:
    sender, receiver = connected()
    data = frame(sender, last)
    for start in range(0, len(data), 4096):
        receive(receiver, data[start : start + 4096])
    assert receiver.rehearse() is None


@pytest.mark.parametrize("architecture", ["llama", "qwen35moe"])
def test_rehearsals_change_no_byte(synthetic: Callable[[str], Path], architecture: str) -> None:
    path, sizes = synthetic(architecture), StageSizes(n_ctx=256)
    with whole(path, sizes) as context:
        n_layer = context.model.n_layer
        steps = list(batches(tokens_of(context.model.n_vocab, 80), (1, 70), context.n_batch))
        expected = [context.decode(batch).logits for batch in steps]
    middle = n_layer // 2
    with (
        StageContext.open(path, LayerRange(0, middle), sizes) as first,
        StageContext.open(path, LayerRange(middle, n_layer), sizes) as second,
    ):
        hops = [Hop(stage, clock=lambda: 0) for stage in (first, second)]
        got = []
        for number, batch in enumerate(steps, 1):
            item = step_item(number, batch)
            for hop in hops:
                came = framed(item)
                hop.rehearse(came)
                item = hop.run(item)
                hop.rehearse(came)
            got.append(item.logits)
    assert same(got, expected)
