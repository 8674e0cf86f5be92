"""Prompts of every awkward length, around a micro-batch and far beyond, equal the oracle under a memory limit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.engine.synth import synth
from orchestrator.workers.local import LocalWorkers

MEMORY = 3 << 30  # address space of the process that decodes, in bytes

DECODE = """
import hashlib, json, resource, sys
import numpy as np
limit, path, longest, *addresses = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_AS, (int(limit), int(limit)))
from orchestrator.gateway.backbone import open_backbone
from orchestrator.types import Contract
lengths = json.loads(longest)
n_ctx = max(lengths) + 8
with open_backbone(path, addresses, contract=Contract.EXACT, n_ctx=n_ctx, n_threads=1) as backbone:
    tokens = [int(t) for t in np.random.default_rng(1).integers(3, backbone.model.n_vocab, n_ctx)]
    for length in lengths:
        backbone.session.clear()
        logits = [backbone.session.decode(tokens[:length]), backbone.session.decode(tokens[length : length + 1])]
        print(length, hashlib.sha256(b"".join(row.tobytes() for row in logits)).hexdigest())
"""


def digests(path: Path, lengths: tuple[int, ...], *addresses: str) -> list[str]:
    command = [sys.executable, "-c", DECODE, str(MEMORY), str(path), json.dumps(lengths), *addresses]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param((1, 31, 32, 33, 511, 512, 513, 2048), id="short"),
        pytest.param((4097, 30_000), id="long", marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
def test_every_length_equals_one_process(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    path = tmp_path / "model.gguf"
    synth("qwen3moe", path, n_layer=1 if max(lengths) > 4096 else 2)  # attention over 30,000 tokens takes its time
    with LocalWorkers(path, 2) as workers:
        star = digests(path, lengths, *workers.addresses)
    assert len(star) == len(lengths)
    assert len({line.split()[1] for line in star}) == len(lengths), "each length has logits of its own"
    assert star == digests(path, lengths)
