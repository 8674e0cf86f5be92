"""Backbone slices: metadata byte by byte, the kept tensors' bytes, the manifest, the same identity."""

from __future__ import annotations

import struct
from functools import partial

import gguf
import numpy as np
import pytest
from test_gguf import write_moe

from orchestrator.errors import InputError, ModelFileError
from orchestrator.models.gguf import GgufFile, raw_entries
from orchestrator.models.gguf_manifest import is_expert_tensor
from orchestrator.models.gguf_writer import PlannedTensor, entry_strings, file_bytes, write_gguf
from orchestrator.models.inspection import Inspection
from orchestrator.models.slices import Selection, plan_slice, write_backbone_slice, write_slice
from orchestrator.types import Ownership
from orchestrator.workers.ownership import choose_ownership


@pytest.fixture
def source(tmp_path):
    def odd_metadata(writer):
        writer.add_string("tokenizer.chat_template", "{{ messages }}\n")
        writer.add_array("llama.some.numbers", [1, 2, 3])

    return write_moe(tmp_path / "moe.gguf", extra=odd_metadata)


def test_a_slice_holds_everything_but_the_experts(source, tmp_path):
    destination = tmp_path / "backbone.gguf"
    size = write_backbone_slice(source, destination)
    whole, part = GgufFile.open(source), GgufFile.open(destination)
    assert size == destination.stat().st_size < source.stat().st_size
    assert list(part.tensors) == [name for name in whole.tensors if not is_expert_tensor(name)]
    for name, info in part.tensors.items():
        original = whole.tensors[name]
        assert info.offset % 32 == 0
        assert (info.type, info.shape) == (original.type, original.shape)
        ours = destination.read_bytes()[info.offset : info.offset + info.n_bytes]
        assert ours == source.read_bytes()[original.offset : original.offset + original.n_bytes]


def test_metadata_is_copied_byte_by_byte_and_the_manifest_lists_all_tensors(source, tmp_path):
    destination = tmp_path / "backbone.gguf"
    write_backbone_slice(source, destination)
    whole, part = GgufFile.open(source), GgufFile.open(destination)
    copied = b"".join(raw_entries(part.headers[0], without=("linkcpp.",)))
    assert copied == b"".join(raw_entries(whole.headers[0]))
    oracle = gguf.GGUFReader(destination)  # gguf-py reads it too
    assert oracle.fields["linkcpp.manifest.names"].contents() == list(whole.tensors)
    assert oracle.fields["linkcpp.manifest.types"].contents() == [int(info.type) for info in whole.tensors.values()]
    shapes = np.array(oracle.fields["linkcpp.manifest.shapes"].contents()).reshape(-1, 4).tolist()
    assert shapes == [[*info.shape, 1, 1, 1][:4] for info in whole.tensors.values()]


def test_a_slice_knows_its_experts_and_has_the_models_identity(source, tmp_path):
    destination, second = tmp_path / "backbone.gguf", tmp_path / "again.gguf"
    write_backbone_slice(source, destination)
    write_backbone_slice(destination, second, lambda name: name == "token_embd.weight")
    whole, part, smaller = GgufFile.open(source), GgufFile.open(destination), GgufFile.open(second)
    assert part.is_slice
    assert not whole.is_slice
    assert (part.moe_layers, part.n_expert, part.top_k) == (whole.moe_layers, whole.n_expert, whole.top_k)
    assert part.expert_tensors(0) == ()
    assert part.bytes_per_expert(0) == whole.bytes_per_expert(0)
    assert part.manifest == whole.manifest == smaller.manifest
    assert part.header_sha256 == whole.header_sha256 == smaller.header_sha256
    assert "token_embd.weight" not in smaller.tensors


def test_identity_tells_models_apart(source, tmp_path):
    other = write_moe(tmp_path / "other.gguf", ff=64)
    assert GgufFile.open(source).header_sha256 != GgufFile.open(other).header_sha256


