"""A worker process on a share of a model: a slice file, or an address from which it downloads its experts only."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from orchestrator.engine.model import Model
from orchestrator.engine.session import Session
from orchestrator.gateway.backbone import open_backbone
from orchestrator.models.checksums import Checksums
from orchestrator.models.gguf import GgufFile
from orchestrator.models.slices import Selection, write_slice
from orchestrator.types import FloatArray
from tests.range_server import Fault, RangeServer, serving
from tests.test_workers_process import started

TOKENS = [5, 17, 3, 250, 9, 41, 7, 7, 100, 2, 64, 11]


def in_parts(path: Path, folder: Path, count: int) -> Path:
    """Split a model as `gguf-split` does; return the first part."""
    reader, file = gguf.GGUFReader(path), GgufFile.open(path)
    tensors = list(reader.tensors)
    step = -(-len(tensors) // count)
    for index in range(count):
        part = folder / f"{path.stem}-{index + 1:05d}-of-{count:05d}.gguf"
        writer = gguf.GGUFWriter(part, file.architecture)
        if index == 0:
            for key, field in reader.fields.items():
                if not key.startswith("GGUF.") and key != "general.architecture":
                    sub = field.types[1] if len(field.types) > 1 else None
                    writer.add_key_value(key, field.contents(), field.types[0], sub)
        writer.add_uint16("split.no", index)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(tensors))
        for tensor in tensors[index * step : (index + 1) * step]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return folder / f"{path.stem}-00001-of-{count:05d}.gguf"


@pytest.fixture
def model(synthetic: Callable[[str], Path]) -> Path:
    return synthetic("qwen2moe")


def alone(path: Path) -> FloatArray:
    with Model.open(path) as model, Session(model, n_ctx=64) as session:
        return session.decode(TOKENS, all_logits=True)


def over(backbone: Path, *addresses: object) -> FloatArray:
    with open_backbone(backbone, [str(address) for address in addresses], n_ctx=64) as opened:
        return opened.session.decode(TOKENS, all_logits=True)


def test_workers_on_slices_and_a_backbone_without_experts_give_the_same_bytes(model: Path, tmp_path: Path) -> None:
    file = GgufFile.open(model)
    middle = file.n_expert // 2
    write_slice(model, tmp_path / "low.gguf", Selection(experts=range(middle)))
    write_slice(model, tmp_path / "high.gguf", Selection(experts=range(middle, file.n_expert)))
    write_slice(model, tmp_path / "backbone.gguf", Selection(without_experts=True))
    with started(tmp_path / "low.gguf") as (_, low), started(tmp_path / "high.gguf") as (_, high):
        assert low["owned"] == [{"layers": f"0-{file.n_layer - 1}", "experts": f"0-{middle - 1}"}]
        assert low["pairs"] == low["pairs_in_model"] / 2
        got = over(tmp_path / "backbone.gguf", low["address"], high["address"])
    assert got.tobytes() == alone(model).tobytes()


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "LINKCPP_CACHE": str(tmp_path / "cache"), "LINKCPP_DATA": str(tmp_path / "data")}


def test_workers_download_their_experts_only_through_cut_connections(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "served"
    folder.mkdir()
    first = in_parts(model, folder, 3)
    file = GgufFile.open(first)
    Checksums.compute(file).save(folder / f"{first.name}.manifest.json.gz")
    middle = file.n_expert // 2
    for name in ("cache", "data"):
        (tmp_path / name).mkdir()
    with serving(folder) as server:
        server.fail = lambda asked: Fault(drop_after=100_000)
        url, env = server.url(first.name), environment(tmp_path)
        with (
            started(url, "--experts", f"0-{middle - 1}", env=env) as (_, low),
            started(url, "--experts", f"{middle}-{file.n_expert - 1}", env=env) as (_, high),
        ):
            sent = sum(count for name, count in server.sent.items() if name.endswith(".gguf"))
            got = over(first, low["address"], high["address"])
        experts = sum(info.n_bytes for layer in file.moe_layers for info in file.expert_tensors(layer))
        headers = sum(header.data_at + 8192 for header in file.headers)
        assert low["bytes_read"] == high["bytes_read"] == experts // 2
        assert experts <= sent <= 1.01 * experts + 2 * headers
        assert got.tobytes() == alone(first).tobytes()
        started_again_without_a_server(server, url, f"0-{middle - 1}", env, low["bytes_read"])


def started_again_without_a_server(
    server: RangeServer, url: str, experts: str, env: dict[str, str], expected: object
) -> None:
    before = server.total_sent
    with started(url, "--experts", experts, env=env) as (_, again):
        assert again["bytes_read"] == expected
    assert server.total_sent - before < 200_000  # first bytes of the headers and the manifest
    server.fail = lambda asked: Fault(status=404)
    with started(url, "--experts", experts, env=env) as (_, again):
        assert again["bytes_read"] == expected


def test_the_parts_are_the_model(model: Path, tmp_path: Path) -> None:
    whole, parts = GgufFile.open(model), GgufFile.open(in_parts(model, tmp_path, 3))
    assert len(parts.files) == 3
    assert list(parts.tensors) == list(whole.tensors)
    for name, info in whole.tensors.items():
        part = parts.tensors[name]
        theirs = np.memmap(parts.files[part.file_index], np.uint8, "r", part.offset, (part.n_bytes,))
        assert np.array_equal(theirs, np.memmap(model, np.uint8, "r", info.offset, (info.n_bytes,)))
