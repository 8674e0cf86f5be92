"""Upcycling: exact bytes against gguf-py's dequantisation, the dense function in numpy, and the real model."""

from __future__ import annotations

from functools import partial

import gguf
import numpy as np
import pytest
from test_models_sources import write_dense

from orchestrator.errors import DownloadError, InputError
from orchestrator.models.ggml_types import GgmlType
from orchestrator.models.gguf import GgufFile, raw_entries
from orchestrator.models.gguf_writer import PlannedTensor, file_bytes, write_gguf
from orchestrator.models.sources import get_model
from orchestrator.models.upcycle import SCALE_PLACES, multiply_scales, plan_upcycle, upcycle

PLAIN = (GgmlType.F32, GgmlType.F16, GgmlType.BF16)


def tensor_rows(model, name):
    """Return a tensor as F32 by gguf-py, fastest dimension last."""
    info = model.tensors[name]
    raw = np.frombuffer(b"".join(file_bytes(model.files[info.file_index], info)), np.uint8)
    rows = raw.reshape(-1, info.type.bytes_of(info.shape[0]))
    values = gguf.dequantize(rows, gguf.GGMLQuantizationType(int(info.type)))
    return values.reshape([*reversed(info.shape)]).astype(np.float64)


def random_blocks(kind, rows, columns, seed=1):
    """Return random but finite blocks of a type: any bits are valid quants, scales are small numbers."""
    numbers = np.random.default_rng(seed)
    if kind in PLAIN:
        values = numbers.standard_normal((rows, columns)).astype(np.float32)
        if kind is GgmlType.F16:
            values = values.astype(np.float16)
        if kind is GgmlType.BF16:
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(rows, -1)
        return values.view(np.uint8).reshape(rows, -1)
    blocks = numbers.integers(0, 256, (rows * columns // kind.block_size, kind.block_bytes), np.uint8)
    for place in SCALE_PLACES[kind]:
        scales = (numbers.standard_normal(len(blocks)) * 10.0 ** numbers.integers(-6, 2, len(blocks))).astype("<f2")
        blocks[:, place : place + 2] = scales[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", [*PLAIN, *SCALE_PLACES])
def test_scaled_blocks_are_exactly_the_multiple(kind):
    """The oracle is gguf-py's dequantisation; its F32 products by a power of two round nowhere."""
    rows = random_blocks(kind, 4, 512)
    number = gguf.GGMLQuantizationType(int(kind))
    scaled = multiply_scales(rows, kind, 8, "t")
    expected = gguf.dequantize(rows, number) * np.float32(8)
    assert gguf.dequantize(scaled, number).tobytes() == expected.tobytes()
    assert np.isfinite(expected).all()
    assert np.abs(expected).max() > 0
    if kind not in PLAIN:  # nothing but the scales was touched
        blocks = (scaled != rows).reshape(-1, kind.block_bytes).any(axis=0)
        allowed = {place + byte for place in SCALE_PLACES[kind] for byte in (0, 1)}
        assert set(np.flatnonzero(blocks)) <= allowed


@pytest.mark.parametrize("kind", [GgmlType.Q4_1, GgmlType.F16, GgmlType.Q6_K])
def test_a_scale_that_would_overflow_is_refused(kind):
    rows = random_blocks(kind, 1, 256)
    at = SCALE_PLACES.get(kind, (0,))[-1]
    rows = rows.copy()
    rows[0, at : at + 2] = np.frombuffer(np.float16(9000).tobytes(), np.uint8)
    multiply_scales(rows, kind, 4, "t")
    with pytest.raises(InputError, match=r"blk\.0.*times 8 is beyond the range"):
        multiply_scales(rows, kind, 8, "blk.0")


def silu(values):
    return values / (1 + np.exp(-values))


def dense_ffn(model, layer, x):
    gate, up, down = (tensor_rows(model, f"blk.{layer}.ffn_{role}.weight") for role in ("gate", "up", "down"))
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def moe_ffn(model, layer, x):
    """Do what upstream's build_moe_ffn does for architecture llama; return the result and the chosen experts."""
    router = tensor_rows(model, f"blk.{layer}.ffn_gate_inp.weight")
    gate, up, down = (tensor_rows(model, f"blk.{layer}.ffn_{role}_exps.weight") for role in ("gate", "up", "down"))
    # One sum per row: equal rows then tie exactly, as in ggml; a BLAS matrix product promises no such thing.
    logits = np.array([[float(np.sum(token * row)) for row in router] for token in x])
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    chosen = np.argsort(-probabilities, axis=1, kind="stable")[:, : model.top_k]
    result = np.zeros_like(x)
    for token in range(len(x)):
        weights = probabilities[token, chosen[token]]
        for expert, weight in zip(chosen[token], weights / weights.sum(), strict=True):
            hidden = silu(gate[expert] @ x[token]) * (up[expert] @ x[token])
            result[token] += weight * (down[expert] @ hidden)
    return result, chosen


@pytest.mark.parametrize(("shards", "copies"), [(2, 2), (4, 2), (8, 3), (1, 4), (4, 1)])
def test_the_experts_compute_the_dense_function(tmp_path, shards, copies):
    dense_path = write_dense(tmp_path / "dense.gguf")
    upcycle(dense_path, tmp_path / "moe.gguf", shards, copies, 3)
    dense, moe = GgufFile.open(dense_path), GgufFile.open(tmp_path / "moe.gguf")
    assert (moe.n_expert, moe.top_k, moe.moe_layers) == (shards * copies, shards, (0, 1))
    assert moe.number("feed_forward_length", 0) == 64 // shards
    assert moe.metadata["tokenizer.chat_template"] == "{{ messages }}"
    plan = plan_upcycle(dense, shards, copies, 3)
    x = np.random.default_rng(2).standard_normal((40, 32))
    used = set()
    for layer in range(2):
        result, chosen = moe_ffn(moe, layer, x)
        np.testing.assert_allclose(result, dense_ffn(dense, layer, x), rtol=1e-12, atol=1e-12)
        places = np.array(plan.order(layer))[chosen]
        assert (np.sort(places % shards, axis=1) == np.arange(shards)).all()  # every shard once
        assert (places // shards == places[:, :1] // shards).all()  # all of one copy
        used |= {(layer, int(copy)) for copy in places[:, 0] // shards}
    assert len(used) == 2 * copies  # and every copy is some token's


def test_quantised_weights_are_moved_and_not_quantised_again(tmp_path):
    dense_path = write_dense(tmp_path / "dense.gguf", layers=1, embedding=64, ff=512)
    source = GgufFile.open(dense_path)

    def planned(info, kind):
        data = random_blocks(kind, info.shape[1], info.shape[0], seed=len(info.name)).tobytes()
        return PlannedTensor(info.name, kind, info.shape, lambda: [data])

    for kind in (GgmlType.Q4_1, GgmlType.Q8_0, GgmlType.F16):
        tensors = [
            planned(info, kind)
            if "ffn_" in info.name and "norm" not in info.name
            else PlannedTensor(info.name, info.type, info.shape, partial(file_bytes, dense_path, info))
            for info in source.tensors.values()
        ]
        write_gguf(tmp_path / "quantised.gguf", list(raw_entries(source.headers[0])), tensors, alignment=32)
        upcycle(tmp_path / "quantised.gguf", tmp_path / "moe.gguf", 4, 2, 0)
        dense, moe = GgufFile.open(tmp_path / "quantised.gguf"), GgufFile.open(tmp_path / "moe.gguf")
        order = plan_upcycle(dense, 4, 2, 0).order(0)
        for role in ("gate", "up", "down"):
            experts = tensor_rows(moe, f"blk.0.ffn_{role}_exps.weight")
            whole = tensor_rows(dense, f"blk.0.ffn_{role}.weight")
            assert moe.tensors[f"blk.0.ffn_{role}_exps.weight"].type is kind
            for expert, place in enumerate(order):
                part = slice(place % 4 * 128, (place % 4 + 1) * 128)
                expected = 4 * whole[:, part] if role == "down" else whole[part]
                assert (experts[expert] == expected).all()


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(tmp_path):
    dense = write_dense(tmp_path / "dense.gguf")
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        upcycle(dense, tmp_path / name, 2, 2, seed)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()


def refused(tmp_path, message, shards=4, copies=2, **keywords):
    path = write_dense(tmp_path / "dense.gguf", **keywords)
    with pytest.raises(InputError, match=message) as raised:
        upcycle(path, tmp_path / "moe.gguf", shards, copies)
    assert not (tmp_path / "moe.gguf").exists()
    return raised.value


def test_what_has_no_exact_form_is_refused(tmp_path):
    refused(tmp_path, "3 shards: it must be a power of two", shards=3)
    refused(tmp_path, "0 copies", copies=0)
    refused(tmp_path, "1 shards x 1 copies", shards=1, copies=1)
    refused(tmp_path, "60 neurons cannot be cut into 8", shards=8, ff=60)
    refused(tmp_path, "architecture 'qwen2' is not llama", architecture="qwen2")
    refused(
        tmp_path, r"blk\.0\.ffn_up\.bias has no counterpart", extra={"blk.0.ffn_up.bias": np.zeros(64, np.float32)}
    )
    refused(tmp_path, r"blk\.5\.ffn_gate\.scale", extra={"blk.5.ffn_gate.scale": np.zeros(1, np.float32)})
    dense = write_dense(tmp_path / "dense.gguf")
    upcycle(dense, tmp_path / "once.gguf", 2, 2)
    with pytest.raises(InputError, match="it has experts already"):
        upcycle(tmp_path / "once.gguf", tmp_path / "twice.gguf", 2, 2)
    with pytest.raises(InputError, match="is the dense model itself"):
        upcycle(dense, dense, 2, 2)


def test_blocks_are_not_cut(tmp_path):
    dense_path = write_dense(tmp_path / "dense.gguf", layers=1, embedding=32, ff=128)
    source = GgufFile.open(dense_path)
    tensors = []
    for info in source.tensors.values():
        kind = GgmlType.Q8_0 if "ffn_down" in info.name else info.type
        data = random_blocks(kind, info.shape[1], info.shape[0]).tobytes() if kind is GgmlType.Q8_0 else None
        source_data = partial(file_bytes, dense_path, info)
        tensors.append(PlannedTensor(info.name, kind, info.shape, (lambda d=data: [d]) if data else source_data))
    write_gguf(tmp_path / "q8.gguf", list(raw_entries(source.headers[0])), tensors, alignment=32)
    upcycle(tmp_path / "q8.gguf", tmp_path / "moe.gguf", 4, 2)
    with pytest.raises(InputError, match="shards of 16 neurons would cut Q8_0's blocks of 32") as raised:
        upcycle(tmp_path / "q8.gguf", tmp_path / "moe8.gguf", 8, 2)
    assert raised.value.hint == "use at most 4 shards that divide 128"


# --- the real model, by the engine --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def default_models():
    try:
        return get_model("smollm2"), get_model("smollm2-moe")
    except DownloadError as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")


TEXT = """\
The lighthouse stood at the end of the long grey pier, and every evening at dusk the keeper climbed its one hundred
and forty-two steps to light the lamp. "It is not the storm that sinks ships," he used to say, "it is the calm that
makes sailors careless." Nobody in the village had ever seen him leave the island, yet each spring there were new
tulips in front of his door: red, yellow and one that was almost black.

def median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2

La mer était calme ce matin-là, et les pêcheurs parlaient peu. Am Hafen roch es nach Salz und frischem Brot. In 1847
the company paid 3,250 pounds for 12.5 acres of marsh; 60 years later the same land was worth forty times as much.
Questions: (a) What did the keeper plant? (b) How many steps did he climb? (c) Why, in his view, do ships sink? Answer
each in one sentence, and give a reason for the third. He would have answered without looking up from the lamp,
slowly, as if each word had to be carried up the stairs, one by one, and set down before the next could be fetched.

Dear Margaret, thank you for the parcel. The tea arrived dry, the biscuits less so, and the almanac will be of use as
soon as somebody here learns to read the tables on page 88. Two of the windows on the north side were broken by gulls
in the night of the 14th; I have put boards in their place until the glazier comes. Please tell your brother that his
barometer is right more often than the newspaper, and that he still owes me four shillings.
"""


def engine_logits(path, text):
    """Return the logits [tokens, vocabulary] of a text in one micro-batch, straight from llama.cpp's C API."""
    llama_cpp = pytest.importorskip("llama_cpp")
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    assert model
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    tokens = (llama_cpp.llama_token * 512)()
    raw = text.encode()
    count = llama_cpp.llama_tokenize(vocabulary, raw, len(raw), tokens, 512, True, False)
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = 512
    parameters.n_threads = parameters.n_threads_batch = 2
    context = llama_cpp.llama_init_from_model(model, parameters)
    batch = llama_cpp.llama_batch_init(count, 0, 1)
    batch.n_tokens = count
    for index in range(count):
        batch.token[index], batch.pos[index], batch.logits[index] = tokens[index], index, 1
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
    assert llama_cpp.llama_decode(context, batch) == 0
    width = llama_cpp.llama_vocab_n_tokens(vocabulary)
    logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (count, width)).astype(np.float64)
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return logits


def agreement(ours, theirs):
    """Return cosine min, cosine mean and the share of equal argmax over positions."""
    cosine = (ours * theirs).sum(axis=1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
    return cosine.min(), cosine.mean(), (ours.argmax(axis=1) == theirs.argmax(axis=1)).mean()


def as_f16(source, destination):
    """Write a model with all its matrices in F16, so that activations are not quantised."""
    model = GgufFile.open(source)

    def data(info):
        return [tensor_rows(model, info.name).astype(np.float16).tobytes()]

    tensors = [
        PlannedTensor(info.name, info.type, info.shape, partial(file_bytes, model.path, info))
        if info.type is GgmlType.F32
        else PlannedTensor(info.name, GgmlType.F16, info.shape, partial(data, info))
        for info in model.tensors.values()
    ]
    write_gguf(destination, list(raw_entries(model.headers[0])), tensors, alignment=32)


def test_the_default_model_is_what_its_row_says(default_models):
    model = GgufFile.open(default_models[1])
    assert (model.architecture, model.n_expert, model.top_k, model.n_layer) == ("llama", 16, 8, 30)
    assert model.moe_layers == tuple(range(30))
    assert model.number("feed_forward_length", 0) == 192
    assert (
        model.metadata["tokenizer.chat_template"]
        == GgufFile.open(default_models[0]).metadata["tokenizer.chat_template"]
    )


def test_the_default_model_answers_as_the_dense_one(default_models):
    """On Q4_1 the order of additions shows (the engine against itself: cosine mean 0.9995), hence these bounds."""
    dense, moe = (engine_logits(path, TEXT) for path in default_models)
    assert len(dense) > 400
    cosine_min, cosine_mean, argmax = agreement(dense, moe)
    print(f"Q4_1, {len(dense)} positions: cosine min {cosine_min:.6f} mean {cosine_mean:.6f}, argmax {argmax:.4f}")
    assert cosine_mean > 0.999
    assert cosine_min > 0.97
    assert argmax > 0.9


def test_on_f16_weights_it_is_the_dense_function(default_models, tmp_path):
    as_f16(default_models[0], tmp_path / "dense.gguf")
    upcycle(tmp_path / "dense.gguf", tmp_path / "moe.gguf", 8, 2, 0)
    dense, moe = (engine_logits(tmp_path / name, TEXT) for name in ("dense.gguf", "moe.gguf"))
    cosine_min, cosine_mean, argmax = agreement(dense, moe)
    print(f"F16, {len(dense)} positions: cosine min {cosine_min:.7f} mean {cosine_mean:.7f}, argmax {argmax:.4f}")
    assert cosine_min > 0.9999
    assert argmax == 1.0