def test_an_empty_array_survives(source, tmp_path):
    """gguf-py refuses to write one, which is why metadata is copied and not written anew."""
    model = GgufFile.open(source)
    entries = [*raw_entries(model.headers[0]), entry_strings("tokenizer.ggml.merges", [])]
    tensors = [
        PlannedTensor(info.name, info.type, info.shape, partial(file_bytes, source, info))
        for info in model.tensors.values()
    ]
    write_gguf(tmp_path / "empty.gguf", entries, tensors, alignment=32)
    write_backbone_slice(tmp_path / "empty.gguf", tmp_path / "slice.gguf")
    assert GgufFile.open(tmp_path / "slice.gguf").metadata["tokenizer.ggml.merges"] == []


def test_progress_ends_at_the_total_and_unfinished_files_are_removed(source, tmp_path):
    seen = []
    write_backbone_slice(
        source, tmp_path / "a.gguf", progress=lambda done, total, note="": seen.append((done, total))
    )
    assert seen[-1][0] <= seen[-1][1]
    assert seen == sorted(seen)

    def interrupt(done, total, note=""):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_backbone_slice(source, tmp_path / "b.gguf", progress=interrupt)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "moe.gguf"]


def test_the_model_itself_and_impossible_places_are_refused(source, tmp_path):
    before = source.read_bytes()
    with pytest.raises(InputError, match="is the model itself"):
        write_backbone_slice(source, source)
    with pytest.raises(InputError, match="is a folder"):
        write_backbone_slice(source, tmp_path)
    with pytest.raises(InputError, match="cannot write"):
        write_backbone_slice(source, tmp_path / "no" / "such" / "folder.gguf")
    assert source.read_bytes() == before


def test_a_damaged_manifest_is_refused(source, tmp_path):
    destination = tmp_path / "backbone.gguf"
    write_backbone_slice(source, destination)
    good = destination.read_bytes()
    at = good.index(b"linkcpp.manifest.types") + len(b"linkcpp.manifest.types") + 16
    destination.write_bytes(good[:at] + struct.pack("<I", 99) + good[at + 4 :])
    with pytest.raises(ModelFileError, match="manifest is damaged"):
        GgufFile.open(destination)
    destination.write_bytes(good[:at] + struct.pack("<I", 1) + good[at + 4 :])
    with pytest.raises(ModelFileError, match="not as the slice's manifest says"):
        GgufFile.open(destination)


def test_parts_become_one_file(tmp_path):
    names = []
    for index in range(2):
        path = tmp_path / f"m-{index + 1:05d}-of-00002.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        if index == 0:
            writer.add_block_count(2)
            writer.add_expert_count(2)
            writer.add_expert_used_count(1)
        writer.add_uint16("split.no", index)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", 4)
        for name in (f"blk.{index}.attn_norm.weight", f"blk.{index}.ffn_up_exps.weight"):
            writer.add_tensor(name, np.full((2, 8, 8) if "exps" in name else (8,), index, np.float32))
            names.append(name)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    whole = GgufFile.open(tmp_path / "m-00001-of-00002.gguf")
    write_backbone_slice(whole, tmp_path / "slice.gguf")
    part = GgufFile.open(tmp_path / "slice.gguf")
    assert not [key for key in part.metadata if key.startswith("split.")]
    assert list(part.manifest) == names
    assert part.header_sha256 == whole.header_sha256
    info = part.tensors["blk.1.attn_norm.weight"]
    assert np.frombuffer(part.path.read_bytes()[info.offset :][: info.n_bytes], np.float32).tolist() == [1.0] * 8


# --- experts and layers -----------------------------------------------------------------------------------------


def bytes_of(model, info, expert):
    path, offset, size = model.expert_range(info, expert)
    return path.read_bytes()[offset : offset + size]


