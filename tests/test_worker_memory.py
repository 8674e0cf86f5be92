"""A worker in a machine, or a control group, with less memory than its experts take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from orchestrator.engine.synth import synth
from orchestrator.gateway.backbone import open_backbone
from orchestrator.models.gguf import GgufFile

LIMIT = 192 << 20  # bytes; the process itself takes some 100 MB of it
WORKER = (sys.executable, "-m", "orchestrator", "worker")
GROUPS = Path("/sys/fs/cgroup")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "model.gguf"
    synth("qwen3moe", path, n_layer=2, n_ff_exp=9216)
    file = GgufFile.open(path)
    assert sum(file.bytes_per_expert(layer) for layer in file.moe_layers) * file.n_expert > LIMIT
    return path


@pytest.fixture
def group() -> Iterator[list[str]]:
    """A command that joins a control group with little memory and becomes the command behind it."""
    version_1 = (GROUPS / "memory").is_dir()
    place = (GROUPS / "memory" if version_1 else GROUPS) / f"linkcpp-test-{os.getpid()}"
    try:
        place.mkdir()
    except OSError as error:
        pytest.skip(f"needs a control group of its own: {error}")
    try:
        try:
            (place / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(LIMIT))
        except OSError as error:
            pytest.skip(f"needs a control group that limits memory: {error}")
        yield ["sh", "-c", f'echo $$ > {place}/cgroup.procs && exec "$@"', "sh"]
    finally:
        place.rmdir()


def forget(path: Path) -> None:
    """Take the file out of the page cache, so that its pages are the reader's."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_more_experts_than_memory_are_refused_before_they_are_read(model: Path, group: list[str]) -> None:
    done = subprocess.run([*group, *WORKER, model], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "of memory, and" in done.stderr
    assert "--mmap" in done.stderr


def test_mapped_experts_larger_than_memory_give_the_bytes_of_one_process(model: Path, group: list[str]) -> None:
    tokens = [5, 17, 3, 50, 9, 41, 7, 7, 100, 2, 64, 11] * 4
    with open_backbone(model, n_ctx=64) as alone:
        wanted = alone.session.decode(tokens, all_logits=True)
    forget(model)
    command = [*group, *WORKER, model, "--mmap", "--json", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout is not None
            line = worker.stdout.readline()
            assert line, worker.communicate()[1]
            with open_backbone(model, [json.loads(line)["address"]], n_ctx=64) as star:
                assert np.array_equal(star.session.decode(tokens, all_logits=True), wanted)
        finally:
            worker.terminate()
            errors = worker.communicate()[1]
    assert worker.returncode == 0
    assert "loading" in errors, "a load that may take long shows how far it is"
