"""The engine's half of the hook: remote rows give the bytes of the unmodified path, and errors leave no trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from orchestrator.engine.experts import ExpertStore
from orchestrator.engine.model import Model
from orchestrator.engine.session import Session
from orchestrator.errors import ComputeError, InputError, RequestError
from orchestrator.models.gguf import GgufFile
from orchestrator.models.slices import write_backbone_slice
from orchestrator.types import Contract, FloatArray, Ownership
from tests.conftest import FAMILIES
from tests.inprocess import InProcessExchange

PREFILL, STEPS = 70, 5  # one micro-batch is 63 rows, so this is two of them


def tokens_for(model: Model) -> list[int]:
    return [int(token) for token in np.random.default_rng(7).integers(0, model.n_vocab, PREFILL + STEPS)]


def trace(session: Session, tokens: list[int]) -> list[FloatArray]:
    return [session.decode(tokens[:PREFILL], all_logits=True)] + [session.decode([t]) for t in tokens[PREFILL:]]


def same(left: list[FloatArray], right: list[FloatArray]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(left, right, strict=True))


def oracle(path: Path) -> list[FloatArray]:
    with Model.open(path) as model, Session(model, n_ctx=256) as session:
        return trace(session, tokens_for(model))


@contextlib.contextmanager
def star(
    path: Path,
    workers: int,
    contract: Contract = Contract.EXACT,
    before_dispatch: Callable[[int], None] | None = None,
    backbone: Path | None = None,
    **options: bool,
) -> Iterator[tuple[Model, Session, InProcessExchange]]:
    file = GgufFile.open(path)
    with contextlib.ExitStack() as stack:
        stores = [
            stack.enter_context(
                ExpertStore(
                    path,
                    Ownership.product(file.moe_layers, [e for e in range(file.n_expert) if e % workers == i]),
                    **options,
                )
            )
            for i in range(workers)
        ]
        exchange = InProcessExchange(stores, contract, before_dispatch)
        model = stack.enter_context(Model.open(backbone or path, without_experts=True))
        session = stack.enter_context(Session(model, n_ctx=256, exchange=exchange, contract=contract))
        exchange.describe(session.descriptors)
        yield model, session, exchange


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_exact_rows_give_the_bytes_of_one_process(
    synthetic: Callable[[str], Path], architecture: str, workers: int
) -> None:
    path = synthetic(architecture)
    with star(path, workers) as (model, session, _):
        assert same(trace(session, tokens_for(model)), oracle(path))


@pytest.mark.parametrize("workers", [1, 3])
def test_micro_batches_without_wanted_logits_send_no_rows(synthetic: Callable[[str], Path], workers: int) -> None:
    path = synthetic("qwen3moe")
    with Model.open(path) as model, Session(model, n_ctx=256) as session:
        tokens = tokens_for(model) * 2
        expected = session.decode(tokens)
    with star(path, workers) as (_, session, exchange):
        assert session.decode(tokens).tobytes() == expected.tobytes()
        last = session.descriptors[-1].layer
        assert [len(batch.rows) for batch in exchange.seen if batch.layer == last] == [1]


def test_the_comparison_sees_one_bit(synthetic: Callable[[str], Path]) -> None:
    path = synthetic("qwen2moe")
    with star(path, 1) as (model, session, exchange):
        honest = exchange.combine

        def flipped(layer: int, call: int, out: FloatArray) -> None:
            honest(layer, call, out)
            out.view(np.uint32)[...] ^= 1

        exchange.combine = flipped  # type: ignore[method-assign]
        assert not same(trace(session, tokens_for(model)), oracle(path))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_sums_differ_only_by_float_order(synthetic: Callable[[str], Path], architecture: str) -> None:
    path = synthetic(architecture)
    with star(path, 3, Contract.SUM) as (model, session, _):
        got = np.concatenate(trace(session, tokens_for(model))).astype(np.float64)
    want = np.concatenate(oracle(path)).astype(np.float64)
    cosine = (got * want).sum(1) / np.linalg.norm(got, axis=1) / np.linalg.norm(want, axis=1)
    assert np.median(cosine) > 0.999999
    assert cosine.min() > 0.99  # a near tie in the router may choose another expert


def test_a_second_call_of_a_layer_has_its_own_descriptor(synthetic: Callable[[str], Path]) -> None:
    with star(synthetic("grovemoe"), 1) as (_, session, _exchange):
        calls = [(d.layer, d.call) for d in session.descriptors]
        names = [dict(d.tensors)["up"] for d in session.descriptors if d.layer == 0]
    assert calls == [(layer, call) for layer in range(len(calls) // 2) for call in (0, 1)]
    assert names == ["blk.0.ffn_up_exps.weight", "blk.0.ffn_up_chexps.weight"]


@pytest.mark.parametrize("architecture", ["qwen2moe", "deepseek2", "step35", "llama4", "qwen35moe"])
def test_the_shared_expert_lies_between_dispatch_and_combine(
    synthetic: Callable[[str], Path], architecture: str
) -> None:
    with star(synthetic(architecture), 1) as (model, session, _):
        session.decode(tokens_for(model)[:2])
        nodes = session.graph()
        layers = [d.layer for d in session.descriptors]
    names = [name for _, name in nodes]
    for layer in layers:
        inside = nodes[names.index(f"linkcpp_dispatch-{layer}") : names.index(f"linkcpp_combine-{layer}")]
        products = [name for op, name in inside if op == "MUL_MAT"]
        assert len(products) >= 3, f"layer {layer}: up, gate and down of the shared expert, got {products}"


@pytest.mark.parametrize("architecture", ["qwen2moe", "qwen35moe", "grovemoe"])
@pytest.mark.parametrize("phase", ["first prefill", "second micro-batch", "decode"])
def test_an_error_in_the_hook_leaves_no_trace(
    synthetic: Callable[[str], Path], architecture: str, phase: str
) -> None:
    path = synthetic(architecture)
    armed: list[int] = []

    def fail(call: int) -> None:
        if armed and call == armed[0]:
            armed.clear()
            raise ConnectionError("injected")

    with star(path, 2, before_dispatch=fail) as (model, session, exchange):
        tokens, calls = tokens_for(model), len(session.descriptors)
        expected = oracle(path)
        got = []
        if phase == "decode":
            got.append(session.decode(tokens[:PREFILL], all_logits=True))
        before = session.position
        armed.append(exchange.calls + (2 * calls if phase == "second micro-batch" else calls))
        with pytest.raises(ConnectionError, match="injected"):
            session.decode(tokens[PREFILL : PREFILL + 1] if phase == "decode" else tokens[:PREFILL], all_logits=True)
        assert not armed
        assert session.position == before
        failed_at = exchange.calls
        if phase != "decode":
            got.append(session.decode(tokens[:PREFILL], all_logits=True))
        got += [session.decode([token]) for token in tokens[PREFILL:]]
        assert exchange.calls > failed_at
    assert same(got, expected)


@pytest.mark.parametrize("architecture", ["llama", "grovemoe", "gpt-oss"])
def test_a_backbone_file_without_experts_is_enough(
    synthetic: Callable[[str], Path], tmp_path: Path, architecture: str
) -> None:
    path, sliced = synthetic(architecture), tmp_path / "backbone.gguf"
    write_backbone_slice(path, sliced)
    file = GgufFile.open(path)
    held = sum(tensor.n_bytes for layer in file.moe_layers for tensor in file.expert_tensors(layer))
    assert sliced.stat().st_size < path.stat().st_size - held + 100_000
    with star(path, 2, backbone=sliced) as (model, session, _):
        assert same(trace(session, tokens_for(model)), oracle(path))


def test_missing_experts_are_refused_before_anything_is_computed(
    synthetic: Callable[[str], Path], tmp_path: Path
) -> None:
    sliced = tmp_path / "backbone.gguf"
    write_backbone_slice(synthetic("llama"), sliced)
    with Model.open(sliced) as model, pytest.raises(ComputeError, match=r"does not hold the data of tensor 'blk\.0"):
        Session(model, n_ctx=64)


def test_a_store_reads_exactly_its_own_bytes(synthetic: Callable[[str], Path]) -> None:
    file = GgufFile.open(synthetic("gpt-oss"))
    owned = Ownership({0: (1, 2, 9), 3: (0,)})
    expected = sum(
        file.expert_range(tensor, expert)[2]
        for layer, experts in owned.experts.items()
        for expert in experts
        for tensor in file.expert_tensors(layer)
    )
    with ExpertStore(file.path, owned) as store:
        assert store.bytes_read == expected
    with ExpertStore(file.path, owned, mmap=True) as store:
        assert store.bytes_read == 0


def test_mapped_experts_give_the_same_bytes(synthetic: Callable[[str], Path]) -> None:
    path = synthetic("qwen2moe")
    with star(path, 3, mmap=True) as (model, session, _):
        assert same(trace(session, tokens_for(model)), oracle(path))


def test_a_store_refuses_what_it_cannot_serve_and_lives_on(synthetic: Callable[[str], Path]) -> None:
    path = synthetic("llama")
    with star(path, 1) as (_, session, _exchange):
        descriptor = session.descriptors[0]
    rows = np.ones((1, descriptor.n_embd), np.float32)
    one, weight = np.array([1], np.uint16), np.array([1], np.float32)
    out = np.empty((1, descriptor.n_embd), np.float32)
    with ExpertStore(path, Ownership({0: (0, 1)})) as store:
        handle = store.layer(descriptor)
        with pytest.raises(ComputeError, match="expert 5 is not held"):
            store.compute(handle, Contract.EXACT, rows, one, np.array([5], np.uint16), weight, out)
        with pytest.raises(ComputeError, match="no such layer"):
            store.compute(99, Contract.EXACT, rows, one, one, weight, out)
        with pytest.raises(InputError, match="not held here"):
            store.layer(session.descriptors[1])
        store.compute(handle, Contract.EXACT, rows, one, one, weight, out)
        assert np.isfinite(out).all()
    with pytest.raises(InputError, match="no experts in layer 77"):
        ExpertStore(path, Ownership({77: (0,)}))
    with pytest.raises(InputError, match="expert 16 does not exist"):
        ExpertStore(path, Ownership({0: (16,)}))


def test_truncation_rewinds_an_attention_cache(synthetic: Callable[[str], Path]) -> None:
    with Model.open(synthetic("llama")) as model, Session(model, n_ctx=128) as session:
        tokens = tokens_for(model)
        first = session.decode(tokens[:20], all_logits=True)
        assert session.truncate(8)
        assert session.position == 8
        assert session.decode(tokens[8:20], all_logits=True).tobytes() == first[8:].tobytes()


def test_a_full_context_is_refused_with_both_counts(synthetic: Callable[[str], Path]) -> None:
    with Model.open(synthetic("llama")) as model, Session(model, n_ctx=256) as session:
        with pytest.raises(RequestError, match="300 tokens do not fit into the context of 256"):
            session.decode([1] * 300)
        assert session.position == 0