@pytest.mark.parametrize("experts", [(0, 1), (2, 3), (1,), (0, 3), (0, 1, 2, 3)])
def test_a_slice_of_experts_holds_them_under_their_own_numbers(source, tmp_path, experts):
    destination = tmp_path / "experts.gguf"
    write_slice(source, destination, Selection(experts=experts))
    whole, part = GgufFile.open(source), GgufFile.open(destination)
    assert list(part.tensors) == [name for name in whole.tensors if is_expert_tensor(name)]
    assert part.header_sha256 == whole.header_sha256
    assert part.manifest == whole.manifest
    assert part.shares == {0: experts, 1: experts}
    assert (part.n_expert, part.bytes_per_expert(0), part.is_slice) == (4, whole.bytes_per_expert(0), True)
    for layer in (0, 1):
        for info in part.expert_tensors(layer):
            original = whole.tensors[info.name]
            assert info.n_bytes * 4 == original.n_bytes * len(experts)
            for expert in experts:
                assert bytes_of(part, info, expert) == bytes_of(whole, original, expert)
    for absent in set(range(5)) - set(experts):
        with pytest.raises(ModelFileError, match=f"of 4, not {absent}"):
            part.expert_range(part.expert_tensors(1)[0], absent)


def test_other_readers_open_a_slice_of_experts(source, tmp_path):
    destination = tmp_path / "experts.gguf"
    write_slice(source, destination, Selection(experts=(1, 3)))
    theirs, oracle = gguf.GGUFReader(destination), gguf.GGUFReader(source)
    arrays = {tensor.name: tensor.data for tensor in oracle.tensors}
    assert [tensor.name for tensor in theirs.tensors] == [name for name in arrays if is_expert_tensor(name)]
    for tensor in theirs.tensors:
        assert np.array_equal(tensor.data, arrays[tensor.name][[1, 3]])
    assert theirs.fields["linkcpp.slice.experts"].contents() == ["0-1:1,3"]
    assert theirs.fields["tokenizer.chat_template"].contents() == "{{ messages }}\n"


def test_layers_keep_their_blocks_and_what_belongs_to_none(source, tmp_path):
    write_slice(source, tmp_path / "stage.gguf", Selection(layers=(1,)))
    whole, part = GgufFile.open(source), GgufFile.open(tmp_path / "stage.gguf")
    assert list(part.tensors) == [name for name in whole.tensors if not name.startswith("blk.0.")]
    assert part.shares == {1: (0, 1, 2, 3)}
    assert "linkcpp.slice.experts" not in part.metadata
    write_slice(source, tmp_path / "trunk.gguf", Selection(layers=(1,), without_experts=True, without=("token_*",)))
    names = list(GgufFile.open(tmp_path / "trunk.gguf").tensors)
    assert names == ["blk.1.attn_norm.weight", "blk.1.ffn_gate_inp.weight"]
    write_slice(source, tmp_path / "one.gguf", Selection(layers=(1,), experts=(2,)))
    assert GgufFile.open(tmp_path / "one.gguf").shares == {1: (2,)}


def test_shares_differ_from_layer_to_layer(source, tmp_path):
    shares = {0: (0, 3), 1: (1, 2, 3)}
    write_slice(source, tmp_path / "uneven.gguf", Selection(shares=shares))
    part = GgufFile.open(tmp_path / "uneven.gguf")
    assert part.shares == shares
    assert part.metadata["linkcpp.slice.experts"] == ["0:0,3", "1:1-3"]
    with pytest.raises(InputError, match="no experts in layers 2"):
        write_slice(source, tmp_path / "none.gguf", Selection(shares={2: (0,)}))
    with pytest.raises(InputError, match="no expert was chosen"):
        write_slice(source, tmp_path / "none.gguf", Selection(shares={}))


