"""docs/protocol.md against the code: its tables are read, and its example frames are decoded and made again."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest
from test_wire_codec import assert_same, decode

from orchestrator.types import TENSOR_ROLES, Contract, EngineIdentity, LayerDescriptor, Ownership, RefusalCode
from orchestrator.wire.codec import CONTRACT_CODES, DISPATCH, RESULT, push_message
from orchestrator.wire.frame import CHECKSUM, CONTROL_LIMITS, HEADER_SIZE, MAX_PAYLOAD, PREFIX
from orchestrator.wire.messages import (
    MAJOR,
    SUPPORTED,
    Describe,
    Described,
    Dispatch,
    Goodbye,
    Hello,
    Measure,
    Measured,
    Message,
    MessageType,
    Ping,
    Pong,
    Refuse,
    Result,
    VersionRange,
    Welcome,
)
from orchestrator.wire.ring_codec import OUTCOME, STEP
from orchestrator.wire.state import TRANSITIONS, Role, State
from orchestrator.wire.tensors import CODECS
from tests.ring_examples import RING_EXAMPLES

PAGE = (Path(__file__).parent.parent / "docs" / "protocol.md").read_text(encoding="utf-8")
SIZES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "i32": 4, "f64": 8, "4 bytes": 4}
FORMATS = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "bytes": "4s"}

IDENTITY = EngineIdentity("7f3a", "AVX2", False)
EXAMPLES: tuple[Message, ...] = (
    Hello(VersionRange(0, 0), IDENTITY, client="demo"),
    Welcome(
        version=0,
        name="w0",
        pid=4711,
        identity=IDENTITY,
        model_sha256="5e0f",
        architecture="llama",
        ownership=Ownership({3: (0, 1, 2, 3, 6)}),
        n_threads=2,
    ),
    Refuse(9, RefusalCode.OVERLOADED, "16 requests wait"),
    Describe(
        2,
        (
            LayerDescriptor(
                3, 0, "llama", 0, 4, 2, 8, 2, False, 0.0, 0.0, 0.0, 0, (("up", "blk.3.ffn_up_exps.weight"),)
            ),
        ),
    ),
    Described(2, 1),
    Dispatch(
        9,
        3,
        0,
        Contract.EXACT,
        np.array([[1, 2], [3, 4]], np.float32),
        np.array([2, 1], np.uint16),
        np.array([0, 6, 2], np.uint16),
        np.array([0.5, 0.25, 0.75], np.float32),
    ),
    Result(9, 512, np.array([[1, 2]], np.float32)),
    Measure(4, 3, 0),
    Measured(4, 0.25, 1.5),
    Ping(5, 0x1122334455667788),
    Pong(5, 0x1122334455667788),
    Goodbye("draining"),
    *RING_EXAMPLES,
)


def table(heading: str) -> list[list[str]]:
    """Give the rows of the first table behind a heading, as cells."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, heading
    rows = [line for line in found.group(1).splitlines() if line.startswith("|")]
    assert len(rows) > 2, heading
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def test_the_page_is_about_this_version():
    assert f"Version {MAJOR}.{SUPPORTED.highest}." in PAGE


def test_the_header_is_as_documented():
    rows = table("The frame")
    offsets = [int(row[0]) for row in rows]
    sizes = [int(row[1]) for row in rows]
    assert offsets == [sum(sizes[:at]) for at in range(len(sizes))]
    assert sum(sizes) == HEADER_SIZE
    layout = "<" + "".join(FORMATS[row[2]] for row in rows)
    assert layout == PREFIX.format + CHECKSUM.format.removeprefix("<")
    assert struct.calcsize(layout) == HEADER_SIZE


def test_types_and_limits_are_as_documented():
    documented = {int(row[0]): (row[1], row[2], int(row[3])) for row in table("Types and limits")}
    assert {number: name for number, (name, _, _) in documented.items()} == {kind: kind.name for kind in MessageType}
    for kind in MessageType:
        _, sender, limit = documented[kind]
        assert limit == CONTROL_LIMITS.get(kind, MAX_PAYLOAD)
        senders = {role.value for role in Role for moves in TRANSITIONS[role].values() if kind in moves}
        assert senders == ({"backbone", "worker"} if sender == "both" else {sender})


def test_the_order_of_messages_is_as_documented():
    documented: dict[tuple[str, str], dict[str, str]] = {}
    for side, state, kinds, after in table("The order of messages"):
        moves = documented.setdefault((side, state), {})
        if not kinds.startswith("nothing"):
            moves.update(dict.fromkeys(kinds.split(), after))
    for role in Role:
        for state, moves in TRANSITIONS[role].items():
            expected = {kind.name: after.value for kind, after in moves.items()}
            assert documented.pop((role.value, state.value), {}) == expected
            assert expected or state in (State.WAITING, State.CLOSED)
    assert documented == {}


def test_refusals_codecs_contracts_and_roles_are_as_documented():
    assert {int(row[0]): row[1] for row in table("Refusal codes")} == {code: code.name for code in RefusalCode}
    assert {int(row[0]): row[1] for row in table("Row codecs")} == {
        code: codec.name for code, codec in CODECS.items()
    }
    assert "0 exact, 1 sum" in PAGE
    assert CONTRACT_CODES == {Contract.EXACT: 0, Contract.SUM: 1}
    assert f"`{' '.join(TENSOR_ROLES)}`" in PAGE


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.type.name)
def test_the_example_frame_is_the_message(message: Message):
    rows = table(f"{message.type.value} {message.type.name}")
    pieces = [bytes.fromhex(row[0].strip("`")) for row in rows]
    for piece, (_, kind, field) in zip(pieces, rows, strict=True):
        if kind == "text":
            assert struct.unpack_from("<H", piece)[0] == len(piece) - 2, field
        elif kind == "pad":
            assert not any(piece), field
        elif "[" not in kind:
            assert len(piece) == SIZES[kind], field
    wire = b"".join(pieces)
    assert wire == b"".join(push_message(0, message))
    assert_same(decode(wire), message)


def test_every_message_has_an_example():
    assert [message.type for message in EXAMPLES] == list(MessageType)


@pytest.mark.parametrize(
    ("heading", "layout"),
    [("6 DISPATCH", DISPATCH), ("7 RESULT", RESULT), ("36 STEP", STEP), ("37 OUTCOME", OUTCOME)],
    ids=["dispatch", "result", "step", "outcome"],
)
def test_the_fixed_part_of_a_row_message_is_as_documented(heading: str, layout: struct.Struct):
    documented = "<"
    for cells in table(heading)[8:]:
        if "[" in cells[1]:
            break
        size = len(bytes.fromhex(cells[0].strip("`")))
        documented += f"{size}x" if cells[1] == "pad" else FORMATS[cells[1]]
    assert documented == layout.format
