"""Stages of synthetic models in one process: the bytes of the unsplit engine at every cut, KV operations too."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.engine.context import Context
from orchestrator.engine.model import Model
from orchestrator.engine.stage import StageContext, StageSizes
from orchestrator.engine.survey import survey
from orchestrator.engine.synth import architectures
from orchestrator.errors import InputError
from orchestrator.onboarding.stages import open_stages
from orchestrator.ring.layout import LayerRange, check_cuts, merge, parse_layers, tile
from orchestrator.ring.pipeline import Pipeline
from orchestrator.ring.steps import Clear, Copy, Keep, Remove, Restore, Shift, TokenBatch, one_sequence
from tests.conftest import FAMILIES
from tests.ring_models import batches, decode_all, legal_cuts, same, tokens_of, whole

SHORT = (1, 33, 130), 8
LONG = (1, 33, 700), 32


def check_cut_lists(path: Path, lists: list[list[int]], parts: tuple[int, ...], steps: int) -> None:
    sizes = StageSizes(n_ctx=1024 if sum(parts) > 200 else 256)
    with whole(path, sizes) as context:
        tokens = tokens_of(context.model.n_vocab, sum(parts) + steps)
        todo = list(batches(tokens, parts, context.n_batch, every=sum(parts) < 200))
        expected = decode_all(context, todo)
    for cuts in lists:
        with open_stages(path, cuts, sizes) as ring:
            assert same(decode_all(ring, todo), expected), cuts


def random_thirds(n_layer: int, cuts: list[int], count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[0, *sorted(rng.sample(cuts, 2)), n_layer] for _ in range(count)] if len(cuts) > 1 else []


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_legal_cut_gives_the_bytes_of_one_process(synthetic: Callable[[str], Path], architecture: str) -> None:
    path = synthetic(architecture)
    n_layer, cuts = legal_cuts(path)
    assert cuts
    lists = [[0, cut, n_layer] for cut in cuts] + random_thirds(n_layer, cuts, 2, seed=1)
    check_cut_lists(path, lists, *SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", architectures())
def test_every_architecture_at_every_legal_cut(synthetic: Callable[[str], Path], architecture: str) -> None:
    path = synthetic(architecture)
    n_layer, cuts = legal_cuts(path)
    if not cuts:
        pytest.skip(f"{architecture} cannot be cut")
    lists = [[0, cut, n_layer] for cut in cuts] + random_thirds(n_layer, cuts, 2, seed=2)
    check_cut_lists(path, lists, *LONG)


def test_the_comparison_sees_one_bit(synthetic: Callable[[str], Path]) -> None:
    path = synthetic("llama")
    sizes = StageSizes(n_ctx=64)
    batch = one_sequence([1, 2, 3], 0, every=True)
    with whole(path, sizes) as context:
        expected = context.decode(batch).logits
    with open_stages(path, [0, 2, 4], sizes) as ring:
        stage = ring.hops[0].compute
        honest = stage.decode

        def flipped(batch: TokenBatch, boundary: bytes):
            output = honest(batch, boundary)
            changed = bytearray(output.boundary)
            for at in range(0, len(changed), 4):
                changed[at] ^= 1
            return type(output)(None, bytes(changed))

        stage.decode = flipped  # type: ignore[method-assign]
        assert ring.decode(batch).tobytes() != expected.tobytes()


# --- layer maps --------------------------------------------------------------------------------------------------


def test_an_architecture_without_marks_is_refused_in_words(synthetic: Callable[[str], Path]) -> None:
    path = synthetic("nomic-bert-moe")
    with pytest.raises(InputError, match="cannot be cut in front of layer 1: this architecture does not mark"):
        StageContext.open(path, LayerRange(0, 1), StageSizes(n_ctx=64))
    with Model.open(path) as model:
        cuts = survey(model)
    with pytest.raises(InputError) as caught:
        check_cuts([LayerRange(0, 1)], cuts, 2)
    assert caught.value.hint == "it must stay in one process"


class Cut:
    def __init__(self, layer: int, reason: str | None) -> None:
        self.layer, self.reason = layer, reason


@pytest.mark.parametrize(
    ("place", "hint"), [(4, "3 and 6"), (5, "3 and 6"), (1, "3"), (9, "6")], ids=["left", "right", "first", "last"]
)
def test_the_nearest_legal_cuts_are_named(place: int, hint: str) -> None:
    cuts = [Cut(layer, None if layer in (3, 6) else "shared cache") for layer in range(1, 10)]
    check_cuts([LayerRange(0, 3), LayerRange(3, 6), LayerRange(6, 10)], cuts, 10)
    with pytest.raises(InputError, match=f"in front of layer {place}: shared cache") as caught:
        check_cuts([LayerRange(place, 10)], cuts, 10)
    assert caught.value.hint == f"the nearest cuts that it can take: {hint}"


def test_ranges_are_read_joined_and_tiled() -> None:
    assert parse_layers(" 12:24 ") == LayerRange(12, 24)
    assert merge([LayerRange(4, 6), LayerRange(0, 2), LayerRange(2, 3)], 6) == (LayerRange(0, 3), LayerRange(4, 6))
    assert str(LayerRange(3, 4)) == "layer 3"
    assert tile([(LayerRange(3, 5), "b"), (LayerRange(0, 3), "a")], 5) == (1, 0)
    for text in ("", ":", "3", "3:", "a:4", "3:3", "5:2", "-1:2", "1:²"):
        with pytest.raises(InputError):
            parse_layers(text)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 10)).filter(lambda pair: pair[0] < pair[1]), max_size=5),
    st.integers(1, 10),
)
def test_a_layer_map_is_taken_if_and_only_if_each_layer_has_one_holder(
    pairs: list[tuple[int, int]], n_layer: int
) -> None:
    holders = [(LayerRange(*pair), str(index)) for index, pair in enumerate(pairs)]
    counted = [sum(first <= layer < last for first, last in pairs) for layer in range(n_layer)]
    legal = all(count == 1 for count in counted) and all(last <= n_layer for _, last in pairs)
    if legal:
        order = tile(holders, n_layer)
        assert [pairs[index][0] for index in order] == sorted(first for first, _ in pairs)
    else:
        with pytest.raises(InputError):
            tile(holders, n_layer)


# --- KV operations -----------------------------------------------------------------------------------------------

N_SEQUENCES = 4
KV_SIZES = StageSizes(n_ctx=96, n_sequences=N_SEQUENCES, n_ubatch=16, n_batch=16)

sequences = st.integers(0, N_SEQUENCES - 1)
step = st.tuples(st.just("step"), st.lists(st.tuples(sequences, st.integers(1, 7)), min_size=1, max_size=3))
events = st.one_of(
    step,
    step,
    step,
    st.tuples(st.just("copy"), sequences, sequences, st.integers(0, 20)),
    st.tuples(st.just("rollback"), sequences, st.integers(1, 6)),
    st.tuples(st.just("shift"), sequences, st.integers(0, 8), st.integers(1, 4)),
    st.tuples(st.just("save"), sequences, st.integers(0, 1)),
    st.tuples(st.just("restore"), sequences, st.integers(0, 1)),
    st.tuples(st.just("empty"), sequences),
    st.tuples(st.just("keep"), sequences),
    st.tuples(st.just("clear")),
)


class Both:
    """The unsplit context and a ring that get the same story; states are saved in each by its own means."""

    def __init__(self, context: Context, ring: Pipeline) -> None:
        self.context = context
        self.ring = ring
        self.saved: dict[int, bytes] = {}
        self.rng = np.random.default_rng(4)

    def restart(self) -> None:
        self.context.apply(Clear())
        self.ring.apply(Clear())
        for key in self.saved:
            self.ring.forget(key)
        self.saved.clear()
        self.ring.settle()

    def step(self, parts: list[tuple[int, int]]) -> None:
        unique = dict(parts)
        pieces = [
            one_sequence(
                [int(token) for token in self.rng.integers(0, self.ring.facts.n_vocab, count)],
                self.ring.length(sequence),
                sequence=sequence,
                every=True,
            )
            for sequence, count in unique.items()
            if self.ring.length(sequence) + count <= KV_SIZES.n_ctx
        ]
        if not pieces:
            return
        names = ("tokens", "positions", "sequences", "outputs")
        joined = TokenBatch(*(np.concatenate([getattr(piece, name) for piece in pieces]) for name in names))
        for batch in joined.split(KV_SIZES.n_batch):
            expected = self.context.decode(batch).logits
            got = self.ring.decode(batch)
            assert got.tobytes() == expected.tobytes()

    def play(self, event: tuple) -> None:
        context, ring = self.context, self.ring
        match event:
            case ("step", parts):
                self.step(parts)
            case ("copy", source, destination, count) if source != destination:
                operation = Copy(source, destination, 0, count)
                assert context.apply(operation) == ring.apply(operation)
            case ("rollback", sequence, count):
                operation = Remove(sequence, max(0, ring.length(sequence) - count))
                if operation.first > 0 and not ring.facts.cuttable:
                    assert not ring.apply(operation)
                    return
                assert context.apply(operation) == ring.apply(operation)
            case ("shift", sequence, first, count) if first + count < ring.length(sequence):
                if not ring.facts.shiftable or not ring.facts.cuttable:
                    assert not ring.apply(Shift(sequence, first + count, -1, -count))
                    return
                for operation in (Remove(sequence, first, first + count), Shift(sequence, first + count, -1, -count)):
                    assert context.apply(operation)
                    assert ring.apply(operation)
            case ("save", sequence, key):
                self.saved[key] = context.save(sequence)
                ring.save(sequence, key)
            case ("restore", sequence, key) if key in self.saved:
                context.apply(Remove(sequence))
                context.apply(Restore(sequence, self.saved[key]))
                ring.restore(sequence, key)
            case ("empty", sequence):
                assert context.apply(Remove(sequence))
                assert ring.apply(Remove(sequence))
            case ("keep", sequence):
                context.apply(Keep(sequence))
                ring.apply(Keep(sequence))
            case ("clear",):
                context.apply(Clear())
                ring.apply(Clear())
        for sequence in range(N_SEQUENCES):
            assert ring.length(sequence) == context.length(sequence)


@contextlib.contextmanager
def both(path: Path, cuts: list[int]) -> Iterator[Both]:
    with whole(path, KV_SIZES) as context, open_stages(path, cuts, KV_SIZES) as ring:
        yield Both(context, ring)


@pytest.mark.parametrize("architecture", ["llama", "step35", "deepseek2", "qwen35moe"])
def test_any_kv_operations_leave_both_alike(synthetic: Callable[[str], Path], architecture: str) -> None:
    path = synthetic(architecture)
    n_layer, cuts = legal_cuts(path)
    with both(path, [0, cuts[0], cuts[-1], n_layer]) as pair:

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(events, min_size=8, max_size=25))
        def story(told: list[tuple]) -> None:
            pair.restart()
            for event in told:
                pair.play(event)
            pair.step([(sequence, 2) for sequence in range(N_SEQUENCES)])

        story()


@pytest.mark.parametrize("architecture", ["llama", "qwen35moe"])
def test_a_restored_or_copied_sequence_goes_on_as_if_it_had_been_computed(
    synthetic: Callable[[str], Path], architecture: str
) -> None:
    """The oracle is the text computed from its beginning, not the unsplit engine's own copy."""
    path = synthetic(architecture)
    n_layer, cuts = legal_cuts(path)
    sizes = StageSizes(n_ctx=96, n_sequences=2, n_ubatch=16, n_batch=16)
    with open_stages(path, [0, cuts[1], n_layer], sizes) as ring:
        tokens = tokens_of(ring.facts.n_vocab, 40)
        reference = ring.decode(one_sequence(tokens[:30], 0, every=True))[20:].tobytes()
        ring.apply(Clear())
        ring.decode(one_sequence(tokens[:20], 0))
        ring.apply(Copy(0, 1))
        ring.save(1, key=1)  # before any step has carried out the copy
        ring.apply(Remove(0))
        assert ring.decode(one_sequence(tokens[20:30], 20, sequence=1, every=True)).tobytes() == reference
        ring.restore(0, key=1)
        assert ring.decode(one_sequence(tokens[20:30], 20, every=True)).tobytes() == reference
