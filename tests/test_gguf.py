"""Reading GGUF headers: an independent writer (gguf-py) as the oracle, every kind of damage."""

from __future__ import annotations

import ctypes
import struct
import time
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import pytest

from orchestrator.errors import DenseModelError, ModelFileError
from orchestrator.models.ggml_types import GgmlType
from orchestrator.models.gguf import GgufFile
from orchestrator.models.gguf_header import parse_header, read_header
from orchestrator.models.gguf_manifest import is_expert_tensor


def write_moe(path, *, experts=4, used=2, layers=2, architecture="llama", skip=(), extra=None, embedding=32, ff=32):
    """Write a small MoE file with gguf-py, which shares no code with the reader under test."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    writer.add_string("general.name", "tiny")
    if experts is not None:
        writer.add_expert_count(experts)
    if used is not None:
        writer.add_expert_used_count(used)
    writer.add_array("tokenizer.ggml.tokens", ["a", "é", "", "<|end|>"])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0, 2.0, 0.0])
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    if extra is not None:
        extra(writer)
    random_numbers = np.random.default_rng(7)
    shapes = {"token_embd.weight": (4, embedding)}
    for layer in range(layers):
        shapes[f"blk.{layer}.attn_norm.weight"] = (embedding,)
        shapes[f"blk.{layer}.ffn_gate_inp.weight"] = (experts or 4, embedding)
        shapes[f"blk.{layer}.ffn_up_exps.weight"] = (experts or 4, ff, embedding)
        shapes[f"blk.{layer}.ffn_down_exps.weight"] = (experts or 4, embedding, ff)
        shapes[f"blk.{layer}.ffn_up_exps.bias"] = (experts or 4, ff)
        shapes[f"blk.{layer}.ffn_down_exps.scale"] = (experts or 4,)
    for name, shape in shapes.items():
        if name not in skip:
            writer.add_tensor(name, random_numbers.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return write_moe(tmp_path_factory.mktemp("gguf") / "moe.gguf")


def test_type_sizes_equal_those_of_gguf_py():
    theirs = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items() if kind.name != "Q8_1"}
    ours = {int(kind): (kind.block_size, kind.block_bytes) for kind in GgmlType}
    assert {number: ours[number] for number in theirs} == theirs
    # gguf-py lacks the newest and counts Q8_1, which no file holds, in another way than the engine.
    assert set(ours) - set(theirs) <= {GgmlType.Q8_1, GgmlType.NVFP4, GgmlType.Q1_0, GgmlType.Q2_0}


def test_header_equals_what_gguf_py_reads(moe):
    model, oracle = GgufFile.open(moe), gguf.GGUFReader(moe)
    assert list(model.tensors) == [tensor.name for tensor in oracle.tensors]
    for tensor in oracle.tensors:
        info = model.tensors[tensor.name]
        assert info.offset == tensor.data_offset
        assert info.n_bytes == tensor.n_bytes
        assert info.shape == tuple(int(length) for length in tensor.shape)
        assert int(info.type) == int(tensor.tensor_type)
    for key in model.metadata:
        assert model.metadata[key] == oracle.fields[key].contents()
    assert model.metadata.length("tokenizer.ggml.tokens") == 4


def test_facts_about_experts(moe):
    model = GgufFile.open(moe)
    assert (model.architecture, model.name, model.n_layer, model.n_expert, model.top_k) == ("llama", "tiny", 2, 4, 2)
    assert model.is_moe
    assert not model.is_slice
    assert model.moe_layers == (0, 1)
    assert [info.name for info in model.expert_tensors(1)] == [
        "blk.1.ffn_up_exps.weight",
        "blk.1.ffn_down_exps.weight",
        "blk.1.ffn_up_exps.bias",
        "blk.1.ffn_down_exps.scale",
    ]
    assert model.expert_tensors(5) == ()
    assert model.bytes_per_expert(0) == 4 * (32 * 32 + 32 * 32 + 32 + 1)


def test_expert_ranges_hold_the_experts_bytes(moe):
    model, oracle = GgufFile.open(moe), gguf.GGUFReader(moe)
    arrays = {tensor.name: tensor.data for tensor in oracle.tensors}
    for info in model.expert_tensors(0):
        for expert in range(4):
            path, offset, size = model.expert_range(info, expert)
            data = path.read_bytes()[offset : offset + size]
            assert data == np.ascontiguousarray(arrays[info.name][expert]).tobytes()
    with pytest.raises(ModelFileError, match="not 4"):
        model.expert_range(model.expert_tensors(0)[0], 4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("blk.0.ffn_up_exps.weight", True),
        ("blk.61.ffn_gate_up_exps.bias", True),
        ("blk.3.ffn_down_chexps.weight", True),
        ("blk.3.ffn_gate_exps.scale", True),
        ("blk.0.ffn_norm_exps.weight", False),
        ("blk.0.ffn_up_shexp.weight", False),
        ("blk.0.ffn_gate_inp.weight", False),
        ("blk.0.ffn_gate_exps.input_scale", False),
        ("xblk.0.ffn_up_exps.weight", False),
        ("blk.0.ffn_up_exps.weight.more", False),
    ],
)
def test_names_of_expert_tensors(name, expected):
    assert is_expert_tensor(name) is expected


# --- every kind of unusable file, each in its own words ---------------------------------------------------------


def no_such_file(folder, _):
    return folder / "missing.gguf"


def a_folder(folder, _):
    return folder


def patched(at, data):
    def damage(folder, good):
        content = bytearray(good)
        content[at : at + len(data)] = data
        path = folder / "bad.gguf"
        path.write_bytes(content)
        return path

    return damage


def content(data):
    def damage(folder, _):
        path = folder / "bad.gguf"
        path.write_bytes(data)
        return path

    return damage


def cut(keep):
    def damage(folder, good):
        path = folder / "bad.gguf"
        path.write_bytes(good[:keep])
        return path

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_such_file, "no such file"),
        (a_folder, "is a folder"),
        (content(b""), "is empty"),
        (content(b"MZ"), "not a GGUF"),
        (content(b"Hello, this is text and not a model"), "not a GGUF"),
        (content(b"PK\x03\x04" + bytes(100)), "zip archive"),
        (content(b"version https://git-lfs.github.com/spec/v1\n"), "Git LFS pointer"),
        (content(b"<!DOCTYPE html><html>"), "HTML"),
        (content(b"tjgg" + bytes(100)), "before GGUF"),
        (content(b"GGUF"), "truncated within the header"),
        (patched(4, struct.pack(">I", 3)), "big-endian"),
        (patched(4, struct.pack("<I", 1)), "version 1"),
        (patched(4, struct.pack("<I", 9)), "version 9"),
        (patched(4, struct.pack("<I", 0)), "version 0"),
        (patched(8, struct.pack("<Q", 2**63)), "tensors, more than the file"),
        (patched(8, struct.pack("<Q", 100_000)), "tensors, more than the file"),
        (patched(16, struct.pack("<Q", 2**40)), "metadata entries, more than the file"),
        (patched(24, struct.pack("<Q", 2**62)), "a key of"),
        (cut(60), "9 metadata entries, more than the file of 60 bytes can hold"),
        (cut(400), "truncated within the header"),
    ],
)
def test_unusable_files_are_named_in_words(moe, tmp_path, damage, message):
    good = moe.read_bytes()
    path = damage(tmp_path, good)
    with pytest.raises(ModelFileError, match=message) as raised:
        GgufFile.open(path)
    assert str(path) in str(raised.value)
    assert raised.value.exit_code == 2


def test_truncation_says_exactly_what_is_missing(moe, tmp_path):
    header = read_header(moe)
    (tmp_path / "cut.gguf").write_bytes(moe.read_bytes()[: header.data_end - 777])
    with pytest.raises(ModelFileError, match=f"777 of {header.data_end} bytes are missing"):
        GgufFile.open(tmp_path / "cut.gguf")


def test_a_huge_length_in_a_huge_file_is_not_allocated(moe, tmp_path):
    """The file is large enough (sparse), so only the bound on a string's length protects the memory."""
    good = bytearray(moe.read_bytes())
    key = b"general.name"
    struct.pack_into("<Q", good, good.index(key) + len(key) + 4, 6 << 30)
    path = tmp_path / "sparse.gguf"
    path.write_bytes(good)
    with path.open("r+b") as file:
        file.truncate(8 << 30)
    with pytest.raises(ModelFileError, match=r"general\.name of 6442450944 bytes"):
        GgufFile.open(path)


