"""Boundaries that travel as F16: the codec, the agreement on it, and rings of engines and of twins that use it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.engine.stage import StageContext, StageSizes
from orchestrator.errors import ProtocolError, StageRefusedError
from orchestrator.gateway.ring_backbone import open_ring
from orchestrator.models.deployment import Deployment, StageEntry
from orchestrator.onboarding.stages import open_stages
from orchestrator.ring.hop import Hop
from orchestrator.ring.items import step_item
from orchestrator.ring.layout import LayerRange
from orchestrator.ring.pipeline import Pipeline
from orchestrator.ring.steps import one_sequence
from orchestrator.types import Boundary
from orchestrator.wire.boundary import BoundaryCodec, decode, encode
from orchestrator.wire.messages import VersionRange
from orchestrator.wire.ring_messages import Fault, FaultKind, Step
from orchestrator.workers.deployment import DeployedProcesses
from tests.ring_models import batches, decode_all, legal_cuts, same, tokens_of
from tests.ring_net import Net, net
from tests.ring_twin import TwinStage, facts

__all__ = ["net"]


def bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


words = st.lists(st.integers(0, 2**32 - 1) | st.floats(-1e5, 1e5, width=32).map(bits), max_size=40)


def floats(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


def rounded(word: int) -> int:
    """Say what must arrive for one word, by Python's own floats."""
    [value] = struct.unpack("<f", struct.pack("<I", word))
    if value and not 2.0**-64 <= abs(value) < 65520:
        return word  # what is no number of F16's is kept, NaN (which no comparison holds for) too
    return bits(struct.unpack("<e", struct.pack("<e", value))[0])


# --- the codec -------------------------------------------------------------------------------------------------


@given(words)
def test_each_word_is_rounded_or_kept_by_itself(found: list[int]) -> None:
    codec, data = encode(struct.pack(f"<{len(found)}I", *found))
    expected = [rounded(word) for word in found]
    assert decode(codec, data) == struct.pack(f"<{len(found)}I", *expected)
    assert codec is not BoundaryCodec.F32


@given(words)
def test_what_was_rounded_stays_as_it_is(found: list[int]) -> None:
    once = decode(*encode(struct.pack(f"<{len(found)}I", *found)))
    assert decode(*encode(once)) == once


def test_floats_take_half_the_bytes() -> None:
    codec, data = encode(floats(0.0, -0.0, 1.5, -65519.0, 2.0**-64))
    assert (codec, len(data)) == (BoundaryCodec.F16, 10)
    assert decode(codec, data) == floats(0.0, -0.0, 1.5, -65504.0, 0.0)


@pytest.mark.parametrize("value", [65520.0, -65520.0, 3e38, np.inf, -np.inf, np.nan])
def test_what_is_beyond_the_range_arrives_as_it_was(value: float) -> None:
    codec, data = encode(floats(1.0, value, 2.0))
    assert codec is BoundaryCodec.MIXED
    assert decode(codec, data) == floats(1.0, value, 2.0)


@given(st.lists(st.integers(-8_388_608, 528_482_303), max_size=20))
def test_integers_arrive_as_they_were(values: list[int]) -> None:
    data = np.array(values, np.int32).tobytes()
    assert decode(*encode(data)) == data


@given(st.binary(max_size=60))
def test_a_mixed_boundary_is_whole_or_refused_in_words(data: bytes) -> None:
    try:
        assert len(decode(BoundaryCodec.MIXED, data)) % 4 == 0
    except ProtocolError:
        return


def test_a_step_whose_boundary_contradicts_itself_is_a_fault_of_its_sender() -> None:
    hop = Hop(TwinStage(6, 12, facts()), clock=lambda: 0)
    ints = np.zeros(1, np.int32)
    step = Step(1, 6, ints, ints, ints, np.ones(1, np.bool_), (), bytes(3), BoundaryCodec.MIXED)
    fault = hop.run(step)
    assert isinstance(fault, Fault)
    assert fault.kind is FaultKind.REFUSED
    assert "3 bytes says 0 words" in fault.text


# --- who rounds ------------------------------------------------------------------------------------------------


def test_a_step_says_to_every_stage_what_to_send(net: Net) -> None:
    addresses = [net.start("a", (0, 4), (8, 12)), net.start("b", (4, 8))]
    batch = one_sequence([1, 2, 3, 4, 5, 6, 0, 1], 0, every=True)
    with net.ring(addresses) as ring:
        exact = ring.decode(batch)
    with net.ring(addresses, boundary=Boundary.F16) as ring:
        given = ring.decode(batch)
    local = [Hop(TwinStage(first, first + 4, facts()), clock=lambda: 0) for first in (0, 4, 8)]
    expected = Pipeline(local, facts(), Boundary.F16).decode(batch)
    assert given.tobytes() == expected.tobytes()
    # A twin's value is a hash of those before: rounding any of them gives other logits.
    assert given.tobytes() != exact.tobytes()


