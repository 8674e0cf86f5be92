"""Workers on slices: the same bytes as from the whole file, whatever subset of experts a slice holds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from orchestrator.engine.experts import ExpertStore
from orchestrator.engine.model import Model
from orchestrator.engine.session import Session
from orchestrator.errors import InputError
from orchestrator.models.gguf import GgufFile
from orchestrator.models.slices import Selection, write_slice
from orchestrator.types import FloatArray, Ownership
from tests.inprocess import Contract, InProcessExchange

TOKENS = 40


def decode(model: Model, exchange: InProcessExchange | None = None) -> FloatArray:
    tokens = [int(token) for token in np.random.default_rng(3).integers(0, model.n_vocab, TOKENS)]
    with Session(model, n_ctx=64, exchange=exchange) as session:
        if exchange is not None:
            exchange.describe(session.descriptors)
        return session.decode(tokens, all_logits=True)


def halves(expert: int, count: int) -> int:
    return 2 * expert // count


def thirds(expert: int, _: int) -> int:
    return expert % 3


def last_alone(expert: int, count: int) -> int:
    return int(expert == count - 1)


@pytest.mark.parametrize(
    ("architecture", "share"),
    [
        ("llama", halves),
        ("llama", thirds),
        ("llama", last_alone),
        ("gpt-oss", halves),
        ("gpt-oss", thirds),
        ("grovemoe", thirds),  # its second call has half as many experts: every slice must hold some of those too
    ],
)
def test_slices_of_experts_compute_like_the_whole_file(
    synthetic: Callable[[str], Path], tmp_path: Path, architecture: str, share: Callable[[int, int], int]
) -> None:
    path, backbone = synthetic(architecture), tmp_path / "backbone.gguf"
    file = GgufFile.open(path)
    write_slice(file, backbone, Selection(without_experts=True))
    shares: dict[int, list[int]] = {}
    for expert in range(file.n_expert):
        shares.setdefault(share(expert, file.n_expert), []).append(expert)
    with Model.open(path) as model:
        expected = decode(model)
    with contextlib.ExitStack() as stack:
        stores = []
        for number, experts in shares.items():
            sliced = tmp_path / f"{number}.gguf"
            write_slice(file, sliced, Selection(experts=experts))
            stores.append(stack.enter_context(ExpertStore(sliced)))
            assert stores[-1].ownership == Ownership.product(file.moe_layers, experts)
            assert stores[-1].bytes_read == sum(info.n_bytes for info in GgufFile.open(sliced).tensors.values())
        with Model.open(backbone, without_experts=True) as model:
            got = decode(model, InProcessExchange(stores, Contract.EXACT))
    assert got.tobytes() == expected.tobytes()


def test_a_part_of_a_slice_can_be_owned_and_what_it_lacks_is_named(
    synthetic: Callable[[str], Path], tmp_path: Path
) -> None:
    sliced = tmp_path / "some.gguf"
    write_slice(synthetic("llama"), sliced, Selection(experts=(2, 3, 7, 9), layers=(0,)))
    with ExpertStore(sliced, Ownership({0: (3, 9)})) as store:
        assert store.bytes_read == GgufFile.open(sliced).bytes_per_expert(0) * 2
    with pytest.raises(InputError, match="without experts 4-5 of layer 0") as raised:
        ExpertStore(sliced, Ownership({0: (3, 4, 5)}))
    assert raised.value.hint == "it holds experts 2-3,7,9 of this layer"
    with pytest.raises(InputError, match="no experts in layer 1"):
        ExpertStore(sliced, Ownership({1: (3,)}))
    with pytest.raises(InputError, match="cannot be mapped"):
        ExpertStore(sliced, mmap=True)