@pytest.mark.parametrize(("shift", "message"), [(-32, "overlaps"), (32, "not right behind"), (4, "not right behind")])
def test_tensors_must_be_packed(moe, tmp_path, shift, message):
    good = bytearray(moe.read_bytes())
    name = b"blk.0.ffn_up_exps.weight"
    at = good.index(name) + len(name) + 4 + 3 * 8 + 4
    (offset,) = struct.unpack_from("<Q", good, at)
    struct.pack_into("<Q", good, at, offset + shift)
    (tmp_path / "bad.gguf").write_bytes(good)
    with pytest.raises(ModelFileError, match=f"{name.decode()}.*{message}"):
        GgufFile.open(tmp_path / "bad.gguf")


def test_an_unknown_tensor_type_is_named(moe, tmp_path):
    good = bytearray(moe.read_bytes())
    name = b"blk.0.ffn_up_exps.weight"
    struct.pack_into("<I", good, good.index(name) + len(name) + 4 + 3 * 8, 4)  # removed upstream: Q4_2
    (tmp_path / "bad.gguf").write_bytes(good)
    with pytest.raises(ModelFileError, match=r"blk\.0\.ffn_up_exps\.weight has the unknown type 4"):
        GgufFile.open(tmp_path / "bad.gguf")


def test_a_matrix_that_the_engine_cannot_multiply_is_named(moe, tmp_path):
    good = bytearray(moe.read_bytes())
    name = b"blk.0.ffn_up_exps.weight"
    at = good.index(name) + len(name) + 4 + 3 * 8
    assert struct.unpack_from("<I", good, at)[0] == GgmlType.F32
    struct.pack_into("<I", good, at, GgmlType.I32)  # as many bytes
    (tmp_path / "bad.gguf").write_bytes(good)
    with pytest.raises(ModelFileError, match=r"cannot multiply blk\.0\.ffn_up_exps\.weight.*I32"):
        GgufFile.open(tmp_path / "bad.gguf")