def test_a_stage_of_the_version_before_is_refused_for_f16_and_serves_f32(net: Net) -> None:
    addresses = [net.start("new", (0, 6)), net.start("old", (6, 12))]
    net.servers["old"].versions = VersionRange(0, 1)
    ring = net.ring(addresses, boundary=Boundary.F16)
    with pytest.raises(StageRefusedError, match="a version in which boundaries cannot travel as f16"):
        ring.open()
    assert ring.look("old") is None
    with net.ring(addresses) as ring:
        assert ring.decode(one_sequence([1], 0)) is not None


# --- rings of engines ------------------------------------------------------------------------------------------


def test_integers_that_cross_a_cut_arrive_as_they_were(synthetic: Callable[[str], Path]) -> None:
    path = synthetic("glm-dsa")  # layers share the cells that an indexer chose: 256 numbers of cells per token
    _, cuts = legal_cuts(path)
    batch = one_sequence(tokens_of(64, 5), 0)
    with StageContext.open(path, LayerRange(0, cuts[0]), StageSizes(n_ctx=64)) as stage:
        raw = np.frombuffer(stage.decode(batch, b"").boundary, np.uint32)
        hop = Hop(stage, clock=lambda: 0)
        hop.clear()
        step = hop.run(step_item(1, batch, Boundary.F16))
    assert isinstance(step, Step)
    assert step.codec is BoundaryCodec.MIXED
    assert len(step.boundary) < raw.nbytes
    given = np.frombuffer(decode(step.codec, step.boundary), np.uint32)
    whole_numbers = raw < 256
    assert np.count_nonzero(whole_numbers) == 5 * 256
    assert np.array_equal(given[whole_numbers], raw[whole_numbers])
    values = raw[~whole_numbers].view(np.float32)
    assert np.array_equal(given[~whole_numbers].view(np.float32), values.astype(np.float16).astype(np.float32))


def test_a_ring_of_engines_rounds_and_answers_alike_however_tokens_are_grouped(
    synthetic: Callable[[str], Path],
) -> None:
    path = synthetic("llama")
    n_layer, cuts = legal_cuts(path)
    sizes = StageSizes(n_ctx=128)
    with open_stages(path, [0, cuts[0], cuts[-1], n_layer], sizes) as exact:
        rounding = Pipeline(exact.hops, exact.facts, Boundary.F16)
        tokens = tokens_of(exact.facts.n_vocab, 40)
        grouped = list(batches(tokens, (1, 33, 6), exact.facts.n_batch))
        single = list(batches(tokens, (), exact.facts.n_batch))
        expected = np.concatenate(decode_all(exact, single))
        for hop in exact.hops:
            hop.clear()
        one = np.concatenate(decode_all(rounding, single))
        for hop in exact.hops:
            hop.clear()
        rounding = Pipeline(exact.hops, exact.facts, Boundary.F16)
        several = np.concatenate(decode_all(rounding, grouped))
    assert same([one], [several])
    assert one.tobytes() != expected.tobytes()
    np.testing.assert_allclose(one, expected, atol=0.05 * float(np.abs(expected).max()))


def test_a_deployment_says_it_to_processes(synthetic: Callable[[str], Path]) -> None:
    path = synthetic("llama")
    entries = tuple(StageEntry(f"s{first}", ((first, first + 2),), "127.0.0.1:0") for first in (0, 2))
    plan = Deployment(str(path), 128, stages=entries, boundary=Boundary.F16)
    batch = one_sequence(tokens_of(64, 30), 0, every=True)
    with (
        DeployedProcesses(plan, path, threads=1) as processes,
        open_ring(path, processes.deployment) as backbone,
    ):
        given = backbone.ring.decode(batch)
        assert backbone.fingerprint.endswith(" ring f16")
    with open_stages(path, [0, 2, 4], StageSizes(n_ctx=128)) as ring:
        exact = ring.decode(batch)
        for hop in ring.hops:
            hop.clear()
        expected = Pipeline(ring.hops, ring.facts, Boundary.F16).decode(batch)
    assert given.tobytes() == expected.tobytes()
    assert given.tobytes() != exact.tobytes()
