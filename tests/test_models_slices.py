"""Backbone slices: metadata byte by byte, the kept tensors' bytes, the manifest, the same identity."""

from __future__ import annotations

import struct
from functools import partial

import gguf
import numpy as np
import pytest
from test_gguf import write_moe

from orchestrator.errors import InputError, ModelFileError
from orchestrator.models.gguf import GgufFile, is_expert_tensor, raw_entries
from orchestrator.models.gguf_writer import PlannedTensor, entry_strings, file_bytes, write_gguf
from orchestrator.models.slices import write_backbone_slice


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