def test_slices_of_slices(source, tmp_path):
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    write_slice(source, first, Selection(experts=(0, 2, 3)))
    write_slice(first, second, Selection(experts=(2,), layers=(0,)))
    write_slice(source, tmp_path / "direct.gguf", Selection(experts=(2,), layers=(0,)))
    assert second.read_bytes() == (tmp_path / "direct.gguf").read_bytes()
    write_slice(first, tmp_path / "copy.gguf", Selection())
    assert (tmp_path / "copy.gguf").read_bytes() == first.read_bytes()
    with pytest.raises(InputError, match="lacks experts 1 of layer 0"):
        write_slice(first, tmp_path / "none.gguf", Selection(experts=(1, 2)))
    assert not (tmp_path / "none.gguf").exists()


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (Selection(experts=(4,)), "no expert 4"),
        (Selection(experts=(), layers=(0,)), "no expert was chosen"),
        (Selection(experts=(0,), layers=(2,)), "no layer 2"),
        (Selection(layers=(7,)), "no layer 7"),
        (Selection(experts=(0,), without_experts=True), "not both"),
        (Selection(without=("*",)), "no tensor at all"),
    ],
)
def test_impossible_slices_are_refused(source, tmp_path, selection, message):
    with pytest.raises(InputError, match=message):
        write_slice(source, tmp_path / "none.gguf", selection)
    assert not (tmp_path / "none.gguf").exists()


@pytest.mark.parametrize(
    "texts",
    [
        ["0-1:1,4"],
        ["0-1:1-3"],
        ["0-1:3,1"],
        ["0-1:1;3"],
        ["0:1,3", "0-1:1,3"],
        ["0-99999:1,3"],
        ["0-1:0-99999999999"],
        ["0-1:1,-"],
        ["0-1,1,3"],
        ["1-0:1,3"],
        [":1,3"],
        ["0:1,3"],
        [],
    ],
)
def test_damaged_lists_of_experts_are_refused(source, tmp_path, texts):
    plan = plan_slice(GgufFile.open(source), Selection(experts=(1, 3)))
    entries = [entry for entry in plan.entries() if b"linkcpp.slice.experts" not in entry]
    entries.append(entry_strings("linkcpp.slice.experts", texts))
    tensors = [
        PlannedTensor(tensor.info.name, tensor.info.type, tensor.shape, lambda size=tensor.n_bytes: [bytes(size)])
        for tensor in plan.tensors
    ]
    write_gguf(tmp_path / "bad.gguf", entries, tensors, alignment=32)
    with pytest.raises(ModelFileError, match=r"manifest is damaged|not as the slice's manifest says"):
        GgufFile.open(tmp_path / "bad.gguf")


def test_a_slice_says_what_it_lacks_when_it_is_inspected(source, tmp_path):
    write_slice(source, tmp_path / "experts.gguf", Selection(experts=(1, 3), layers=(1,)))
    inspection = Inspection.of(GgufFile.open(tmp_path / "experts.gguf"))
    assert ("experts here", "1,3 of layers 1") in inspection.rows()
    assert inspection.to_json()["held"] == [{"layers": "1", "experts": "1,3"}]
    assert Inspection.of(GgufFile.open(source)).to_json()["held"] == [{"layers": "0-1", "experts": "0-3"}]


def test_a_worker_owns_what_its_slice_holds(source, tmp_path):
    write_slice(source, tmp_path / "experts.gguf", Selection(experts=(1, 3)))
    part = GgufFile.open(tmp_path / "experts.gguf")
    assert choose_ownership(part) == Ownership.product((0, 1), (1, 3))
    assert choose_ownership(part, layers="1") == Ownership({1: (1, 3)})
    assert choose_ownership(part, experts="3") == Ownership.product((0, 1), (3,))


def test_what_the_first_machine_needs_is_checked_before_the_engine_is(source, tmp_path):
    write_slice(source, tmp_path / "worker.gguf", Selection(experts=(1,)))
    write_slice(source, tmp_path / "backbone.gguf", Selection(without_experts=True))
    GgufFile.open(source).require_backbone(with_experts=True)
    GgufFile.open(tmp_path / "backbone.gguf").require_backbone(with_experts=False)
    with pytest.raises(ModelFileError, match=r"without token_embd\.weight and 4 more tensors that are no experts"):
        GgufFile.open(tmp_path / "worker.gguf").require_backbone(with_experts=False)
    with pytest.raises(ModelFileError, match="needs workers"):
        GgufFile.open(tmp_path / "backbone.gguf").require_backbone(with_experts=True)