class _Traits(ctypes.Structure):
    """``ggml_type_traits_cpu`` of the pinned engine."""

    _fields_ = (
        ("from_float", ctypes.c_void_p),
        ("vec_dot", ctypes.c_void_p),
        ("vec_dot_type", ctypes.c_int),
        ("nrows", ctypes.c_int64),
    )


@pytest.mark.parametrize("kind", GgmlType)
def test_matrix_types_are_those_of_the_engine(kind):
    library = ctypes.CDLL(str(next(Path(llama_cpp.__file__).parent.glob("lib/libggml-cpu.*"))))
    library.ggml_get_type_traits_cpu.restype = ctypes.POINTER(_Traits)
    traits = library.ggml_get_type_traits_cpu(int(kind)).contents
    assert kind.multiplies is (traits.vec_dot is not None)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"experts": 4, "used": 5}, "top-k 5 is larger than its 4 experts"),
        ({"experts": None, "used": None}, "zero experts"),
        ({"experts": 4, "used": None}, "uses none of them"),
        ({"experts": 4, "used": 0}, "uses none of them"),
        ({"layers": 0}, "0 layers"),
        ({"extra": lambda writer: writer.add_expert_group_count(4)}, "4 groups of 4 experts"),
        ({"extra": lambda writer: writer.add_expert_group_count(3)}, "3 groups of which 0"),
    ],
)
def test_counts_on_which_the_engine_would_abort(tmp_path, keywords, message):
    with pytest.raises(ModelFileError, match=message):
        GgufFile.open(write_moe(tmp_path / "bad.gguf", **keywords))


def test_a_stack_of_another_number_of_experts(moe, tmp_path):
    good = bytearray(moe.read_bytes())
    key = b"llama.expert_count"
    struct.pack_into("<I", good, good.index(key) + len(key) + 4, 8)
    (tmp_path / "bad.gguf").write_bytes(good)
    with pytest.raises(ModelFileError, match="holds 4 experts instead of 8"):
        GgufFile.open(tmp_path / "bad.gguf")


