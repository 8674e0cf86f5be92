"""Stages that download their own layers only, from wherever the model is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from range_server import serving
from ring_models import batches, decode_all, same, tokens_of, whole
from test_deploy import deploy, written

from orchestrator.engine.identity import engine_identity
from orchestrator.engine.stage import StageSizes
from orchestrator.models.deployment import Deployment, StageEntry, WorkerEntry, read_deployment
from orchestrator.models.gguf import GgufFile
from orchestrator.models.gguf_manifest import is_expert_tensor
from orchestrator.ring.client import Ring
from orchestrator.ring.layout import LayerRange
from orchestrator.types import FloatArray

ROOT = Path(__file__).parent.parent
ANY = "127.0.0.1:0"


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of our own for what is downloaded; the served model lies beside them."""
    for name, variable in (("cache", "LINKCPP_CACHE"), ("data", "LINKCPP_DATA")):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / name))
    (tmp_path / "served").mkdir()
    return tmp_path


def serve_and_expect(path: Path, folders: Path) -> tuple[list[int], list[FloatArray]]:
    """Put a model where it is served; return a text and the logits that one process gives for it."""
    (folders / "served" / "model.gguf").symlink_to(path)
    with whole(path, StageSizes(n_ctx=256)) as context:
        tokens = tokens_of(context.model.n_vocab, 44)
        expected = decode_all(context, list(batches(tokens, (40,), context.n_batch)))
        return tokens, expected


@pytest.mark.parametrize("architecture", ["step35", pytest.param("kimi-k3", marks=pytest.mark.slow)])
def test_each_stage_downloads_its_own_layers_only(
    synthetic: Callable[[str], Path], folders: Path, architecture: str
) -> None:
    path = synthetic(architecture)
    file = GgufFile.open(path)
    n_layer = file.n_layer
    cuts = (0, 2, 5, n_layer)
    tokens, expected = serve_and_expect(path, folders)
    with serving(folders / "served") as server:
        plan = Deployment(
            model=server.url("model.gguf"),
            context=256,
            stages=tuple(
                StageEntry(f"stage-{i}", (span,), ANY)
                for i, span in enumerate(zip(cuts, cuts[1:], strict=False), 1)  # noqa: RUF007
            ),
            # the experts of the second stage are on a worker, and so are their bytes
            workers=(WorkerEntry("experts", None, "2-4", ANY, stage="stage-2"),),
        )
        with deploy("--local", written(folders / "d.toml", plan)) as deployed:
            found = read_deployment(Path(str(deployed.ready["deployment"])))
            assert found.model == plan.model
            ring = Ring(
                [stage.address for stage in found.stages],
                identity=engine_identity(),
                model_sha256=file.header_sha256,
            )
            with ring:
                got = [ring.decode(batch) for batch in batches(tokens, (40,), ring.facts.n_batch)]
        assert same(got, expected)
        sent = server.total_sent
    size = file.n_bytes
    assert sent < 1.1 * size + 4 * (file.headers[0].data_at + 8192), "all together fetched the model about once"
    shares = [GgufFile.open(share).tensors for share in (folders / "data" / "shares").glob("*.gguf")]
    (inner,) = [names for names in shares if "blk.2.attn_norm.weight" in names]
    assert {int(name.split(".")[1]) for name in inner if name.startswith("blk.")} == {2, 3, 4}
    assert "output.weight" not in inner
    assert not any(map(is_expert_tensor, inner))
    assert "token_embd.weight" not in inner


def test_a_process_in_reserve_downloads_the_layers_that_it_takes_over(
    synthetic: Callable[[str], Path], folders: Path
) -> None:
    path = synthetic("llama")
    file = GgufFile.open(path)
    tokens, expected = serve_and_expect(path, folders)
    with serving(folders / "served") as server:
        plan = Deployment(
            model=server.url("model.gguf"),
            context=256,
            stages=(StageEntry("stage-1", ((0, 2),), ANY), StageEntry("stage-2", ((2, 4),), ANY)),
            spares=(StageEntry("reserve", (), ANY),),
        )
        with deploy("--local", written(folders / "d.toml", plan)) as deployed:
            found = read_deployment(Path(str(deployed.ready["deployment"])))
            one, two = (stage.address for stage in found.stages)
            reserve = found.spares[0].address
            with Ring([one, two], identity=engine_identity(), model_sha256=file.header_sha256) as ring:
                before = server.total_sent
                ring.assign(reserve, [LayerRange(2, 4)])
                ring.rearrange({one: None, reserve: None})
                got = [ring.decode(batch) for batch in batches(tokens, (40,), ring.facts.n_batch)]
        fetched = server.total_sent - before
    assert same(got, expected)
    others = sum(entry.n_bytes for name, entry in file.manifest.items() if name.startswith(("blk.0.", "blk.1.")))
    assert 0 < fetched < 1.1 * (file.n_bytes - others) + 4 * (file.headers[0].data_at + 8192)


def test_a_stage_of_a_model_that_is_not_there_says_so(folders: Path) -> None:
    with serving(folders / "served") as server:
        command = [sys.executable, "-m", "orchestrator", "stage", server.url("none.gguf"), "--layers", "0:2"]
        ended = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "404" in ended.stderr
    assert "Traceback" not in ended.stderr
