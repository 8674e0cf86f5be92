"""Steps from frame to frame in native code, held to the Python codec and hop as the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.engine.stage import StageContext, StageSizes
from orchestrator.engine.synth import synth
from orchestrator.errors import ProtocolError
from orchestrator.ring.hop import Hop
from orchestrator.ring.items import Item, step_item
from orchestrator.ring.layout import LayerRange
from orchestrator.ring.steps import TokenBatch, one_sequence
from orchestrator.types import Boundary
from orchestrator.wire.frame import HEADER_SIZE, push_header
from orchestrator.wire.messages import SUPPORTED, MessageType
from orchestrator.wire.ring_codec import FramedItem, FramedStep
from orchestrator.wire.ring_messages import Fault, FaultKind, Outcome, Step
from tests.ring_frames import framed, thawed
from tests.ring_twin import TwinStage, facts

MINOR = SUPPORTED.highest
SIZES = StageSizes(n_ctx=128, n_sequences=4)


@contextmanager
def hops(path: Path, layers: LayerRange, *, native: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hop]:
    monkeypatch.setenv("LINKCPP_WIRE", "native" if native else "python")
    with StageContext.open(path, layers, SIZES) as stage:
        assert (stage._frames is not None) is native
        yield Hop(stage, clock=lambda: 0)


def batch(tokens: list[int], positions: list[int], sequences: list[int], outputs: list[bool]) -> TokenBatch:
    return TokenBatch(
        np.array(tokens, np.int32),
        np.array(positions, np.int32),
        np.array(sequences, np.int32),
        np.array(outputs, np.bool_),
    )


BATCHES = [
    one_sequence([5, 9, 2, 7], 0),
    one_sequence([1], 4),
    one_sequence([3, 8, 1], 0, sequence=2),
    batch([4, 6, 2], [5, 3, 0], [0, 2, 3], [True, False, True]),
    batch([4, 6], [6, 4], [0, 2], [False, False]),
    one_sequence(list(range(40)), 0, sequence=1),
]


def without_times(item: Item) -> Item:
    if isinstance(item, (Step, Outcome)):
        return dataclasses.replace(item, spent=tuple(0 for _ in item.spent))
    return item


def assert_equal(got: Item, expected: Item) -> None:
    assert type(got) is type(expected)
    got, expected = without_times(got), without_times(expected)
    assert bytes(framed(got).frame) == bytes(framed(expected).frame)


@pytest.mark.parametrize("architecture", ["llama", "qwen35moe", "gpt-oss", "step35", "deepseek2"])
def test_every_part_of_a_model_makes_the_frames_that_python_makes(
    synthetic: Callable[[str], Path], architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = synthetic(architecture)
    with StageContext.open(path, LayerRange(0, 1), SIZES) as stage:
        n_layer = stage.n_layer
    middle = n_layer // 2
    items: list[Item] = [step_item(number, one) for number, one in enumerate(BATCHES, 1)]
    for layers in (LayerRange(0, middle), LayerRange(middle, n_layer)):
        with (
            hops(path, layers, native=True, monkeypatch=monkeypatch) as native,
            hops(path, layers, native=False, monkeypatch=monkeypatch) as python,
        ):
            expected = [python.run(item) for item in items]
            got = []
            for item in items:
                passed = native.run_frame(framed(item), MINOR)
                assert isinstance(passed, FramedItem)
                got.append(thawed(passed))
            for one, other in zip(got, expected, strict=True):
                assert_equal(one, other)
            counted = [(hop.steps, hop.tokens, hop.taken, hop.passed) for hop in (native, python)]
            assert counted[0] == counted[1] == (len(items), sum(map(len, BATCHES)), len(items), len(items))
        items = expected


def test_an_outcome_that_is_not_sent_has_the_same_logits(
    synthetic: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = synthetic("llama")
    with StageContext.open(path, LayerRange(0, 1), SIZES) as stage:
        layers = LayerRange(0, stage.n_layer)
    with (
        hops(path, layers, native=True, monkeypatch=monkeypatch) as native,
        hops(path, layers, native=False, monkeypatch=monkeypatch) as python,
    ):
        for number, one in enumerate(BATCHES, 1):
            item = step_item(number, one)
            got = native.run_frame(framed(item), None)
            assert isinstance(got, Outcome)
            assert_equal(got, python.run(item))
            assert len(got.spent) == 1


def test_what_is_not_plain_is_left_to_python(
    synthetic: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = synthetic("llama")
    with hops(path, LayerRange(0, 1), native=True, monkeypatch=monkeypatch) as hop:
        compute = hop.compute
        rounded = step_item(1, one_sequence([1], 0), Boundary.F16)
        large = step_item(1, one_sequence([1] * 65, 0))
        outside = step_item(1, one_sequence([1], 0, sequence=9))
        elsewhere = Step(1, 1, *(np.zeros(1, np.int32),) * 3, np.ones(1, np.bool_), (), b"")
        unknown = step_item(1, one_sequence([1 << 20], 0))
        for item in (rounded, large, outside, elsewhere, unknown):
            assert compute.run_frame(framed(item), MINOR) is None
        assert compute.run_frame(framed(step_item(1, one_sequence([1], 0))), None) is None  # nobody wants the frame

        refused = hop.run_frame(framed(outside), MINOR)
        assert isinstance(refused, Fault)
        assert refused.kind is FaultKind.REFUSED
        passed = hop.run_frame(framed(step_item(2, one_sequence([1], 0), Boundary.F16)), MINOR)
        assert isinstance(passed, Step)
        hop.cancel([3])
        dropped = hop.run_frame(framed(step_item(3, one_sequence([1], 1))), MINOR)
        assert isinstance(dropped, Fault)
        assert dropped.kind is FaultKind.CANCELLED


@pytest.mark.parametrize("size", [0, 4, 1 << 16])
def test_a_boundary_of_the_wrong_size_fails_and_leaves_the_caches(
    synthetic: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    path = synthetic("qwen3moe")
    with hops(path, LayerRange(0, 1), native=True, monkeypatch=monkeypatch) as before:
        steps = [before.run(step_item(number, one)) for number, one in enumerate(BATCHES[:2], 1)]
        n_layer = before.compute.n_layer
    first, second = steps
    assert isinstance(first, Step)
    assert isinstance(second, Step)
    wrong = dataclasses.replace(second, boundary=bytes(size))
    with (
        hops(path, LayerRange(1, n_layer), native=True, monkeypatch=monkeypatch) as hop,
        hops(path, LayerRange(1, n_layer), native=False, monkeypatch=monkeypatch) as python,
    ):
        hop.run_frame(framed(first), MINOR)
        python.run(first)
        fault = hop.run_frame(framed(wrong), MINOR)
        assert_equal(fault, python.run(wrong))  # type: ignore[arg-type]
        assert isinstance(fault, Fault)
        assert fault.kind is FaultKind.FAILED
        assert "boundary" in fault.text
        again = dataclasses.replace(second, sequence=3)
        got = hop.run_frame(framed(again), MINOR)
        assert isinstance(got, FramedItem)
        assert_equal(thawed(got), python.run(again))


def test_a_defect_in_the_native_way_costs_its_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = TwinStage(0, 12, facts())
    heard: list[Exception] = []
    hop = Hop(stage, clock=lambda: 0, on_defect=heard.append)

    def broken(step: FramedStep, minor: int | None) -> None:
        raise RuntimeError("no such thing")

    with monkeypatch.context() as patched:
        patched.setattr(stage, "run_frame", broken)
        fault = hop.run_frame(framed(step_item(1, one_sequence([1], 0))), MINOR)
    assert isinstance(fault, Fault)
    assert (fault.kind, fault.text) == (FaultKind.FAILED, "defect: RuntimeError: no such thing")
    assert [str(error) for error in heard] == ["no such thing"]
    assert isinstance(hop.run_frame(framed(step_item(2, one_sequence([1], 0))), MINOR), Outcome)


@pytest.fixture(scope="module")
def first_layers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StageContext]:
    path = tmp_path_factory.mktemp("frames") / "llama.gguf"
    synth("llama", path)
    with StageContext.open(path, LayerRange(0, 1), SIZES) as stage:
        assert stage._frames is not None
        yield stage


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_payloads_with_any_bytes_changed_are_run_as_python_reads_them_or_left_alone(
    first_layers: StageContext, data: st.DataObject
) -> None:
    good = framed(step_item(1, BATCHES[data.draw(st.integers(0, len(BATCHES) - 1))]))
    payload = bytearray(good.frame[HEADER_SIZE:])
    for _ in range(data.draw(st.integers(0, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, 3)) * 4
    payload = payload[: max(12, len(payload) - cut)] if data.draw(st.booleans()) else payload + bytes(cut)
    frame = FramedStep(1, memoryview(push_header(MINOR, MessageType.STEP, 1, [bytes(payload)]) + bytes(payload)))
    first_layers._frames.rehearse(frame)  # type: ignore[union-attr]
    fresh = Hop(first_layers, clock=lambda: 0)
    fresh.clear()
    try:
        passed = fresh.run_frame(frame, MINOR)
        got = thawed(passed) if isinstance(passed, FramedItem) else passed
    except ProtocolError:
        with pytest.raises(ProtocolError):
            frame.decode()
        return
    reference = Hop(first_layers, clock=lambda: 0)
    reference.clear()
    assert_equal(got, reference.run(frame.decode()))