def test_a_dense_model_opens_and_is_refused_where_experts_are_needed(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "dense.gguf", "llama")
    writer.add_block_count(1)
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = GgufFile.open(tmp_path / "dense.gguf")
    assert not model.is_moe
    assert model.moe_layers == ()
    with pytest.raises(DenseModelError, match="dense"):
        model.require_moe()


# --- several parts ------------------------------------------------------------------------------------------------


@pytest.fixture
def parts(tmp_path):
    """A model in three parts, as `gguf-split` names and numbers them."""
    paths = []
    for index in range(3):
        path = tmp_path / f"tiny-{index + 1:05d}-of-00003.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        if index == 0:
            writer.add_block_count(3)
            writer.add_expert_count(4)
            writer.add_expert_used_count(2)
        writer.add_uint16("split.no", index)
        writer.add_uint16("split.count", 3)
        writer.add_int32("split.tensors.count", 6)
        for role in ("up", "down"):
            name = f"blk.{index}.ffn_{role}_exps.weight"
            writer.add_tensor(name, np.full((4, 8, 8), index + 1, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    return paths


def test_parts_are_one_model(parts):
    model = GgufFile.open(parts[0])
    assert model.files == tuple(parts)
    assert model.moe_layers == (0, 1, 2)
    assert model.n_bytes == sum(path.stat().st_size for path in parts)
    for layer in range(3):
        path, offset, size = model.expert_range(model.expert_tensors(layer)[1], 3)
        assert path == parts[layer]
        assert np.frombuffer(path.read_bytes()[offset : offset + size], np.float32).tolist() == [layer + 1.0] * 64


def test_a_later_part_points_to_the_first(parts):
    with pytest.raises(ModelFileError, match="part 2 of 3") as raised:
        GgufFile.open(parts[1])
    assert "tiny-00001-of-00003.gguf" in raised.value.hint


def test_a_missing_part_is_named(parts):
    parts[2].unlink()
    with pytest.raises(ModelFileError, match=r"part 3 of 3 is missing: .*tiny-00003-of-00003\.gguf"):
        GgufFile.open(parts[0])


def test_parts_in_the_wrong_place_are_noticed(parts):
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ModelFileError, match=r"tiny-00002-of-00003\.gguf is not part 2 of 3"):
        GgufFile.open(parts[0])


def test_a_renamed_first_part(parts, tmp_path):
    parts[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match="part 1 of 3 and its name does not say so"):
        GgufFile.open(tmp_path / "model.gguf")


def test_parts_joined_by_cat(parts, tmp_path):
    (tmp_path / "joined.gguf").write_bytes(b"".join(path.read_bytes() for path in parts))
    with pytest.raises(ModelFileError, match="joined end to end") as raised:
        GgufFile.open(tmp_path / "joined.gguf")
    assert "merge" in raised.value.hint


def test_one_of_one_is_an_ordinary_file(tmp_path):
    def single(writer):
        writer.add_uint16("split.no", 0)
        writer.add_uint16("split.count", 1)

    path = write_moe(tmp_path / "tiny-00001-of-00001.gguf", extra=single)
    assert GgufFile.open(path).files == (path,)


# --- size and speed ---------------------------------------------------------------------------------------------


def test_a_large_vocabulary_and_thousands_of_tensors_open_quickly_and_lazily(tmp_path):
    path = tmp_path / "large.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(4)
    writer.add_array("tokenizer.ggml.tokens", [f"token {index}" for index in range(250_000)])
    writer.add_array("tokenizer.ggml.token_type", list(range(250_000)))
    for index in range(5000):
        writer.add_tensor(f"blk.{index}.some.weight", np.zeros(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    started = time.perf_counter()
    model = GgufFile.open(path)
    took = time.perf_counter() - started
    assert len(model.tensors) == 5000
    assert model.metadata.length("tokenizer.ggml.tokens") == 250_000
    tokens = model.metadata["tokenizer.ggml.tokens"]
    assert (tokens[0], tokens[-1]) == ("token 0", "token 249999")
    # gguf-py takes seconds; this is a bound against quadratic work, not a measurement.
    assert took < 3.0


class Counted:
    """A file that counts its reads, as a server would see them."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.reads: list[tuple[int, int]] = []

    def seek(self, offset: int) -> int:
        self.at = offset
        return offset

    def read(self, size: int) -> bytes:
        self.reads.append((self.at, size))
        return self.data[self.at : self.at + size]


@pytest.mark.parametrize("window", [1, 7, 64, 4096, 1 << 20])
def test_the_window_changes_nothing(moe, window):
    data = moe.read_bytes()
    assert parse_header(Counted(data), moe, len(data), window=window) == read_header(moe)


def test_little_is_read_beyond_a_header_and_in_few_pieces(tmp_path):
    """What counts when the file lies on a server."""

    def vocabulary(writer):
        writer.add_array("tokenizer.ggml.other", [f"token number {index % 977}" for index in range(100_000)])

    path = write_moe(tmp_path / "vocabulary.gguf", layers=40, extra=vocabulary)
    file = Counted(path.read_bytes())
    header = parse_header(file, path, len(file.data), window=8192)
    assert max(at + size for at, size in file.reads) <= header.data_at + 16_384
    assert len(file.reads) < 30
    assert header.data_at > 2_000_000


# --- versions, byte order, what may be missing --------------------------------------------------------------------


def test_version_2_reads_like_3(moe, tmp_path):
    data = bytearray(moe.read_bytes())
    struct.pack_into("<I", data, 4, 2)
    (tmp_path / "old.gguf").write_bytes(data)
    old, new = GgufFile.open(tmp_path / "old.gguf"), GgufFile.open(moe)
    assert old.headers[0].version == 2
    assert dict(old.tensors) == dict(new.tensors)
    assert old.header_sha256 == new.header_sha256


def test_a_big_endian_file_is_refused_in_words(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_block_count(1)
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match="big-endian") as raised:
        GgufFile.open(tmp_path / "big.gguf")
    assert "little-endian" in raised.value.hint


def test_optional_keys_may_be_missing(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "bare.gguf", "llama")
    writer.add_expert_count(2)
    writer.add_expert_used_count(1)
    writer.add_tensor("blk.0.ffn_up_exps.weight", np.zeros((2, 4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = GgufFile.open(tmp_path / "bare.gguf")
    assert (model.name, model.n_layer, model.moe_layers, model.top_k) == ("bare", 0, (0,), 1)
    assert model.number("context_length", 0) == 0


def test_a_tensor_larger_than_the_file_is_named(moe, tmp_path):
    good = bytearray(moe.read_bytes())
    name = b"blk.1.ffn_down_exps.scale"  # the last one: nothing behind it contradicts its size
    struct.pack_into("<Q", good, good.index(name) + len(name) + 4, 4_000_000)
    (tmp_path / "bad.gguf").write_bytes(good)
    with pytest.raises(ModelFileError, match=r"truncated: \d+ of \d+ bytes are missing"):
        GgufFile.open(tmp_path / "bad.gguf")
    name = b"blk.1.ffn_up_exps.weight"
    good = bytearray(moe.read_bytes())
    struct.pack_into("<Q", good, good.index(name) + len(name) + 4, 64)
    (tmp_path / "bad.gguf").write_bytes(good)
    with pytest.raises(ModelFileError, match="overlaps"):
        GgufFile.open(tmp_path / "bad.gguf")


@pytest.mark.parametrize("bad", [b"\n", b"\x1b", b"\x00", b"\x7f"])
def test_names_that_would_spoil_a_terminal_are_refused(moe, tmp_path, bad):
    for name in (b"blk.1.attn_norm.weight", b"llama.block_count"):
        data = moe.read_bytes().replace(name, name[:4] + bad + name[5:])
        (tmp_path / "bad.gguf").write_bytes(data)
        with pytest.raises(ModelFileError, match="not printable") as raised:
            GgufFile.open(tmp_path / "bad.gguf")
        assert bad.decode() not in str(raised.value)
